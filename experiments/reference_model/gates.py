"""What the bundled model must be able to do: four measurements on text and keys that training never used."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowattn.data.retrieval import RetrievalExample, evaluation_rng, key_value_records, needle_in_filler
from shadowattn.data.stdlib import stdlib_text


@dataclass(frozen=True)
class Samples:
    """How much each gate measures; the defaults are those of the model card."""

    repeat_rows: int = 16
    block_tokens: int = 128
    text_rows: int = 48
    text_tokens: int = 2048
    key_value_documents: int = 100
    key_value_pairs: int = 40
    needle_documents: int = 60
    needle_tokens: int = 2048
    seed: int = 0


@dataclass(frozen=True)
class Gates:
    """The four gates' numbers; losses in nat per token, accuracies as fractions of exact matches."""

    first_copy_loss: float
    second_copy_loss: float
    early_text_loss: float
    late_text_loss: float
    key_value_accuracy: float
    needle_accuracy: float

    @property
    def copy_gain(self) -> float:
        """By what share the loss falls from the first copy of a random block to the second (bar: 0.6)."""
        return 1.0 - self.second_copy_loss / self.first_copy_loss

    @property
    def context_gain(self) -> float:
        """By how many nat held-out text is easier late in the window than early (bar: 0.15)."""
        return self.early_text_loss - self.late_text_loss


def measure_gates(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> Gates:
    """Measure all four gates with dense attention on the model's own device, in evaluation mode."""
    was_training = model.training
    model.eval()
    first, second = repeated_block_losses(model, len(tokenizer), samples)
    by_position = heldout_loss_by_position(model, tokenizer, samples)
    gates = Gates(
        first_copy_loss=first,
        second_copy_loss=second,
        early_text_loss=by_position[64:128].mean().item(),
        late_text_loss=by_position[samples.text_tokens // 2 :].mean().item(),
        key_value_accuracy=exact_matches(model, tokenizer, key_value_examples(samples)),
        needle_accuracy=exact_matches(model, tokenizer, needle_examples(tokenizer, samples)),
    )
    model.train(was_training)
    return gates


def repeated_block_losses(model: PreTrainedModel, vocabulary: int, samples: Samples) -> tuple[float, float]:
    """Mean loss on a block of random tokens and on its repetition, whose unpredictable first token is left out."""
    generator = torch.Generator().manual_seed(samples.seed)
    block = torch.randint(1, vocabulary, (samples.repeat_rows, samples.block_tokens), generator=generator)
    losses = token_losses(model, torch.cat([block, block], dim=1))
    return losses[:, : samples.block_tokens - 1].mean().item(), losses[:, samples.block_tokens :].mean().item()


def heldout_loss_by_position(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, samples: Samples) -> torch.Tensor:
    """Mean loss (text_tokens - 1,) of predicting the token after each position of held-out windows."""
    ids = torch.tensor(_encode(tokenizer, stdlib_text("heldout")))
    starts = torch.linspace(0, len(ids) - samples.text_tokens, samples.text_rows).long()
    rows = [ids[start : start + samples.text_tokens] for start in starts.tolist()]
    return torch.cat([token_losses(model, row[None]) for row in rows]).mean(dim=0)


def key_value_examples(samples: Samples) -> list[RetrievalExample]:
    """Records whose keys training never asked for, one question each."""
    rng = evaluation_rng(f"gates/key-value/{samples.seed}")
    return [key_value_records(rng, pairs=samples.key_value_pairs) for _ in range(samples.key_value_documents)]


def needle_examples(tokenizer: PreTrainedTokenizerBase, samples: Samples) -> list[RetrievalExample]:
    """One needle in held-out text at evenly spread depths, each prompt at most `needle_tokens` long."""
    rng = evaluation_rng(f"gates/needle/{samples.seed}")
    ids = _encode(tokenizer, stdlib_text("heldout"))
    examples = []
    for index in range(samples.needle_documents):
        # The sentence and the question take less than 32 tokens.
        start = rng.randrange(len(ids) - samples.needle_tokens)
        filler = tokenizer.decode(ids[start : start + samples.needle_tokens - 32])
        examples.append(needle_in_filler(rng, filler=filler, depth=index / max(1, samples.needle_documents - 1)))
    return examples


@torch.inference_mode()
def exact_matches(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[RetrievalExample]) -> float:
    """The share of examples whose every answer token is the most likely one, as greedy decoding would find it."""
    hits = 0
    for example in examples:
        prompt, answer = _encode(tokenizer, example.prompt), _encode(tokenizer, example.answer)
        ids = torch.tensor([prompt + answer], device=model.device)
        likeliest = model(input_ids=ids[:, :-1], use_cache=False, logits_to_keep=len(answer)).logits.argmax(dim=-1)
        hits += bool((likeliest[0] == ids[0, len(prompt) :]).all())
    return hits / len(examples)


@torch.inference_mode()
def token_losses(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Loss (rows, tokens - 1) in nat of each token of `ids` (rows, tokens) after the first."""
    ids = ids.to(model.device)
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").cpu()


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
