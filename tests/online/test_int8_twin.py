"""The torch twin of `int8_fused`, for a model on a GPU: the keys of the specification and of the native estimate, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn import reference
from shadowattn.kernels import native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_fused import Int8Fused, TorchKeys
from shadowattn.online.selection import BLOCK_SCORES, Rule
from shadowattn.types import KeyOffset, ScaleGrid, Selection
from tests.elsewhere import DEVICE, elsewhere
from tests.selections import as_mask
from tests.tensors import HEADS, qkv

RULES = st.builds(
    Rule,
    query_block=st.sampled_from([1, 2, 8]),
    block_score=st.sampled_from(BLOCK_SCORES),
    sinks=st.integers(0, 3),
    recent=st.integers(0, 5),
    min_budget=st.sampled_from([1, 1, 16]),
)


def chosen_elsewhere(q, k, retention, rule: Rule, make=Int8Fused.of) -> Selection:
    """The lists that the twin makes, brought to the CPU."""
    with elsewhere(), torch.no_grad():
        q, k = q.to(DEVICE), k.to(DEVICE)
        chunk = Chunk.of(q, k, retention=retention, scale=0.125)
        made = make(q, k).select(chunk, rule, rule.lists(chunk.retention, chunk.positions), TorchKernels())
        return Selection(*(x.cpu() for x in (made.indices, made.indptr, made.positions)), made.query_block)


@given(
    heads=st.sampled_from(HEADS), rows=st.integers(1, 20), before=st.integers(0, 40), dim=st.sampled_from([4, 8, 20]),
    retention=st.floats(0.02, 1), rule=RULES, seed=st.integers(0, 1000),
)  # fmt: skip
def test_selects_what_the_specification_selects(heads, rows, before, dim, retention, rule, seed):
    if rule.block_score == "pooled_query":  # quantises the mean query, where the specification averages scores
        rule = replace(rule, block_score="max")
    q, k, _ = qkv(*heads, rows, before + rows, dim, seed=seed)
    fused, retentions = Int8Fused.of(q, k), torch.full((heads[0],), retention, dtype=torch.float64)
    k_scales = fused.k_scales.repeat_interleave(heads[0] // heads[1])
    q8, k8 = (torch.round(x / s[:, None, None]).long() for x, s in ((q, fused.q_scales), (k, fused.k_scales)))
    scores = (q8 @ k8.repeat_interleave(heads[0] // heads[1], 0).mT).float()
    scales = (fused.q_scales * k_scales * 0.125).tolist()
    visible = torch.arange(before, before + rows) + 1
    options = rule.query_block, rule.block_score, rule.sinks, rule.recent, rule.min_budget
    one_by_one = zip(scores.split(1), retentions.split(1), scales, strict=True)
    expected = torch.cat([reference.select(s, r, visible, *options, scale=scale) for s, r, scale in one_by_one])
    assert as_mask(chosen_elsewhere(q, k, retentions, rule), before + rows).equal(expected)


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")
@given(
    heads=st.sampled_from(HEADS), rows=st.integers(1, 20), before=st.integers(0, 40), retention=st.floats(0.02, 1), rule=RULES,
    dtype=st.sampled_from(["float32", "bfloat16"]), how=st.sampled_from(["fixed", "measured", "grid", "offset"]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_selects_what_the_native_estimate_selects(heads, rows, before, dtype, retention, rule, how, seed):
    if rule.block_score == "probability":  # float32 sums of exponentials there
        rule = replace(rule, block_score="sum")
    q, k, _ = (x.to(getattr(torch, dtype)) for x in qkv(*heads, rows, before + rows, 16, seed=seed))
    make = {
        "fixed": Int8Fused.of,
        "measured": lambda q, k: Int8Fused(),
        "grid": lambda q, k: Int8Fused(ScaleGrid((0.01, 0.03), (0.01, 0.02, 0.04))),
        "offset": lambda q, k: Int8Fused(key_offset=KeyOffset([[[0.3] * 16] * heads[1]])),
    }[how]
    chunk = Chunk.of(q, k, retention=retention, scale=0.125)
    expected = make(q, k).select(chunk, rule, rule.lists(chunk.retention, chunk.positions), NativeKernels())
    chosen = chosen_elsewhere(q, k, retention, rule, make)
    assert chosen.indptr.equal(expected.indptr)
    assert chosen.indices.equal(expected.indices)


def test_keys_become_integers_once_and_are_made_anew_where_the_cache_was_cropped():
    _, k, _ = qkv(4, 2, 1, 100, 20)
    other = torch.cat([k[:, :64], -k[:, 64:]], 1)
    cache, scales = LayerCache(), torch.full((2,), 0.03)
    for keys in (k[:, :70], k):
        made = cache.derived("keys", lambda: TorchKeys(scales, 20), keys)
    assert made.integers.shape == (2, 100, 20)
    cache.crop(64)
    mixed = cache.derived("keys", lambda: TorchKeys(scales, 20), other).integers
    alone = TorchKeys(scales, 20)
    alone.extend(other)
    assert mixed.equal(alone.integers)
