"""What is timed: one chunk of a prefill, or one step of a decode, by every way there is to compute it."""

import math
import re
import time
from collections.abc import Callable

import torch
from torch import Tensor

from experiments.random_layers import Tensors
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels, dense
from shadowattn.online.chunk import Chunk
from shadowattn.online.decode import shared_decode
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused, measured_scales
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.reporting.figures.attention_stages import OUTSIDE, PART, STAGE
from shadowattn.types import FirstLookLosses, Heads, KeyOffset, Selection

# What `int8` of `sparse_attention` is without native kernels, and with them; both choose the same keys, bit for bit.
ESTIMATORS = ("int8_graph", "int8_fused")
BASELINES = ("sdpa", "own dense")
FLEX_BLOCK = 64
_OTHER_LAYERS_BYTES = 256 << 20  # eight times the last-level cache of the machine whose rows are published
LOOKED = {"candidates": 1.25, "block_rows": 64, "flat_share": 0.1}  # as conf/estimator/hierarchical.yaml has them
# Where the time of a whole path goes: the kernels' own stages, and what is in none of them, as torch's operators, scales,
# packing, and threads that wait for others.
STAGES = (*native.STAGES, OUTSIDE)
_METRICS = {stage: f"{STAGE}{stage}" for stage in STAGES} | {part: f"{PART}{part}" for part in native.PARTS}
Call = Callable[[], object]


VALUE_SUMS = "torch sums of listed values"


def labels(candidate: str) -> dict[str, object]:
    """What of a candidate's name rows have columns for."""
    estimator, block = re.search(r"\((int8\w*|hierarchical)\)", candidate), re.search(r"(\d+)-row blocks(?:, (\w+))?", candidate)
    return {
        "estimator": estimator[1] if estimator else "none",
        "estimate_device": "CPU" if estimator and estimator[1] == "int8_graph" else "none",
        "query_block": int(block[1]) if block else 1,
        "block_score": block[2] or "none" if block else "none",
    }


def baselines(t: Tensors) -> dict[str, Call]:
    """torch's dense attention and ours."""
    offset = t.case.keys - t.case.rows
    seen = torch.arange(t.case.keys) <= t.positions[:, None]
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "sdpa": lambda: sdpa(t.q[None], t.k[None], t.v[None], attn_mask=seen, enable_gqa=True),
        "own dense": lambda: NativeKernels().dense(t.q, t.k, t.v, t.heads, causal_offset=offset, scale=t.scale),
    }


def attend_only(t: Tensors, *blocks: int) -> dict[str, Call]:
    """Attention from lists that are there already."""
    calls = {}
    for block in blocks:
        selection = t.random_lists(block)
        calls[f"attend, {_rows(block)}"] = lambda selection=selection: NativeKernels().attend(
            t.q, t.k, t.v, selection, t.heads, scale=t.scale
        )
    return calls


def value_sums(t: Tensors) -> dict[str, Call]:
    """torch's weighted sums of the values on lists of single rows, those of `attend_only`: what reading such rows takes a library
    that is made for it."""
    lists, ends = t.random_lists(1), t.case.rows
    values = t.v.contiguous()

    def head(number: int) -> Call:
        indptr = lists.indptr[number * ends : (number + 1) * ends + 1]
        keys, offsets = lists.indices[indptr[0] : indptr[-1]], (indptr - indptr[0]).to(torch.int32)
        weights, of = torch.ones(len(keys), dtype=t.v.dtype), values[t.heads.kv[number]]
        how = {"mode": "sum", "per_sample_weights": weights, "include_last_offset": True}
        return lambda: torch.nn.functional.embedding_bag(keys, of, offsets, **how)

    heads = [head(number) for number in range(len(t.heads))]
    return {VALUE_SUMS: lambda: [sums() for sums in heads]}


def gather(t: Tensors, block: int) -> dict[str, Call]:
    """torch gather and matmul from the same lists."""
    selection = t.random_lists(block)
    return {
        f"torch gather + matmul, {_rows(block)}": lambda: TorchKernels().attend(t.q, t.k, t.v, selection, t.heads, scale=t.scale)
    }


def stages(t: Tensors, key_offset: KeyOffset | None = None) -> dict[str, Call]:
    """The fused path's parts, per row: products of all rows alone, and the one task as it is but for attention."""
    estimator = Int8Fused.of(t.q, t.k, key_offset=key_offset, layer=t.layer)
    q_scales, kept = estimator.q_scales, torch.empty(1, dtype=torch.int64)
    chunk = t.chunk()
    keys = estimator.packed(chunk)
    products = {"keys": t.case.keys, "visible": t.positions + 1, "pooling": "rows", "query_block": 1, "exponents": None}

    def choose() -> None:
        native.fused_rows(
            t.q, t.k, t.v, None, kept, q_scales=q_scales, packed=keys.packed, kv_head=t.heads.kv, positions=t.positions,
            retention=t.retention, min_budget=1, scale=t.scale, sinks=0, recent=0, self_first=False,
        )  # fmt: skip

    return {
        "quantise": lambda: (measured_scales(t.q), keys.crop(t.case.keys - t.case.rows), keys.extend(t.k)),
        "estimate": lambda: native.estimate(t.q, q_scales, keys.packed, kv_head=t.heads.kv, **products),
        "estimate + select": choose,
    }


