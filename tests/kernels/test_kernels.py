"""Both twins, and every instruction set that this processor has, against the specification in float64."""

import ctypes
import math
import os
import platform
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shadowattn import kernels
from shadowattn.errors import InputError
from shadowattn.kernels import native, ops
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels, attend_masked
from shadowattn.online.chunk import Chunk
from shadowattn.online.selection import BLOCK_SCORES, Rule
from shadowattn.types import Heads, Lists, Selection
from tests.kernels.exact import attention_float64, best_keys, hidden_by_lists
from tests.selections import as_mask
from tests.tensors import HEADS, qkv

BUILT = native.library() is not None
LEVELS = native.levels()
IMPLEMENTATIONS = ["torch", *LEVELS]
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 1e-2}


def test_the_native_kernels_were_built_where_the_tests_run():
    """Else everything below would silently test the twin alone."""
    assert BUILT or os.environ.get("SHADOWATTN_WITHOUT_COMPILER"), "no native kernels; is there a C++ compiler?"


def implementation(name: str):
    """The kernels and the context to use them in."""
    return (TorchKernels(), nullcontext()) if name == "torch" else (NativeKernels(), native.forced_level(name))


class Masked(TorchKernels):
    """As on a GPU, where that pays."""

    def attend(self, q, k, v, selection, heads, *, scale):
        return attend_masked(q, k[heads.kv], v[heads.kv], selection, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*IMPLEMENTATIONS, "masked"])
