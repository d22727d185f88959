"""The training corpus: the standard library's text, and generated documents whose answers stand earlier in them.

A batch is a pure function of (seed, step, progress), so a resumed run sees what an uninterrupted one would have seen.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from shadowattn.data import retrieval
from shadowattn.data.stdlib import stdlib_documents

# What cannot be predicted (the first copy of random tokens, a record's words) teaches little: its loss counts less.
_UNPREDICTABLE_WEIGHT = 0.1
_ANSWER_WEIGHT = 2.0
_FIRST_REPEATED_BLOCK = 24  # tokens; the cap grows from here to half the row


@dataclass
class Mixture:
    """Shares of a batch's rows; what remains of 1 is plain text. (Not frozen: Hydra could not override it then.)"""

    random_repeats: float = 0.08
    text_repeats: float = 0.04
    key_value: float = 0.06
    needle: float = 0.06
    multi_hop: float = 0.02


@dataclass(frozen=True)
class Batch:
    """`ids` (rows, length + 1) int64 and, for every token after the first, the `weights` (rows, length) of its loss."""

    ids: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class Corpus:
    """Tokenised training text, its pieces for generated documents, and what identifies it."""

    tokens: np.ndarray
    files: tuple[str, ...]
    tokenizer: PreTrainedTokenizerBase
    sha256: str


def training_files() -> tuple[str, ...]:
    """The texts of the standard library's training split, one per file."""
    return tuple(stdlib_documents("train"))


def build_corpus(files: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Corpus:
    """Tokenise `files`, each followed by the end-of-text token."""
    end = tokenizer.eos_token_id
    encoded = tokenizer.backend_tokenizer.encode_batch(list(files), add_special_tokens=False)
    tokens = np.concatenate([np.array([*encoding.ids, end], dtype=np.int32) for encoding in encoded])
    digest = hashlib.sha256("\n\n".join(files).encode()).hexdigest()
    # Short files would leave a needle no filler to hide in.
    return Corpus(tokens, tuple(text for text in files if len(text) > 1000), tokenizer, digest)


def draw_batch(corpus: Corpus, *, seed: int, step: int, progress: float, rows: int, length: int, mixture: Mixture) -> Batch:
    """The batch of one step: `rows` rows of `length + 1` tokens, each of one kind drawn from `mixture`.

    `progress` (0 to 1) sets how long repeated random blocks may be.
    """
    rng = retrieval.training_rng(f"{seed}/{step}")
    makers = {
        "random_repeats": lambda budget: _random_repeats(corpus, rng, budget, progress),
        "text_repeats": lambda budget: _encode(corpus, _text_repeats(corpus, rng, budget), 1.0),
        "key_value": lambda budget: _encode(corpus, _key_value(rng, budget), _UNPREDICTABLE_WEIGHT),
        "needle": lambda budget: _encode(corpus, _needle(corpus, rng, budget), 1.0),
        "multi_hop": lambda budget: _encode(corpus, _multi_hop(rng, budget), _UNPREDICTABLE_WEIGHT),
    }
    shares = {name: getattr(mixture, name) for name in makers}
    ids, weights = np.zeros((rows, length + 1), np.int64), np.ones((rows, length + 1), np.float32)
    for row in range(rows):
        kind = rng.choices([*shares, "text"], [*shares.values(), 1.0 - sum(shares.values())])[0]
        if kind == "text":
            start = rng.randrange(len(corpus.tokens) - length - 1)
            ids[row] = corpus.tokens[start : start + length + 1]
        else:
            ids[row], weights[row] = _fill(makers[kind], length + 1, corpus.tokenizer.eos_token_id)
    return Batch(torch.from_numpy(ids), torch.from_numpy(weights[:, 1:]))


_Document = tuple[list[int], list[float]]


def _fill(make: Callable[[int], _Document], length: int, end: int) -> _Document:
    """Documents, an end-of-text token after each, until `length` tokens are full; the last one is cut."""
    ids, weights = [], []
    while len(ids) < length:
        more, their_weights = make(length - len(ids))
        ids += [*more, end]
        weights += [*their_weights, 1.0]
    return ids[:length], weights[:length]


def _encode(corpus: Corpus, example: retrieval.RetrievalExample, plain_weight: float) -> _Document:
    encoding = corpus.tokenizer.backend_tokenizer.encode(example.text, add_special_tokens=False)
    weights = [plain_weight] * len(encoding.ids)
    spans = iter(example.answer_spans)
    span = next(spans)
    for index, (start, stop) in enumerate(encoding.offsets):
        while span is not None and start >= span[1]:
            span = next(spans, None)
        if span is None:
            break
        if stop > span[0]:
            weights[index] = _ANSWER_WEIGHT
    return encoding.ids, weights


def _random_repeats(corpus: Corpus, rng: random.Random, budget: int, progress: float) -> _Document:
    longest = max(8, min(budget // 2, round(_FIRST_REPEATED_BLOCK * (1 + 400 * progress**2))))
    block_tokens = round(4 * (longest / 4) ** rng.random())
    copies = 1 + (1 if block_tokens > 64 else rng.randint(1, 3))
    vocabulary = len(corpus.tokenizer)
    pool = [rng.randrange(1, vocabulary) for _ in range(max(8, round(vocabulary ** rng.uniform(0.4, 1.0))))]
    block = rng.choices(pool, k=block_tokens)
    # A copy's first token comes without warning.
    weights = [_UNPREDICTABLE_WEIGHT] * (block_tokens + 1) + [1.0] * (block_tokens - 1)
    return block * copies, weights + ([1.0] * block_tokens) * (copies - 2)


def _key_value(rng: random.Random, budget: int) -> retrieval.RetrievalExample:
    # A record, and a question about one, are about five tokens each.
    pairs = rng.randint(2, max(2, min(60, budget // 8)))
    return retrieval.key_value_records(
        rng, pairs=pairs, questions=rng.randint(1, pairs), split="training", template=_template(rng)
    )


def _multi_hop(rng: random.Random, budget: int) -> retrieval.RetrievalExample:
    chains = rng.randint(2, max(2, min(20, budget // 20)))
    return retrieval.multi_hop_references(
        rng, chains=chains, questions=rng.randint(1, chains), split="training", template=_template(rng)
    )


def _needle(corpus: Corpus, rng: random.Random, budget: int) -> retrieval.RetrievalExample:
    # About three characters a token; the sentences themselves take about ten tokens each.
    longest = max(60, (budget - 60) * 3)
    filler = _passage(corpus, rng, rng.randint(longest // 3, longest))
    return retrieval.needle_in_filler(rng, filler=filler, depth=rng.random(), distractors=rng.randint(0, 3), split="training")


def _text_repeats(corpus: Corpus, rng: random.Random, budget: int) -> retrieval.RetrievalExample:
    count = rng.randint(1, 5)
    passages = [_passage(corpus, rng, max(40, budget * 2 // count)) for _ in range(count)]
    return retrieval.repeated_passage(rng, passages=passages, repeats=1 if count == 1 else rng.randint(1, count))


def _passage(corpus: Corpus, rng: random.Random, characters: int) -> str:
    text = rng.choice(corpus.files)
    start = rng.randrange(max(1, len(text) - characters))
    start = text.find("\n", start) + 1
    return text[start : start + characters].rpartition("\n")[0] + "\n"


def _template(rng: random.Random) -> int:
    return rng.randrange(len(retrieval.RECORD_TEMPLATES))