def stage_seconds(call: Call) -> dict[str, float]:
    """Seconds of one call by `STAGES`, which make up all of it, and by `native.PARTS`: of all threads, over their number.

    Raises `RuntimeError` where no kernel timed a stage: then nothing is known of it.
    """
    start, threads = time.perf_counter(), torch.get_num_threads()
    with native.timed_stages() as seconds:
        call()
    spent = {stage: of_all / threads for stage, of_all in seconds.items()}
    if not any(spent.values()):
        raise RuntimeError("expected a path of the fused kernels, which time their stages, got one that timed none")
    return spent | {OUTSIDE: time.perf_counter() - start - sum(spent[stage] for stage in native.STAGES)}


def stage_metrics(method: str) -> dict[str, str]:
    """What rows call the stages and parts of a method; of dense attention, which is one stage, its parts alone."""
    return {name: _METRICS[name] for name in (native.PARTS if "dense" in method else _METRICS)}


class Clocked:
    """A call whose stages are timed each time: `seconds` has what `stage_seconds` gave, in turn."""

    def __init__(self, call: Call):
        self._call = call
        self.seconds: list[dict[str, float]] = []

    def __call__(self) -> None:
        self.seconds.append(stage_seconds(self._call))


def totals(
    t: Tensors,
    block: int,
    block_score: str = "leading_query",
    estimators: tuple[str, ...] = ESTIMATORS,
    first_look: FirstLookLosses | None = None,
    key_offset: KeyOffset | None = None,
    flat_share: float = LOOKED["flat_share"],
) -> dict[str, Call]:
    """Quantise, estimate, select, attend, as `SparseAttention` runs them, by each estimator in `estimators`. All but `int8_graph`
    take `key_offset` off the keys.

    `hierarchical` spares `flat_share` of the heads a first look: those that lose most by `first_look`; without it, as on random
    tensors, where no head is worse than another, the first ones, rounded up to a whole head.
    """
    rule = Rule(block, block_score)

    def total(estimator: str) -> Call:
        return (
            _graph_total(t, rule)
            if estimator == "int8_graph"
            else _fused_total(t, rule, fused(t, estimator, first_look, key_offset, flat_share))
        )

    return {total_name(estimator, block, block_score): total(estimator) for estimator in estimators}


def total_name(estimator: str, block: int, block_score: str) -> str:
    """What `totals` calls a path."""
    return f"total ({estimator}), {_rows(block)}" + ("" if block == 1 else f", {block_score}")


def row_lists(
    t: Tensors, estimator: str, first_look: FirstLookLosses, key_offset: KeyOffset | None, flat_share: float
) -> Selection:
    """The lists of single rows by which `totals` attends, by `int8_fused` or `hierarchical`."""
    rule, chunk = Rule(), t.chunk()
    made = fused(t, estimator, first_look, key_offset, flat_share)
    return made.attend(chunk, rule, lambda: rule.lists(t.retention, t.positions), listed=True)[1]


def _graph_total(t: Tensors, rule: Rule) -> Call:
    """By OpenVINO's INT8 graphs, with scales that the estimator measures."""
    estimator = Int8Tensor()
    return lambda: _attend(t.chunk(), rule, estimator)


def fused(
    t: Tensors,
    name: str,
    first_look: FirstLookLosses | None = None,
    key_offset: KeyOffset | None = None,
    flat_share: float = LOOKED["flat_share"],
) -> Int8Fused:
    """`int8_fused` or `hierarchical` as `totals` has them: Q's scales are measured, K's fixed, so that K stays packed."""
    how = {"k_scales": Int8Fused.of(t.q, t.k, key_offset=key_offset, layer=t.layer).k_scales, "key_offset": key_offset}
    if name == "int8_fused":
        return Int8Fused(**how)
    first_look = first_look or FirstLookLosses([[0.0] * len(t.heads)], LOOKED["candidates"], LOOKED["block_rows"])
    settings = LOOKED | {"candidates": first_look.candidates, "block_rows": first_look.block_rows, "flat_share": flat_share}
    return Hierarchical(**how, first_look=first_look, **settings)


def _fused_total(t: Tensors, rule: Rule, estimator: Int8Fused) -> Call:
    """By the native products that are selected from at once; K was packed up to this chunk before."""
    chunk = t.chunk()
    return lambda: _attend(chunk.rewound(), rule, estimator)  # so that the chunk's own keys are new


