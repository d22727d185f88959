"""What the bundled model must be able to do: four measurements on text and keys that training never used.

Every figure comes with its 95 % interval over rows, windows or documents.
"""

from dataclasses import dataclass
from statistics import mean

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowattn.data.retrieval import RetrievalExample, evaluation_rng, key_value_records, needle_in_filler
from shadowattn.data.text import token_windows
from shadowattn.errors import InputError
from shadowattn.evaluation.intervals import Interval, mean_interval, share_interval

SHORT_CONTEXT = 64  # tokens


@dataclass(frozen=True)
class Samples:
    """How much each check measures; the defaults are those of the model card."""

    repeat_rows: int = 16
    block_tokens: int = 128
    text_rows: int = 128
    text_tokens: int = 2048
    key_value_documents: int = 100
    key_value_pairs: int = 40
    needle_documents: int = 300
    needle_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class Checks:
    """What the four checks measured: losses in nat per token, one for each row or window, and how many answers were right."""

    first_copy_losses: list[float]
    second_copy_losses: list[float]
    early_text_losses: list[float]
    late_text_losses: list[float]
    key_value_hits: int
    key_value_documents: int
    needle_hits: int
    needle_documents: int

    @property
    def copy_gain(self) -> Interval:
        """By what share the loss falls from the first copy of a random block to the second (target: 0.6)."""
        return mean_interval([1 - b / a for a, b in zip(self.first_copy_losses, self.second_copy_losses, strict=True)])

    @property
    def context_gain(self) -> Interval:
        """By how many nat the same held-out tokens are easier after a long context than after a short one (target: 0.15)."""
        return mean_interval([a - b for a, b in zip(self.early_text_losses, self.late_text_losses, strict=True)])

    @property
    def key_value_accuracy(self) -> Interval:
        return share_interval(self.key_value_hits, self.key_value_documents, method="exact")

    @property
    def needle_accuracy(self) -> Interval:
        return share_interval(self.needle_hits, self.needle_documents, method="exact")

    def means(self) -> dict[str, float]:
        """The six figures without their intervals: what training watches."""
        return {
            "first_copy_loss": mean(self.first_copy_losses),
            "second_copy_loss": mean(self.second_copy_losses),
            "early_text_loss": mean(self.early_text_losses),
            "late_text_loss": mean(self.late_text_losses),
            "key_value_accuracy": self.key_value_hits / self.key_value_documents,
            "needle_accuracy": self.needle_hits / self.needle_documents,
        }


def measure_checks(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heldout: str, samples: Samples) -> Checks:
    """Measure all four checks with dense attention on the model's own device, in evaluation mode, on `heldout` text."""
    was_training = model.training
    model.eval()
    first, second = repeated_block_losses(model, len(tokenizer), samples)
    early, late = context_losses(model, tokenizer, heldout, samples)
    key_value, needles = key_value_examples(samples), needle_examples(tokenizer, heldout, samples)
    checks = Checks(
        first_copy_losses=first,
        second_copy_losses=second,
        early_text_losses=early,
        late_text_losses=late,
        key_value_hits=exact_matches(model, tokenizer, key_value),
        key_value_documents=len(key_value),
        needle_hits=exact_matches(model, tokenizer, needles),
        needle_documents=len(needles),
    )
    model.train(was_training)
    return checks


def repeated_block_losses(model: PreTrainedModel, vocabulary: int, samples: Samples) -> tuple[list[float], list[float]]:
    """Each row's loss on a block of random tokens and on its repetition, whose unpredictable first token is left out."""
    generator = torch.Generator().manual_seed(samples.seed)
    block = torch.randint(1, vocabulary, (samples.repeat_rows, samples.block_tokens), generator=generator)
    losses = token_losses(model, torch.cat([block, block], dim=1))
    first, second = losses[:, : samples.block_tokens - 1], losses[:, samples.block_tokens :]
    return first.mean(dim=1).tolist(), second.mean(dim=1).tolist()


def context_losses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heldout: str, samples: Samples
) -> tuple[list[float], list[float]]:
    """Each window's loss on the tokens of its second half, after 64 to 128 tokens of context and after half a window or more.

    The same tokens both times: other tokens differ more from one another than by their context.
    """
    early, late, half = [], [], samples.text_tokens // 2
    for window in heldout_windows(tokenizer, heldout, samples):
        late.append(token_losses(model, window[None])[0, half - 1 :].mean().item())
        pieces = window[half - SHORT_CONTEXT :].unfold(0, 2 * SHORT_CONTEXT, SHORT_CONTEXT)
        early.append(token_losses(model, pieces)[:, SHORT_CONTEXT - 1 :].mean().item())
    return early, late


def heldout_loss_by_position(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, heldout: str, samples: Samples
) -> torch.Tensor:
    """Mean loss (text_tokens - 1,) of predicting the token after each position of held-out windows."""
    windows = heldout_windows(tokenizer, heldout, samples)
    return torch.cat([token_losses(model, window[None]) for window in windows]).mean(dim=0)


def heldout_windows(tokenizer: PreTrainedTokenizerBase, heldout: str, samples: Samples) -> torch.Tensor:
    """Windows (rows, text_tokens) of `heldout` that do not overlap: `text_rows` of them, or as many as there are."""
    if samples.text_tokens < 2 * SHORT_CONTEXT or samples.text_tokens % (2 * SHORT_CONTEXT):
        raise InputError(f"text_tokens: expected a multiple of {2 * SHORT_CONTEXT}, got {samples.text_tokens}")
    options = {"tokens": samples.text_tokens, "windows": samples.text_rows}
    return token_windows(heldout, tokenizer, **options, source="held-out text")


def key_value_examples(samples: Samples) -> list[RetrievalExample]:
    """Records whose keys training never asked for, one question each."""
    rng = evaluation_rng(f"gates/key-value/{samples.seed}")  # another name would draw other documents than the card's
    return [key_value_records(rng, pairs=samples.key_value_pairs) for _ in range(samples.key_value_documents)]


def needle_examples(tokenizer: PreTrainedTokenizerBase, heldout: str, samples: Samples) -> list[RetrievalExample]:
    """One needle in held-out text at evenly spread depths, each prompt at most `needle_tokens` long."""
    rng = evaluation_rng(f"gates/needle/{samples.seed}")  # as above
    ids = _encode(tokenizer, heldout)
    examples = []
    for index in range(samples.needle_documents):
        # The sentence and the question take less than 32 tokens.
        start = rng.randrange(len(ids) - samples.needle_tokens)
        filler = tokenizer.decode(ids[start : start + samples.needle_tokens - 32])
        examples.append(needle_in_filler(rng, filler=filler, depth=index / max(1, samples.needle_documents - 1)))
    return examples


@torch.inference_mode()
def exact_matches(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[RetrievalExample]) -> int:
    """How many examples there are whose every answer token is the most likely one, as greedy decoding would find it."""
    hits = 0
    for example in examples:
        prompt, answer = _encode(tokenizer, example.prompt), _encode(tokenizer, example.answer)
        ids = torch.tensor([prompt + answer], device=model.device)
        likeliest = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(answer)).logits.argmax(dim=-1)
        hits += bool((likeliest[0] == ids[0, len(prompt) :]).all())
    return hits


@torch.inference_mode()
def token_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Loss (rows, tokens - 1) in nat of each token of `ids` (rows, tokens) after the first."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").cpu()


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
