"""Which request a forward pass belongs to: whether its rows are a prompt's, and what was derived from its keys before.

A request is known by its cache, `past_key_values`. Its keys are known by their memory: what was derived from the keys of the
last call holds as far as the cache still has those very keys in place, whole or cropped. Reordered beams, another sequence in
the batch or keys that somebody wrote into are other memory. So are all keys of a cache that computes them anew, or that
`torch.inference_mode` made, which counts no writes: what is needed of those is derived again. A write through `tensor.data` goes
past torch's count, and past this.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import GenerationMixin

from shadowattn.errors import InputError
from shadowattn.online.cache import LayerCache

_said: ContextVar[str] = ContextVar("said", default="")  # `prompt`, `decoding`, or nothing


@contextmanager
def prompt() -> Iterator[None]:
    """All rows of the forward passes inside are a prompt's.

    Of a forward pass elsewhere they are too, but for one row behind a cache that holds tokens: that is a decoding step, unless
    `generate` is still reading the prompt (`prefill_chunk_size`). Whoever feeds a prompt in pieces that may be of one row has to
    say so.
    """
    token = _said.set("prompt")
    try:
        yield
    finally:
        _said.reset(token)


@contextmanager
def decoding() -> Iterator[None]:
    """All rows of the forward passes inside that stand behind a cache with tokens are decoding steps.

    Speculative decoding verifies several drafted tokens in one forward pass, which is otherwise taken for a piece of a prompt.
    Rows of a pass with an empty cache are a prompt's, but for those drafts that `generate` appends to the prompt at once: the
    last `logits_to_keep` − 1 rows.
    """
    token = _said.set("decoding")
    try:
        yield
    finally:
        _said.reset(token)


def decoding_rows(rows: int, offset: int, logits_to_keep: int = 1) -> int:
    """How many of `rows` rows after `offset` cached ones are decoding steps: the last ones.

    Where nobody said it, `generate` itself knows of a single row whether it still reads the prompt.
    """
    if _said.get() == "prompt":
        return 0
    if _said.get() == "decoding":
        return rows if offset else min(rows - 1, max(0, logits_to_keep - 1))
    return int(rows == 1 and offset > 0 and not _is_prefill())


# Where `generate` reads a prompt, in pieces perhaps; an assistant that goes on from its cache calls it too.
_PREFILL = GenerationMixin._prefill.__code__


def _is_prefill() -> bool:
    """Whether the forward pass at work is one of the prompt that `generate` reads. It tells the model nothing of that."""
    frame = sys._getframe()
    while frame is not None and frame.f_code is not _PREFILL:
        frame = frame.f_back
    return frame is not None and frame.f_locals["is_first_iteration"]


def check_logits_to_keep(logits_to_keep: int) -> None:
    """Raises `InputError` where a forward pass computes the logits of several rows, and nobody said what these rows are.

    transformers' assisted generation asks for those of all drafted tokens and one more; `generate` without drafts asks for one.
    """
    if logits_to_keep > 1 and not _said.get():
        raise InputError(
            f"logits_to_keep={logits_to_keep}: these rows may verify drafted tokens (assisted generation) or belong to a prompt; "
            "say which: `with shadowattn.models.decoding():` or `with shadowattn.models.prompt():`"
        )


@dataclass
class LayerState:
    """What is kept of one layer of one request: the memory that its keys were in, and what was derived from them."""

    caches: tuple[LayerCache, ...] = ()
    keys: "Place | None" = None

    def enter(self, before: Tensor | None) -> None:
        """Before a forward pass adds keys to `before` [batch, G, K, D]; None: the cache is empty, or does not show its keys."""
        kept = 0 if before is None or self.keys is None else self.keys.shared_with(before)
        self.keys = None  # until the pass is through: what it derives is of keys that the cache may never keep
        if kept == 0:
            self.caches = ()
        for cache in self.caches:
            cache.crop(kept)

    def begin(self, batch: int) -> tuple[LayerCache, ...]:
        """What was derived for each sequence of the batch."""
        if len(self.caches) != batch:
            self.caches = tuple(LayerCache() for _ in range(batch))
        return self.caches

    def leave(self, keys: Tensor) -> None:
        """After the pass: `keys` is what the cache holds now."""
        self.keys = Place.of(keys)


@dataclass(frozen=True)
class Place:
    """Where keys [batch, G, K, D] lie. Memory that was freed is nowhere, whatever lies there now."""

    memory: StorageWeakRef
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    version: int | None  # counts writes; those of tensors that inference mode made are not counted, and nothing is known of them

    @classmethod
    def of(cls, keys: Tensor) -> "Place":
        version = None if keys.is_inference() else keys._version
        return cls(StorageWeakRef(keys.untyped_storage()), keys.storage_offset(), keys.stride(), tuple(keys.shape), version)

    def shared_with(self, keys: Tensor) -> int:
        """How many keys of each sequence are still the same."""
        here, batch_and_heads = Place.of(keys), (self.shape[0], self.shape[1], self.shape[3])
        same = self.version is not None and not self.memory.expired() and self.memory == here.memory
        same = same and (self.offset, self.strides, self.version) == (here.offset, here.strides, here.version)
        same = same and batch_and_heads == (here.shape[0], here.shape[1], here.shape[3])
        return min(self.shape[2], here.shape[2]) if same else 0


@dataclass
class Requests:
    """The states of all requests of one attached model, for as long as their caches live."""

    _states: WeakKeyDictionary[Any, dict[int, LayerState]] = field(default_factory=WeakKeyDictionary)

    def layer(self, cache: Any, row: int) -> LayerState:
        """The state of one layer of the request with this cache; a new one without a cache."""
        if cache is None:
            return LayerState()
        return self._states.setdefault(cache, {}).setdefault(row, LayerState())


def cached_keys(cache: Any, layer: int) -> Tensor | None:
    """The keys [batch, G, K, D] that a cache of transformers holds for a layer; None where it holds or shows none."""
    layers = getattr(cache, "layers", None)
    if layers is None or layer >= len(layers):
        return None
    keys = getattr(layers[layer], "keys", None)
    return keys if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2] else None
