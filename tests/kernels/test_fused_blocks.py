"""Blocks of rows that choose a list and attend to it in one task: the lists and the outputs of the stages one after another."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.kernels import native, ops
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.selection import BLOCK_SCORES, Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.types import Heads
from tests.tensors import HEADS, qkv

LEVELS = native.levels()

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", LEVELS)
@given(
    dim=st.sampled_from([8, 24, 64, 80, 128, 256]),
    heads=st.sampled_from(HEADS),
    rows=st.sampled_from([1, 7, 32, 70, 150]),
    earlier=st.sampled_from([0, 1, 63, 700, 4090]),
    rule=st.builds(
        Rule,
        query_block=st.sampled_from([4, 5, 8, 32, 64, 70]),  # above 64 rows a list goes through in pieces
        block_score=st.sampled_from(BLOCK_SCORES),
        sinks=st.sampled_from([0, 2]),
        recent=st.sampled_from([0, 3]),
        min_budget=st.sampled_from([1, 1, 40]),
    ),
    retention=st.sampled_from([0.001, 0.05, 0.2, 1.0]),
    strided=st.booleans(),
    threads=st.sampled_from([1, 2]),  # with more `attend` cuts lists in parts, whose sums are rounded otherwise
    seed=st.integers(0, 99),
)
def test_blocks_attend_to_what_the_estimate_selects(
    level, dtype, dim, heads, rows, earlier, rule, retention, strided, threads, seed
):
    count, groups = heads
    keys, positions = rows + earlier, earlier + torch.arange(rows)
    q, k, v = (x.to(dtype) for x in qkv(count, groups, rows, keys, dim, seed=seed))
    if strided:
        k, v = (torch.cat([x, x], 1).transpose(0, 1).contiguous().transpose(0, 1)[:, :keys] for x in (k, v))
    asked = rule.scored(Chunk.of(q, k))
    q_scales, k_scales = (x.float().abs().amax((1, 2)) / 127 for x in (asked.q, k))
    exponents = torch.linspace(1e-4, 1e-3, count) * math.log2(math.e)
    retentions = torch.linspace(retention / 2, retention, count, dtype=torch.float64)
    lists, kv = rule.lists(retentions, positions), Heads.all(count, groups).kv
    ranking = (asked.positions + 1, rule.pooling, rule.query_block)
    plan = (lists.candidates, lists.tail, lists.indptr, lists.size, lists.sinks, lists.recent, lists.self_first)
    packed = torch.zeros(groups, -(-keys // 32) * 2, dim // 4, 16, 4, dtype=torch.uint8)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with native.forced_level(level):
            ops.pack(k, k_scales, packed, 0, None)
            expected = ops.estimate_select(asked.q, q_scales, packed, keys, kv, *ranking, *plan, exponents)
            apart = ops.attend(q, k, v, kv, positions, expected, lists.indptr, rule.query_block, 0.3)
            attend = (q, k, v, asked.q, q_scales, packed, kv, positions, *ranking, *plan, 0.3)
            out, indices = ops.attend_chosen_blocks(*attend, True, exponents)
            again, none = ops.attend_chosen_blocks(*attend, False, exponents)
    finally:
        torch.set_num_threads(before)
    assert indices.equal(expected)
    assert len(none) == 0
    assert again.equal(out)
    assert out.equal(apart)


@pytest.mark.parametrize("block_score", BLOCK_SCORES)
def test_the_pipeline_gives_what_its_stages_give_with_threads_of_their_own(block_score):
    q, k, v = qkv(4, 2, 70, 300, 64)
    chunk, rule = Chunk.of(q, k, v, retention=0.2, scale=0.125), Rule(32, block_score, sinks=4)
    stages = lambda: Stages(chunk.rewound(), Parts(Int8Fused.of(q, k), rule, NativeKernels()))  # noqa: E731
    once = run_batched(stages(), threads=Threads(), keep_lists=True)
    apart = run_batched(stages(), threads=Threads(1, 1, 2), keep_lists=True)
    assert [span.stage for span in once.timeline.spans] == ["attend"]
    assert [span.stage for span in apart.timeline.spans] == ["estimate", "attend"]
    assert once.selected.indices.equal(apart.selected.indices)
    assert once.out.equal(apart.out)
    assert run_batched(stages(), threads=Threads(), keep_lists=False).selected == once.selected.kept()


def test_sums_that_32_bits_do_not_hold_are_refused_before_the_work():
    q, k, v = qkv(1, 1, 600, 600, 256)
    stages = Stages(Chunk.of(q, k, v, retention=0.2, scale=0.1), Parts(Int8Fused.of(q, k), Rule(600, "sum"), NativeKernels()))
    with pytest.raises(InputError, match="do not fit int8_fused's 32 bits"):
        run_batched(stages, threads=Threads(), keep_lists=False)


def arguments() -> dict[str, object]:
    q, k, v = qkv(4, 2, 6, 40, 16)
    rule, positions = Rule(4), 34 + torch.arange(6)
    lists, asked = rule.lists(torch.full((4,), 0.3, dtype=torch.float64), positions), rule.scored(Chunk.of(q, k))
    return {
        "q": q,
        "k": k,
        "v": v,
        "scored": asked.q,
        "q_scales": torch.ones(4),
        "packed": torch.zeros(2, 4, 4, 16, 4, dtype=torch.uint8),
        "kv_head": Heads.all(4, 2).kv,
        "positions": positions,
        "visible": asked.positions + 1,
        "pooling": "rows",
        "query_block": 4,
        "candidates": lists.candidates,
        "tail": lists.tail,
        "indptr": lists.indptr,
        "size": lists.size,
        "sinks": 0,
        "recent": 0,
        "self_first": False,
        "scale": 0.25,
        "listed": True,
    }


def test_it_is_what_torch_expects_of_an_operator():
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.attend_chosen_blocks.operator, (), arguments(), test_utils=checks)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"tail": torch.tensor([3, 2])}, "keys up to the last row of each block"),
        ({"scored": torch.ones(4, 6, 16), "visible": torch.arange(35, 41)}, r"scored: expected \[4, 2, 16\]"),
        ({"scored": torch.ones(4, 2, 16, dtype=torch.bfloat16)}, "scored: expected"),
        ({"pooling": "max"}, r"scored: expected \[4, 6, 16\]"),
        ({"query_block": 0}, "query_block"),
        ({"pooling": "max", "scored": torch.ones(4, 6, 16), "visible": torch.ones(6, dtype=torch.int64)}, "visible: expected"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_kernel(changed, message):
    given = arguments() | changed
    if "tail" in changed:
        given["candidates"] = given["candidates"] + 1
    with pytest.raises(InputError, match=message):
        ops.attend_chosen_blocks(**given)


@pytest.mark.parametrize("block_score", [score for score in BLOCK_SCORES if score != "probability"])  # sums may nearly tie
@pytest.mark.parametrize("level", LEVELS)
def test_the_lists_of_the_torch_form(level, block_score):
    q, k, v = qkv(4, 2, 70, 200, 64)
    chunk, rule = Chunk.of(q, k, v, retention=0.2, scale=0.125), Rule(32, block_score, sinks=2, recent=3)
    with native.forced_level(level):
        made = run_batched(Stages(chunk, Parts(Int8Fused.of(q, k), rule, NativeKernels())), threads=Threads(), keep_lists=True)
    twin = Stages(chunk.rewound(), Parts(Int8Fused.of(q, k), rule, TorchKernels()))
    expected = run_batched(twin, threads=Threads(), keep_lists=True)
    assert made.selected.indices.equal(expected.selected.indices)
    torch.testing.assert_close(made.out, expected.out, atol=1e-5, rtol=1e-5)
