"""The engine: static decoder blocks on a device, attention between them, a KV cache, prefill in chunks, and generation."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from uuid import uuid4

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn import checks
from shadowattn.engine.ahead import Ahead
from shadowattn.engine.clock import Clock
from shadowattn.engine.drafts import PromptLookup
from shadowattn.engine.equalisation import equalised
from shadowattn.engine.generation import Generation
from shadowattn.engine.kv_cache import KVCache
from shadowattn.engine.sampling import Sampling
from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive
from shadowattn.graphs.decoder.blocks import BlockSizes
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.head import Int8Head
from shadowattn.graphs.decoder.runner import Blocks
from shadowattn.graphs.decoder.tensors import LayerTensors, layer_tensors
from shadowattn.method import Method
from shadowattn.models.decoder import Decoder, read_decoder
from shadowattn.models.load import DTYPES
from shadowattn.online.attention import RankedLists, Request, SparseAttention
from shadowattn.types import BlockRanges

_FLOAT32 = BlockForm()
STAGES = _BLOCKS, _ROTARY, _ATTENTION, _HEAD = "blocks", "rotary embedding", "attention", "head"
_DRAFTED = 8  # rows of the blocks that check drafts
_LEAST_HALF = 64  # rows of the lowest blocks of a part of a chunk: below, a product takes as long as reading its weights


class Engine:
    """Runs a Llama- or Qwen-like model as an NPU would be used: all but attention in static graphs of a fixed number of rows.

    `method`: what computes attention in a prompt, by default dense; in decoding steps as its `decode` says. `form`: the blocks'
    arithmetic, by default float32; where it quantises activations, `ranges` say how large these are
    (`offline.observe_block_ranges`). A prompt goes through in chunks of `chunk_tokens`; the last is padded in the blocks, to the
    next of `block_heights`, and not in attention. That takes the same chunks unless the method has `chunk_tokens` of its own,
    graphs of their own height, or a `query_block` that does not divide them. `attention_dtype`: of Q, K and V in the cache and in
    attention. `device`: OpenVINO's, of the blocks.

    `look_ahead`: the first layer, of at least 1, from which on a prompt's lists are made by what enters the layer before, in a
    thread of its own while that layer attends; None: every layer's by its own input. Then a layer's lists are held all at once.
    Layers of which no head leaves keys out make none.

    The embedding, the rotary embedding, attention, the last norm and the output layer run on the CPU. Raises `InputError` on a
    model of another family and what else `read_decoder` refuses.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        method: Method | None = None,
        form: BlockForm = _FLOAT32,
        ranges: BlockRanges | None = None,
        chunk_tokens: int = 256,
        attention_dtype: str = "float32",
        device: str = "CPU",
        look_ahead: int | None = None,
    ):
        self.decoder = read_decoder(model)
        self.form, self.chunk_tokens = form, checks.integer("chunk_tokens", chunk_tokens, least=1)
        self._dtype = DTYPES[checks.one_of("attention_dtype", attention_dtype, tuple(DTYPES))]
        if form.needs_ranges:
            _check_ranges(ranges, self.decoder)
        form.check_channels(
            {self.decoder.hidden, self.decoder.intermediate, self.decoder.shape.heads * self.decoder.shape.head_dim}
        )
        half = self.decoder.shape.head_dim // 2
        self._sin = torch.cat([-self.decoder.sin[:, :half], self.decoder.sin[:, half:]], 1)
        self._attention = _in_chunks(method or Method(1.0), chunk_tokens).attention(model)
        self._ahead = frozenset() if look_ahead is None else self._layers_ahead(look_ahead)
        self._device = device
        self._tensors = [self._layer_tensors(layer, ranges) for layer in range(len(self.decoder.layers))]
        self._blocks: dict[int, Blocks] = {}
        self._int8_head = Int8Head(self.decoder.head) if form.head == "int8" else None
        self._name = uuid4().hex  # of whoever made what its caches hold; copies of a cache keep it
        self._exclusive = Exclusive()  # the blocks' memory belongs to one forward pass at a time

    @property
    def attention(self) -> SparseAttention:
        """The attention in use, whose `counters` tell what ran."""
        return self._attention

    def cache(self) -> KVCache:
        """An empty KV cache, for this engine alone."""
        return KVCache(self.decoder.shape, self._dtype, self._name)

    def check_cache(self, cache: KVCache) -> None:
        """Raises `InputError` on another engine's, whose keys and values are of other weights or of another arithmetic."""
        checks.instance("cache", cache, KVCache, "make it with engine.cache()")
        if cache.owner != self._name:
            raise InputError("cache: expected one of this engine's own, got another engine's; make it with engine.cache()")

    def check_drafts(self, most: int) -> None:
        """Raises `InputError` where so many drafted tokens cannot be checked at once, or refused ones would count later."""
        if most >= self.chunk_tokens:
            raise InputError(
                f"drafts: expected fewer than the engine's chunk_tokens={self.chunk_tokens}, which check them at once, got {most}"
            )
        estimator = self._attention.estimator
        if reason := cannot_draft(estimator.sees, type(estimator).__name__, self._attention.decode):
            raise InputError(f"drafts: {reason}; use decode=dense, or leave drafts out")

    def compile(self, tokens: int, *, drafts: int = 0) -> None:
        """Compiles the blocks that a prompt of so many tokens and the decoding steps after it take, with up to so many drafted
        tokens. Otherwise the first pass that needs some compiles them.
        """
        checks.integer("tokens", tokens, least=1)
        if checks.integer("drafts", drafts, least=0):
            self.check_drafts(drafts)
        with self._exclusive.use():
            for rows in {min(tokens, self.chunk_tokens), tokens % self.chunk_tokens or self.chunk_tokens, *range(1, 2 + drafts)}:
                self._blocks_for(rows)

    def generate(
        self,
        prompt: Sequence[int],
        *,
        new_tokens: int = 256,
        stop: Collection[int] = (),
        sampling: Sampling | None = None,
        cache: KVCache | None = None,
        drafts: PromptLookup | None = None,
        progress: Callable[[int], None] = lambda tokens: None,
    ) -> Generation:
        """The tokens after a prompt of token ids, one by one: iterate over the result, whose `spent` says what they took.

        It ends behind the first token of `stop`, or after `new_tokens`. A `cache` of an earlier generation is gone on from as far
        as the prompt begins with its tokens; keys of an answer are then those of its decoding steps, and where an estimator goes
        by a chunk's rows, chunks begin where the new tokens do. `drafts` are checked several at a time, and change no token,
        greedy or drawn, but where rounding decides. `progress` is told of each chunk's tokens. Raises `InputError`, before any
        work, on a prompt that the model's context does not hold together with the new tokens, and on another engine's cache.
        """
        cache = self.cache() if cache is None else cache
        return Generation(self, prompt, new_tokens, stop, sampling or Sampling(), cache, drafts, progress)

    def prefill_chunks(self, tokens: Tensor, cache: KVCache | None = None) -> Iterator[tuple[slice, Tensor]]:
        """Yields (positions, logits [chunk, V]) for each chunk of one prompt, int64 [T].

        Raises `InputError` before the first where the model's context does not hold them all.
        """
        cache = self.cache() if cache is None else cache
        cache.reserve(len(cache) + len(tokens))  # refuses too many before any work
        for start in range(0, len(tokens), self.chunk_tokens):
            chunk = slice(start, min(start + self.chunk_tokens, len(tokens)))
            yield chunk, self.logits(self.forward(cache, tokens[chunk].tolist()))

    def forward(
        self, cache: KVCache, tokens: list[int], *, decode: bool = False, stages: dict[str, float] | None = None
    ) -> Tensor:
        """The hidden states float32 [n, E] behind the last layer of up to `chunk_tokens` tokens, whose keys the cache then holds.

        `decode`: they are decoding steps, not a prompt's. Seconds are added to `stages`, by `STAGES`, and where lists are made
        ahead by `AHEAD_STAGES`, of which the first passes beside the others. After an error the cache is as it was.
        """
        self.check_cache(cache)
        rows, start = len(tokens), len(cache)
        decoder, clock = self.decoder, Clock({} if stages is None else stages)
        # Memory of the blocks and the cache outlives the call, and torch forbids to write to what was made in inference mode.
        with torch.inference_mode(False), torch.no_grad(), self._exclusive.use(), _undone(cache), Ahead() as ahead:
            cache.reserve(start + rows)
            blocks = self._blocks_for(rows)
            blocks.begin(decoder.embedding[tokens].float())
            lists = None
            for layer in range(len(decoder.layers)):
                with clock(_BLOCKS):
                    qkv = blocks.qkv(layer)[:rows]
                with clock(_ROTARY):
                    q, k, v = self._split(layer, qkv, start)
                    keys, values = cache.write(layer, k, v)
                if not decode and layer + 1 in self._ahead:
                    with clock(_BLOCKS):
                        qkv = blocks.qkv_ahead(layer + 1)[:rows]
                    with clock(_ROTARY):
                        early_q, early_k, _ = self._split(layer + 1, qkv, start)
                    ahead.begin(partial(self._rank, layer + 1, early_q, early_k, cache))
                with clock(_ATTENTION):
                    request = Request(decode, (cache.derived[layer],), lists)
                    out = self._attention(layer, q[None], keys[None], values[None], decoder.scale, request)
                with clock(_BLOCKS):
                    blocks.finish(layer, out[0])
                lists = ahead.result(clock)
            cache.extend(tokens)
            return blocks.hidden(rows).clone()

    def _split(self, layer: int, qkv: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """q [H, n, D] as attention reads it, k and v [n, G, D] of a layer's projections [n, ·] of the rows from `start` on."""
        shape, weights, rows = self.decoder.shape, self.decoder.layers[layer], len(qkv)
        qk, v = qkv.view(rows, -1, shape.head_dim).split([shape.heads + shape.kv_heads, shape.kv_heads], 1)
        if weights.q_norm is not None:
            q, k = qk.split([shape.heads, shape.kv_heads], 1)
            qk = torch.cat([self._normed(q, weights.q_norm), self._normed(k, weights.k_norm)], 1)
        qk = rotated(qk, *(table[start : start + rows, None] for table in (self.decoder.cos, self._sin)))
        return qk[:, : shape.heads].to(self._dtype).transpose(0, 1), qk[:, shape.heads :], v

    def _layers_ahead(self, first: int) -> frozenset[int]:
        """Which layers' lists are made by what enters the layer before."""
        attention, shape = self._attention, self.decoder.shape
        if shape.layers < 2:
            raise InputError("look_ahead: expected a model of at least two layers, got one")
        checks.integer("look_ahead", first, least=1, most=shape.layers - 1)
        if reason := cannot_look_ahead(attention.estimator.sees, type(attention.estimator).__name__, attention.pipeline.mode):
            raise InputError(f"look_ahead: {reason}; leave look_ahead out")
        sparse = attention.sparse_layers(shape.head_dim, self._dtype, torch.device("cpu"))
        layers = frozenset(layer for layer in range(first, shape.layers) if sparse[layer])
        if not layers:
            raise InputError(
                f"look_ahead: expected a method that leaves keys out from layer {first} on, got one whose heads are all dense "
                "there and make no lists; lower the retention, or leave look_ahead out"
            )
        return layers

    def _rank(self, layer: int, q: Tensor, k: Tensor, cache: KVCache) -> RankedLists:
        """A layer's lists by q [H, n, D] and k [n, G, D] that are not its own; nothing of them is left in the cache."""
        derived, keys = cache.derived[layer], cache.guess(layer, k)
        derived.rewind(keys[:, : len(cache)])  # with what the earlier keys turned out to be
        try:
            return self._attention.rank(layer, q[None], keys[None], self.decoder.scale, Request(caches=(derived,)))
        finally:
            derived.crop(len(cache))

    @torch.no_grad()
    def logits(self, hidden: Tensor, *, stages: dict[str, float] | None = None) -> Tensor:
        """Logits float32 [n, V] of hidden states [n, E]: the last norm and the output layer."""
        with Clock({} if stages is None else stages)(_HEAD):
            normed = self._normed(hidden, self.decoder.final_norm)
            if self._int8_head is not None:
                return self._int8_head(normed)
            return (normed.to(self.decoder.head.dtype) @ self.decoder.head.T).float()

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMS norm of the last axis, in float32."""
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight.float(), self.decoder.norm_eps)

    def _layer_tensors(self, layer: int, ranges: BlockRanges | None) -> LayerTensors:
        weights, of_layer = self.decoder.layers[layer], ranges.of(layer) if self.form.needs_ranges else {}
        if self.form.smooth:
            weights, of_layer = equalised(weights, of_layer, self.decoder.shape, self.form.smooth)
        return layer_tensors(weights, self.form, of_layer)

    def _blocks_for(self, rows: int) -> Blocks:
        """The lowest blocks that hold so many rows, compiled when first asked for."""
        if rows > self.chunk_tokens:
            raise InputError(f"tokens: expected at most {self.chunk_tokens}, those of a chunk, got {rows}")
        height = next(height for height in block_heights(self.chunk_tokens, self.form) if height >= rows)
        if height not in self._blocks:
            decoder, shape = self.decoder, self.decoder.shape
            sizes = BlockSizes(height, decoder.hidden, shape.heads * shape.head_dim, decoder.activation, decoder.norm_eps)
            self._blocks[height] = Blocks(sizes, self.form, self._tensors, self._device, ahead=self._ahead)
        return self._blocks[height]


def block_heights(chunk_tokens: int, form: BlockForm) -> list[int]:
    """The heights of blocks: one row, a few drafts' and a chunk's; and where one graph serves all layers a half of that, a
    quarter and so on, down to 64 rows, so that a prompt's last chunk is padded less.

    Each holds memory for its rows once it was used, all of them together about twice that of a chunk's.
    """
    heights = {1, min(_DRAFTED, chunk_tokens), chunk_tokens}
    if form.weights == "inputs":
        halves = (chunk_tokens >> times for times in range(1, chunk_tokens.bit_length()))
        heights |= {half for half in halves if half >= _LEAST_HALF}
    return sorted(heights)


def _in_chunks(method: Method, chunk_tokens: int) -> Method:
    """The method with the engine's chunks, of which each costs a call; as it is where these do not fit."""
    if method.chunk_tokens is not None or method.has_graphs or chunk_tokens % method.query_block:
        return method
    return replace(method, chunk_tokens=chunk_tokens)


def _check_ranges(ranges: BlockRanges | None, decoder: Decoder) -> None:
    remedy = "measure them with shadowattn.offline.observe_block_ranges(model, windows, chunk_tokens=256)"
    checks.instance("ranges", ranges, BlockRanges, remedy)
    if ranges.fingerprint not in ("", decoder.fingerprint):
        raise InputError(f"ranges: they are of another model ({ranges.fingerprint[:12]}); {remedy}")


def cannot_look_ahead(sees: str, estimator: str, pipeline: str) -> str:
    """Why lists of an estimator of that name, which `sees` what it says, cannot be made a layer early; empty where they can."""
    if sees == "earlier_rows":
        return f"expected an estimator that ranks by a prompt's present rows, got {estimator}, which goes by earlier ones"
    if pipeline != "batched":
        return f"expected pipeline=batched, since lists are there before their layer's stages begin, got {pipeline}"
    return ""


def cannot_draft(sees: str, estimator: str, decode: str) -> str:
    """Why steps that `decode` so cannot check drafts, with an estimator of that name, which `sees` what it says; empty where they
    can.
    """
    if decode == "shared" and sees == "earlier_rows":
        return f"expected an estimator that ranks by present rows, got {estimator}, which would count rows of refused drafts"
    return ""


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotary embedding of x [n, heads, D] by cos and sin [n, 1, D]; the halves of a head are pairs.

    The first half of `sin` is negative: a pair (a, b) becomes (a · cos − b · sin, b · cos + a · sin).
    """
    half, out = x.shape[-1] // 2, x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half])  # in place, where a rolled copy of x would go through memory
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


@contextmanager
def _undone(cache: KVCache) -> Iterator[None]:
    """Where the pass inside does not come to its end, what was derived of its keys is forgotten."""
    try:
        yield
    except BaseException:
        cache.crop(len(cache))
        raise