def _attend(chunk: Chunk, rule: Rule, estimator: Estimator) -> None:
    run_batched(Stages(chunk, Parts(estimator, rule, NativeKernels())), threads=Threads(), keep_lists=False)


def sparse_paths(t: Tensors, block: int) -> dict[str, Call]:
    """Lists of one row, also after a first look, and of `block` rows."""
    return totals(t, 1) | totals(t, 1, estimators=("hierarchical",)) | totals(t, block)


def fused_paths(t: Tensors, block: int) -> dict[str, Call]:
    """The native paths: lists of one row, also after a first look, and of `block` rows by pooled probabilities."""
    paths = totals(t, 1, estimators=("int8_fused",)) | totals(t, 1, estimators=("hierarchical",))
    return paths | totals(t, block, "probability", ("int8_fused",))


def times_stages(query_block: int) -> bool:
    """Whether lists of so many rows are made and read by the fused kernels, which time their stages."""
    return Int8Fused().attends(Rule(query_block, "probability"), NativeKernels())


def flex(t: Tensors) -> dict[str, Call]:
    """torch's compiled flex_attention on random blocks of 64 × 64, and our kernel on the very same keys."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    heads, case = len(t.heads), t.case
    q_blocks, k_blocks = case.rows // FLEX_BLOCK, case.keys // FLEX_BLOCK
    count = max(1, math.ceil(case.retention * k_blocks))
    generator = torch.Generator().manual_seed(2)
    past = k_blocks - q_blocks  # the chunk's own blocks stay out, so that no element needs a mask
    order = torch.rand(heads, q_blocks, past, generator=generator).argsort(-1)[..., :count].sort(-1).values
    padded = torch.nn.functional.pad(order, (0, k_blocks - count)).to(torch.int32)
    counts = torch.full((1, heads, q_blocks), count, dtype=torch.int32)
    mask = BlockMask.from_kv_blocks(counts, padded[None], BLOCK_SIZE=FLEX_BLOCK, seq_lengths=(case.rows, case.keys))
    compiled = torch.compile(flex_attention, dynamic=False)
    keys = (order[..., None] * FLEX_BLOCK + torch.arange(FLEX_BLOCK)).flatten(2)
    indptr = torch.arange(heads * q_blocks + 1) * keys.shape[-1]
    selection = Selection(keys.flatten().to(torch.int32), indptr, t.positions, FLEX_BLOCK)
    return {
        "flex_attention, 64 × 64 blocks": lambda: compiled(t.q[None], t.k[None], t.v[None], block_mask=mask, enable_gqa=True),
        "attend, 64 × 64 blocks": lambda: NativeKernels().attend(t.q, t.k, t.v, selection, t.heads, scale=t.scale),
    }


def decode(t: Tensors) -> dict[str, Call]:
    """One query a head. Grouped bmm is the best dense baseline of torch: its SDPA is far below the bandwidth in bfloat16."""
    count, groups = len(t.heads), t.k.shape[0]
    folded = t.q.view(groups, count // groups, -1)
    estimator, chunk = Int8Fused.of(t.q, t.k), t.chunk()
    shared = Selection(*_shared_list(t), torch.full((count // groups,), t.case.keys - 1), count // groups)

    def grouped() -> Tensor:
        weights = torch.softmax((folded @ t.k.transpose(1, 2)).float() * t.scale, -1)
        return weights.to(t.v.dtype) @ t.v

    return {
        "sdpa": lambda: dense(t.q, t.k, t.v, causal_offset=t.case.keys - 1, scale=t.scale),
        "torch grouped bmm": grouped,
        "own dense": lambda: NativeKernels().dense(t.q, t.k, t.v, t.heads, causal_offset=t.case.keys - 1, scale=t.scale),
        "attend, shared list": lambda: NativeKernels().attend(folded, t.k, t.v, shared, Heads.all(groups, groups), scale=t.scale),
        "total (int8_fused), shared list": lambda: shared_decode(chunk.rewound(), Parts(estimator, Rule(), NativeKernels())),
    }


def other_layers() -> Call:
    """Reads memory, as other layers of a model do between two steps of one layer, whose keys no cache then holds."""
    others = torch.ones(_OTHER_LAYERS_BYTES // 4)  # zeros could be one page of memory, mapped again and again
    return others.sum


def _shared_list(t: Tensors) -> tuple[Tensor, Tensor]:
    lists = Rule().lists(t.retention[: t.k.shape[0]], t.positions)
    chosen = NativeKernels().select(torch.rand(t.k.shape[0], 1, t.case.keys), lists)
    return chosen.indices, chosen.indptr


def _rows(block: int) -> str:
    return "per row" if block == 1 else f"{block}-row blocks"