@given(
    dim=st.sampled_from([8, 16, 24, 64, 72, 80, 96, 128, 160, 200, 256]),
    heads=st.sampled_from([*HEADS, (7, 1), (6, 2)]),
    rows=st.integers(1, 70),
    earlier=st.integers(0, 200),
    query_block=st.sampled_from([1, 2, 3, 4, 8, 16, 31, 32, 33, 64, 100]),
    retention=st.sampled_from([0.001, 0.05, 0.2, 0.5, 1.0]),
    size=st.sampled_from([1.0, 1e-3, 30.0]),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
@example(256, (4, 2), 35, 107, 16, 0.001, 30.0, False, 80)  # PyTorch's own products are 5.0e-4 off there
def test_attends_to_its_lists(name, dtype, dim, heads, rows, earlier, query_block, retention, size, strided, seed):
    count, groups = heads
    q, k, v = (x.to(dtype) for x in qkv(count, groups, rows, rows + earlier, dim, seed=seed))
    q = size * q
    if strided:  # caches come as [K, G, D] seen as [G, K, D], and as slices of longer ones
        k, v = (torch.cat([x, x], 1).transpose(0, 1).contiguous().transpose(0, 1)[:, : rows + earlier] for x in (k, v))
    positions = earlier + torch.arange(rows)
    retentions = torch.linspace(retention / 2, retention, count, dtype=torch.float64)
    lists = Rule(query_block).lists(retentions, positions)
    selection = TorchKernels().select(torch.rand(count, len(lists.candidates), rows + earlier), lists)
    made, context = (Masked(), nullcontext()) if name == "masked" else implementation(name)
    with context:
        out = made.attend(q, k, v, selection, Heads.all(count, groups), scale=0.3)
    expected = attention_float64(q, k, v, hidden_by_lists(selection, rows + earlier), 0.3)
    assert out.dtype == dtype
    # A score is off by its own last places times the root of how many products it sums, and its weight by as much, relatively.
    largest = float((q.double() @ k.double().repeat_interleave(count // groups, 0).transpose(1, 2)).abs().max()) * 0.3
    tolerance = TOLERANCE[dtype] * float(v.abs().max()) + 5e-7 * max(1, dim / 64) ** 0.5 * largest
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=TOLERANCE[dtype])


def row_lists(heads: int, rows: int, earlier: int, retention: float, seed: int) -> Selection:
    """Random lists, those of neighbours alike in half of the keys' scores, so that unions are neither one list nor all keys."""
    generator = torch.Generator().manual_seed(seed)
    lists = Rule().lists(torch.linspace(retention / 2, retention, heads, dtype=torch.float64), earlier + torch.arange(rows))
    scores = torch.rand(heads, rows + 1, rows + earlier, generator=generator)
    return TorchKernels().select(scores[:, 1:] + scores[:, :1], lists)


TILES = dict(
    rows=st.integers(1, 140),
    earlier=st.sampled_from([0, 1, 63, 200, 1000, 2100]),  # windows of the native kernel hold 1024 keys
    tile_rows=st.sampled_from([1, 2, 3, 4, 8, 16, 31, 32, 33, 63, 64]),
    retention=st.sampled_from([0.001, 0.05, 0.2, 0.5, 1.0]),
    seed=st.integers(0, 99),
)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(heads=st.integers(1, 3), **TILES)
def test_unions_hold_every_rows_own_list(name, heads, rows, earlier, tile_rows, retention, seed):
    selection = row_lists(heads, rows, earlier, retention, seed)
    made, context = implementation(name)
    with context:
        tiles = made.unite(selection, tile_rows)
    kept = tiles.per_row()
    assert kept.indices.equal(selection.indices)
    assert kept.indptr.equal(selection.indptr)
    seen = torch.nn.functional.pad(as_mask(selection, rows + earlier), (0, 0, 0, -rows % tile_rows)).unflatten(1, (-1, tile_rows))
    unions = [keys.nonzero()[:, 0].tolist() for keys in seen.any(2).flatten(0, 1)]
    assert [tiles.indices[a:b].tolist() for a, b in zip(tiles.starts, tiles.ends, strict=True)] == unions
    assert tiles.counts.flatten().tolist() == [len(union) for union in unions]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(
    dim=st.sampled_from([8, 16, 24, 64, 72, 80, 96, 128, 160, 200, 256]),
    heads=st.sampled_from([*HEADS, (7, 1), (6, 2)]),
    size=st.sampled_from([1.0, 1e-3, 30.0]),
    threads=st.sampled_from([1, 1, 3]),
    **TILES,
)
def test_tiles_attend_to_every_rows_own_list(name, dtype, dim, heads, size, threads, rows, earlier, tile_rows, retention, seed):
    """With threads to spare the union of a tile is split among them."""
    count, groups = heads
    q, k, v = (x.to(dtype) for x in qkv(count, groups, rows, rows + earlier, dim, seed=seed))
    q = size * q
    selection = row_lists(count, rows, earlier, retention, seed)
    made, context = implementation(name)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with context:
            out = made.attend_tiles(q, k, v, made.unite(selection, tile_rows), Heads.all(count, groups), scale=0.3)
    finally:
        torch.set_num_threads(before)
    expected = attention_float64(q, k, v, hidden_by_lists(selection, rows + earlier), 0.3)
    assert out.dtype == dtype
    largest = float((q.double() @ k.double().repeat_interleave(count // groups, 0).transpose(1, 2)).abs().max()) * 0.3
    tolerance = TOLERANCE[dtype] * float(v.abs().max()) + 1e-6 * largest  # of the worst of ten times as many keys as above
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_score_that_is_not_finite_reaches_no_row_of_a_tile_that_does_not_keep_the_key(name):
    q, k, v = qkv(1, 1, 6, 6, 16)
    k[0, 4, 3] = math.nan
    lists = Rule().lists(torch.ones(1, dtype=torch.float64), torch.arange(6))
    selection = TorchKernels().select(torch.rand(1, 6, 6), lists)  # retention 1: rows 4 and 5 keep key 4
    made, context = implementation(name)
    with context:
        out = made.attend_tiles(q, k, v, made.unite(selection, 8), Heads.all(1, 1), scale=1.0)
    assert out[:, :4].isfinite().all()
    assert out[:, 4:].isnan().all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS[:2])
def test_what_cannot_be_a_tile_is_refused(name):
    made, context = implementation(name)
    shared = TorchKernels().select(torch.rand(1, 2, 8), Rule(4).lists(torch.ones(1, dtype=torch.float64), torch.arange(8)))
    with context:
        with pytest.raises(InputError, match="rows: expected an integer of 1 … 64, got 65"):
            made.unite(row_lists(1, 8, 0, 0.5, 0), 65)
        with pytest.raises(InputError, match="query_block: expected lists of single rows, whose unions are tiles, got 4"):
            made.unite(shared, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(
    dim=st.sampled_from([8, 40, 64, 128, 160]),
    heads=st.sampled_from(HEADS),
    rows=st.sampled_from([1, 1, 2, 5, 8, 9, 20, 32, 65, 200]),
    earlier=st.sampled_from([0, 1, 63, 64, 700, 1100]),
    threads=st.integers(1, 3),
    token_major=st.booleans(),
)
def test_dense_is_every_key(name, dtype, dim, heads, rows, earlier, threads, token_major):
    """Few rows are a decode step, or drafted tokens: their keys are then split over the threads."""
    count, groups = heads
    q, k, v = (x.to(dtype) for x in qkv(count, groups, rows, rows + earlier, dim))
    if token_major:  # as a cache may hold them
        k, v = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (k, v))
    before = torch.get_num_threads()
    made, context = implementation(name)
    try:
        torch.set_num_threads(threads)
        with context:
            out = made.dense(q, k, v, Heads.all(count, groups), causal_offset=earlier, scale=dim**-0.5)
    finally:
        torch.set_num_threads(before)
    hidden = torch.arange(rows + earlier) > earlier + torch.arange(rows)[:, None]
    expected = attention_float64(q, k, v, hidden.expand(count, -1, -1), dim**-0.5)
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_scale_may_turn_scores_around(name, scale, dtype):
    """Keys that a row does not see stay unseen."""
    q, k, v = (x.to(dtype) for x in qkv(2, 1, 40, 60, 24))
    made, context = implementation(name)
    with context:
        out = made.dense(q, k, v, Heads.all(2, 1), causal_offset=20, scale=scale)
    hidden = torch.arange(60) > 20 + torch.arange(40)[:, None]
    torch.testing.assert_close(
        out.double(),
        attention_float64(q, k, v, hidden.expand(2, -1, -1), scale),
        atol=TOLERANCE[dtype] * 4,
        rtol=TOLERANCE[dtype],
    )


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dense_blocks_of_unequal_groups(name, dtype):
    """Blocks of one key head may go through the keys together: here they are no multiple of those that do."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(7, 640, 8, generator=generator).to(dtype)
    k, v = (torch.randn(2, 700, 8, generator=generator).to(dtype) for _ in range(2))
    kv_head = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    positions, out = 60 + torch.arange(640), []
    made, context = implementation(name)
    before = torch.get_num_threads()
    with context:
        for threads in (1, 2):
            try:
                torch.set_num_threads(threads)
                out.append(made.dense(q, k, v, Heads(torch.arange(7), kv_head), causal_offset=60, scale=0.3))
            finally:
                torch.set_num_threads(before)
    expected = attention_float64(q, k[kv_head], v[kv_head], (torch.arange(700) > positions[:, None]).expand(7, -1, -1), 0.3)
    torch.testing.assert_close(out[0].double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])
    assert name == "torch" or torch.equal(*out)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("query_block", [32, None])
def test_rows_may_stand_where_they_like_and_scores_be_huge(name, dtype, query_block):
    """Positions repeat and leave gaps. With scores above 2^31 a row's best key has all of its weight."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, n, 24, generator=generator).to(dtype) for n in (32, 300, 300))
    positions = torch.tensor([5] * 4 + [9] * 8 + [140] * 7 + list(range(200, 213)))
    lists = {"indices": None, "indptr": None}
    if query_block:
        lists = {"indices": torch.arange(213, dtype=torch.int32), "indptr": torch.tensor([0, 213])}
    hidden = torch.arange(300) > positions[:, None]
    for size in (1.0, 3e5):
        with native.forced_level(name):
            out = ops.attend(
                q * size, k * size, v, torch.zeros(1, dtype=torch.int64), positions, *lists.values(), query_block or 1, 0.2
            )
        expected = attention_float64(q * size, k * size, v, hidden[None], 0.2)
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype] * 4, rtol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_some_heads_read_their_own_groups(name, dtype):
    q, k, v = (x.to(dtype) for x in qkv(6, 3, 9, 20, 16))
    which = torch.tensor([1, 2, 5])
    heads = Heads.all(6, 3)[which]
    made, context = implementation(name)
    with context:
        out = made.dense(q[which], k, v, heads, causal_offset=11, scale=0.25)
        whole = made.dense(q, k, v, Heads.all(6, 3), causal_offset=11, scale=0.25)
    torch.testing.assert_close(out, whole[which], atol=TOLERANCE[dtype] / 2, rtol=TOLERANCE[dtype] / 2)


KINDS = [
    "normal",
    "ties",
    "equal",
    "huge",
    "tiny",
    "int8",
    "spike",
    "negative zero",
    "float16",
    "float16, subnormal",
    "float16, all",
]


def scores_of(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if kind == "int8":
        return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    scores = torch.randn(shape, generator=generator)
    if kind == "float16, all":  # of its finite values
        bits = torch.randint(-(1 << 15), 1 << 15, shape, generator=generator).to(torch.int16)
        return bits.view(torch.float16).nan_to_num(0.0)
    if kind.startswith("float16"):
        return (scores * (1e-6 if kind.endswith("subnormal") else 1.0)).half()
    if kind == "ties":
        return scores.round()
    if kind == "equal":
        return torch.full(shape, -3.5)
    if kind in ("huge", "tiny"):
        return (scores * (1e38 if kind == "huge" else 1e-42)).clamp(-3.4e38, 3.4e38)
    if kind == "spike":
        scores[..., 0], scores[..., -1] = 3e38, -3e38
    if kind == "negative zero":
        return torch.where(scores > 0, 0.0, -0.0)
    return scores


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@given(
    kind=st.sampled_from(KINDS),
    keys=st.one_of(st.integers(1, 300), st.sampled_from([1023, 2048, 4100, 5000])),
    share=st.floats(0.0, 1.0),
    self_first=st.booleans(),
    sinks=st.sampled_from([0, 0, 1, 5, 400]),
    recent=st.sampled_from([0, 0, 1, 5, 400]),
    tail=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 99),
)
def test_selects_the_exact_best(name, kind, keys, share, self_first, sinks, recent, tail, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = scores_of(kind, (2, 3, keys), seed)
    candidates = torch.randint(1, keys + 1, (3,), generator=generator)
    counts = (share * candidates).ceil().long().clamp(min=int(tail == 0)).expand(2, -1)  # no list is empty
    indptr = torch.nn.functional.pad((counts + tail).flatten().cumsum(0), (1, 0))
    self_first = self_first and recent > 0  # the row's own key is the last of its window
    lists = Lists(candidates, torch.full((3,), tail), indptr, candidates, 1, sinks, recent, self_first)
    if name == "torch" and tail:
        scores = torch.nn.functional.pad(scores, (0, tail))  # the twin makes lists out of a mask over the keys
    made, context = implementation(name)
    with context:
        selection = made.select(scores, lists)
    assert selection.indices.equal(best_keys(scores, lists))


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LEVELS)
@given(
    dim=st.sampled_from([8, 24, 64, 80, 128, 160, 200, 256]),
    heads=st.sampled_from(HEADS),
    rows=st.integers(1, 70),
    earlier=st.integers(0, 200),
    rule=st.builds(
        Rule,
        query_block=st.sampled_from([1, 5, 8, 32, 64]),
        block_score=st.sampled_from(BLOCK_SCORES),
        sinks=st.sampled_from([0, 2]),
        recent=st.sampled_from([0, 3]),
    ),
    retention=st.floats(0.01, 1.0),
    seed=st.integers(0, 99),
)
def test_the_fused_estimate_selects_by_exact_integers(name, dtype, dim, heads, rows, earlier, rule, retention, seed):
    """Products, pooling and selection in one pass, against int64 arithmetic and the twin's selection."""
    count, groups = heads
    keys, positions = rows + earlier, earlier + torch.arange(rows)
    q, k, _ = (x.to(dtype) for x in qkv(count, groups, rows, keys, dim, seed=seed))
    asked = rule.scored(Chunk.of(q, k))
    scored, at = asked.q, asked.positions
    q_scales, k_scales = (x.float().abs().amax((1, 2)) / 127 for x in (scored, k))
    logit_scales = torch.linspace(1e-4, 1e-3, count)
    exponents = logit_scales * math.log2(math.e)
    lists, kv = rule.lists(torch.full((count,), retention, dtype=torch.float64), positions), Heads.all(count, groups).kv
    packed = torch.zeros(groups, -(-keys // 32) * 2, dim // 4, 16, 4, dtype=torch.uint8)
    with native.forced_level(name):
        for part in (slice(0, keys // 3), slice(keys // 3, keys)):  # tail in two pieces
            ops.pack(k[:, part], k_scales, packed, part.start, None)
        indices = ops.estimate_select(
            scored, q_scales, packed, keys, kv, at + 1, rule.pooling, rule.query_block,
            lists.candidates, lists.tail, lists.indptr, lists.size, lists.sinks, lists.recent, lists.self_first, exponents,
        )  # fmt: skip
        scores = ops.estimate(scored, q_scales, packed, keys, kv, at + 1, rule.pooling, rule.query_block, exponents)
    products = (_quantised(scored, q_scales).double() @ _quantised(k, k_scales).double()[kv].transpose(1, 2)).float()
    pooled = rule.pool(products, positions, logit_scales)
    seen = torch.arange(keys) < lists.candidates[:, None] if rule.pooling != "rows" else torch.ones(1, keys, dtype=torch.bool)
    if rule.pooling == "probability":  # sums of float32 exponentials against float64: the best keys but for near ties
        torch.testing.assert_close(scores.masked_fill(~seen, 0), pooled.masked_fill(~seen, 0), rtol=1e-5, atol=1e-7)
        assert indices.equal(TorchKernels().select(scores, lists).indices)
        return
    assert scores.masked_fill(~seen, 0).equal(pooled.masked_fill(~seen, 0))
    assert indices.equal(TorchKernels().select(pooled, lists).indices)


@pytest.mark.parametrize("name", LEVELS)
@pytest.mark.parametrize("dim", [8, 24, 40, 64, 160, 200, 256])
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8])
def test_the_largest_products_are_exact(name, dim, rows):
    """All numbers ±127, of alike, unlike and mixed signs: sums of 16 bits would overflow where an instruction adds pairs."""
    keys = 150
    signs = torch.ones(3, keys, dim)
    signs[1] = -1
    signs[2] = torch.where(torch.rand(keys, dim, generator=torch.Generator().manual_seed(dim)) < 0.5, -1.0, 1.0)
    k = 127 * signs
    for sign in (1, -1):
        q = torch.full((3, rows, dim), 127.0 * sign)
        q[:, ::3, ::5] *= -1
        scales, packed = torch.ones(3), torch.zeros(3, 10, dim // 4, 16, 4, dtype=torch.uint8)
        with native.forced_level(name):
            ops.pack(k, scales, packed, 0, None)
            visible, kv = torch.full((rows,), keys), torch.arange(3)
            made = ops.estimate(q, scales, packed, keys, kv, visible, "rows", 1, None)
        assert made.equal((q.double() @ k.double().transpose(1, 2)).float())


# Of each level the flags that Linux gives a processor which runs it.
AVX2, AVX512 = {"avx2", "fma", "bmi2"}, {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
FLAGS = {
    "avx2": AVX2,
    "avx2_vnni": AVX2 | {"avx_vnni"},
    "avx512": AVX512,
    "avx512_vnni": AVX512 | {"avx512_vnni"},
    "avx512_vbmi2": AVX512 | {"avx512_vnni", "avx512vbmi", "avx512_vbmi2"},
    "avx512_bf16": AVX512 | {"avx512_vnni", "avx512vbmi", "avx512_vbmi2", "avx512_bf16"},
    "neon": {"asimddp"},
}


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_levels_are_those_that_the_processor_says_it_has():
    """Else every test of a level would be gone without a word. AMX also takes Linux's leave. An emulated Arm processor finds the
    flags of its host in that file, whose line has another name.
    """
    cpuinfo, name = Path("/proc/cpuinfo"), "Features" if platform.machine() == "aarch64" else "flags"
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    line = next((one for one in lines if one.startswith(name)), None)
    if line is None:
        pytest.skip(f"no line of {name} in /proc/cpuinfo, from which to know the processor")
    has = set(line.partition(":")[2].split())
    expected = {"portable", *(level for level, flags in FLAGS.items() if flags <= has)}
    assert set(LEVELS) - {"amx"} == expected
    assert list(LEVELS) == [level for level in ("portable", *FLAGS, "amx") if level in LEVELS]


@pytest.mark.parametrize("name", LEVELS)
def test_counts_and_integers_of_long_lists_are_exact(name):
    """More keys than a byte's counter holds at once, and scores that become bytes by a sample's range; ties to the lower key."""
    keys = 33_000
    alike, spread = torch.zeros(1, 1, keys), torch.arange(keys).remainder(257)[None, None].float()
    lists = Rule().lists(torch.tensor([0.6], dtype=torch.float64), torch.tensor([keys - 1]))
    with native.forced_level(name):
        for scores in (alike, spread):
            assert NativeKernels().select(scores, lists).indices.equal(TorchKernels().select(scores, lists).indices)


def _quantised(x, scales):
    return torch.round(x.float() / scales[:, None, None]).clamp(-127, 127).long()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_rows_that_keep_it_and_no_other(name, value):
    q, k, v = qkv(1, 1, 6, 6, 16)
    k[0, 4, 3] = value
    lists = Rule().lists(torch.ones(1, dtype=torch.float64), torch.arange(6))
    selection = TorchKernels().select(torch.rand(1, 6, 6), lists)  # retention 1: rows 4 and 5 keep key 4
    made, context = implementation(name)
    with context:
        out = made.attend(q, k, v, selection, Heads.all(1, 1), scale=1.0)
    assert out[:, :4].isfinite().all()
    score = float((q[0, 4] * k[0, 4]).sum())
    if score == -float("inf"):  # an infinitely bad key is no key
        assert out[:, 4].isfinite().all()
    else:
        assert out[:, 4].isnan().all()


def test_threads_select_identically():
    q, k, _ = qkv(4, 2, 300, 3000, 64)
    lists = Rule().lists(torch.full((4,), 0.2, dtype=torch.float64), 2700 + torch.arange(300))
    scores = q @ k.repeat_interleave(2, 0).transpose(1, 2)
    made = kernels.choose("auto", head_dim=64, dtype=torch.float32)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(made.select(scores, lists).indices)
    finally:
        torch.set_num_threads(before)
    assert found[0].equal(found[1])
    assert found[0].equal(found[2])


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_operators_are_what_torch_expects_of_them():
    """Schemas, fake kernels and mutation, by torch's own checks."""
    q, k, v = qkv(4, 2, 6, 40, 16)
    kv, positions = Heads.all(4, 2).kv, 34 + torch.arange(6)
    lists = Rule().lists(torch.full((4,), 0.3, dtype=torch.float64), positions)
    plan = (lists.candidates, lists.tail, lists.indptr, lists.size, 0, 0, False)
    ranked, indices = (
        (*plan[:3], torch.empty(lists.size, dtype=torch.int32), *plan[4:]),
        torch.empty(lists.size, dtype=torch.int32),
    )
    ops.select(torch.rand(4, 6, 40), *plan[:3], indices, *plan[4:])
    packed = torch.zeros(2, 4, 4, 16, 4, dtype=torch.uint8)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attend.operator, (q, k, v, kv, positions, indices, lists.indptr, 1, 0.25), test_utils=checks)
    torch.library.opcheck(ops.select.operator, (torch.rand(4, 6, 40), *ranked), test_utils=checks)
    torch.library.opcheck(ops.unite.operator, (indices, lists.indptr, 6, 4), test_utils=checks)
    tiles = NativeKernels().unite(Selection(indices, lists.indptr, positions, 1), 4)
    unions = (tiles.indices, tiles.members, tiles.starts, tiles.ends, 4)
    torch.library.opcheck(ops.attend_tiles.operator, (q, k, v, kv, positions, *unions, 0.25), test_utils=checks)
    torch.library.opcheck(ops.pack.operator, (k, torch.ones(2), packed, 0, None), test_utils=checks)
    torch.library.opcheck(ops.estimate.operator, (q, torch.ones(4), packed, 40, kv, positions + 1, "rows", 1), test_utils=checks)
    arguments = (q, torch.ones(4), packed, 40, kv, positions + 1, "rows", 1, *plan)
    torch.library.opcheck(ops.estimate_select.operator, arguments, test_utils=checks)


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_an_operator_is_dispatched_where_somebody_traces_or_asks_for_gradients():
    q, k, v = qkv(4, 2, 6, 40, 16)
    arguments = (Heads.all(4, 2).kv, 34 + torch.arange(6), None, None, 1, 0.25)
    out = ops.attend(q, k, v, *arguments)
    assert ops.attend.operator(q, k, v, *arguments).equal(out)
    with pytest.raises(RuntimeError, match="backward"):
        ops.attend(q.clone().requires_grad_(), k, v, *arguments).sum().backward()
    with torch.no_grad():
        assert ops.attend(q.clone().requires_grad_(), k, v, *arguments).equal(out)
    compiled = torch.compile(lambda *tensors: ops.attend(*tensors, *arguments[1:]) * 2, backend="eager", fullgraph=True)
    assert compiled(q, k, v, arguments[0]).equal(out * 2)
    assert ops.attend(*(x.to("meta") for x in (q, k, v)), *arguments).is_meta
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert isinstance(ops.attend(q, k, v, *arguments), FakeTensor)


def test_auto_takes_the_twin_where_native_cannot_serve():
    assert kernels.choose("auto", head_dim=20, dtype=torch.float32).name == "torch"
    assert kernels.choose("auto", head_dim=64, dtype=torch.float16).name == "torch"
    assert kernels.choose("torch", head_dim=64, dtype=torch.float32).name == "torch"
    assert kernels.choose("auto", head_dim=64, dtype=torch.float32).name == ("native" if BUILT else "torch")


def test_native_is_refused_where_it_cannot_be_had(monkeypatch):
    with pytest.raises(InputError, match="multiple of 8"):
        kernels.choose("native", head_dim=20, dtype=torch.float32)
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(InputError, match="were not built"):
        kernels.choose("native", head_dim=64, dtype=torch.float32)
    assert kernels.choose("auto", head_dim=64, dtype=torch.float32).name == "torch"


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_a_level_this_processor_lacks_is_refused():
    with pytest.raises(InputError, match="on this processor"), native.forced_level("avx1024"):
        pass


@pytest.mark.skipif(not BUILT, reason="the native kernels were not built: no C++ compiler")
def test_one_copy_of_openmp_is_loaded():
    """Two copies would keep two pools of threads that fight for the cores."""
    code = (
        "import torch; from shadowattn.kernels import native; native.require(); torch.ones(9).sum()\n"
        "paths = {line.split()[-1] for line in open('/proc/self/maps') if 'gomp' in line}\n"
        "assert len(paths) <= 1, paths"
    )
    if not os.path.exists("/proc/self/maps"):
        pytest.skip("/proc/self/maps is Linux's")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_kernels_that_cannot_be_loaded_are_refused(tmp_path, monkeypatch):
    load = native.library.__wrapped__
    monkeypatch.setenv("SHADOWATTN_NATIVE", "/nope.so")
    with pytest.raises(InputError, match=r"SHADOWATTN_NATIVE: expected a file .* got '/nope.so'.* unset SHADOWATTN_NATIVE"):
        load()
    (tmp_path / "text.so").write_text("no library")
    monkeypatch.setenv("SHADOWATTN_NATIVE", str(tmp_path / "text.so"))
    with pytest.raises(InputError, match=r"text.so: expected compiled kernels .* unset SHADOWATTN_NATIVE"):
        load()
    monkeypatch.delenv("SHADOWATTN_NATIVE")
    monkeypatch.setattr(native, "path", lambda: tmp_path / "text.so")
    with pytest.raises(InputError, match=r"text.so: expected compiled kernels .* install shadowattn again"):
        load()


def test_a_library_of_another_interface_is_refused(monkeypatch):
    """Its structs would be read at wrong places; so would an older one be, which cannot say how large they are."""
    if native.path() is None:
        return
    loaded = ctypes.CDLL(str(native.path()))
    native._check_interface(loaded, native.path())

    class Longer(ctypes.Structure):
        _fields_ = (*native._Pack._fields_, ("one_more", ctypes.c_int64))

    monkeypatch.setitem(native._FUNCTIONS, "pack", Longer)
    with pytest.raises(InputError, match=r"expected kernels with argument structs of .* compile them again"):
        native._check_interface(loaded, native.path())
    with pytest.raises(InputError, match="an older interface"):
        native._check_interface(ctypes.CDLL(None), native.path())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_tiles_multiply_where_there_are_tiles(dtype):
    """Nothing comes back: the roof is a time. A level without tiles refuses, by its name."""
    for name in native.levels():
        with native.forced_level(name):
            if name == "amx":
                native.multiply_tiles(dtype, 64)
                continue
            with pytest.raises(InputError, match=f"expected a level with tiles, got {name}"):
                native.multiply_tiles(dtype, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 200)),
    stored=st.sampled_from(["heads first", "rows first", "rows of others between", "columns first", "one head for all"]),
    special=st.sampled_from([None, -math.inf, math.nan, -math.nan, -0.0]),
    seed=st.integers(0, 99),
)
def test_the_largest_magnitudes_are_those_of_every_head(dtype, shape, stored, special, seed):
    heads, rows, dim = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if special is not None:
        x[seed % heads, seed % rows, seed % dim] = special
    if stored == "rows first":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif stored == "rows of others between":
        x = torch.cat([x, torch.full_like(x, 100)], 2)[..., :dim]
    elif stored == "columns first":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif stored == "one head for all":
        x = x[:1].expand(shape)
    for name in native.levels():
        with native.forced_level(name):
            found = ops.largest(x)
        torch.testing.assert_close(found, x.abs().amax((1, 2)).float(), rtol=0, atol=0, equal_nan=True)
        assert not found.signbit().any() or found.isnan().any()


def test_the_largest_magnitudes_of_many_numbers_are_found_by_several_threads():
    x = torch.randn(3, 1 << 11, 64, generator=torch.Generator().manual_seed(0))
    assert ops.largest(x).equal(x.abs().amax((1, 2)))
    torch.library.opcheck(ops.largest.operator, (x[:, :9],))


@pytest.mark.parametrize("x", [torch.zeros(2, 0, 8), torch.zeros(2, 8), torch.zeros(2, 3, 8, dtype=torch.float64)])
def test_what_has_no_largest_magnitude_is_refused(x):
    with pytest.raises(InputError, match="x: expected"):
        ops.largest(x)
