from dataclasses import dataclass

import pytest
import torch

import shadowattn
from shadowattn.errors import InputError
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_tensor import Int8Tensor, quantise
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.types import Heads
from tests.tensors import qkv


def test_oracle_scores_are_the_products():
    q, k, _ = qkv(4, 2, 3, 7, 16)
    scores = Oracle().scores(Chunk.of(q, k, positions=torch.arange(4, 7)))
    torch.testing.assert_close(scores, q @ k.repeat_interleave(2, 0).transpose(1, 2))


def test_int8_without_a_bank_is_integer_arithmetic():
    q, k, _ = qkv(4, 2, 5, 9, 64)
    estimator = Int8Tensor.of(q, k)
    scores = estimator.scores(Chunk.of(q, k, positions=torch.arange(4, 9)))
    q8, k8 = quantise(q, estimator.q_scales).long(), quantise(k, estimator.k_scales).long()
    assert q8.abs().amax((1, 2)).tolist() == [127] * 4
    assert scores.long().equal(q8 @ k8.repeat_interleave(2, 0).transpose(1, 2))


def test_streaming_keeps_itself_then_sinks_then_the_most_recent():
    q, k, _ = qkv(1, 1, 1, 8, 16)
    scores = Streaming(sinks=2).scores(Chunk.of(q, k, positions=torch.tensor([6])))
    ranked = scores[0, 0, :7].argsort(descending=True).tolist()  # key 7 lies in the future
    assert ranked == [6, 0, 1, 5, 4, 3, 2]


def lowbias32(x: int) -> int:
    """Chris Wellons's 32-bit finaliser, in Python's integers."""
    x &= 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


@pytest.mark.parametrize("seed", [0, 1, 123_456_789, 2**31 - 1])
def test_random_scores_are_a_hash_of_32_bits(seed):
    q, k = torch.randn(4, 3, 8), torch.randn(2, 50, 8)
    scores = Random(seed).scores(Chunk.of(q, k, k, retention=0.5, scale=1.0, layer=5))
    for head, row, key in [(0, 0, 0), (3, 2, 49), (1, 1, 30), (2, 0, 7)]:
        state = lowbias32(lowbias32(seed * 1_000_003 + 5) + head)
        assert scores[head, row, key] == lowbias32(lowbias32(state + 47 + row) + key) & 0xFFFFFF


def test_random_depends_on_seed_layer_head_row_and_key_and_on_nothing_else():
    q, k, _ = qkv(3, 1, 4, 50, 16)
    positions = torch.arange(40, 44)
    scores = Random(seed=1).scores(Chunk.of(q, k, layer=2, positions=positions))
    shorter = Random(seed=1).scores(Chunk.of(-q[:, 1:], k[:, :45], layer=2, positions=positions[1:]))
    assert shorter.equal(scores[:, 1:, :45])
    for other in (
        Random(seed=2).scores(Chunk.of(q, k, layer=2, positions=positions)),
        Random(seed=1).scores(Chunk.of(q, k, layer=3, positions=positions)),
    ):
        assert not other.equal(scores)
    assert len(scores.unique()) > 0.99 * scores.numel()
    assert abs(scores.mean() / 2**24 - 0.5) < 0.05


def test_some_heads_score_as_they_do_among_all():
    """Heads of groups that are no neighbours, and of groups that are not full."""
    q, k, _ = qkv(6, 3, 5, 40, 64)
    for estimator in (Int8Tensor.of(q, k), Oracle(), Random()):
        whole = estimator.scores(Chunk.of(q, k, positions=torch.arange(35, 40)))
        for which in ([0, 1, 4, 5], [0, 2, 3], [5], [1, 3, 5]):
            heads = Heads.all(6, 3)[torch.tensor(which)]
            some = estimator.scores(Chunk.of(q[which], k, positions=torch.arange(35, 40), heads=heads))
            torch.testing.assert_close(some, whole[which])


def test_strides_change_no_score():
    """Models hand over q and k as transposed views."""
    q, k, _ = qkv(4, 2, 64, 300, 64)
    strided_q, strided_k = (x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k))
    for estimator in (Int8Tensor.of(q, k), Oracle()):
        expected = estimator.scores(Chunk.of(q, k, positions=torch.arange(236, 300)))
        for _ in range(5):  # memory that was given back too early holds its content for a while
            scores = estimator.scores(Chunk.of(strided_q, strided_k, positions=torch.arange(236, 300)))
            assert scores.equal(expected)


@dataclass(frozen=True)
class Exact(Oracle):
    """Exact scores with one value put in, in units that may be wrong."""

    value: float | None = None
    unit: float = 1.0

    def scores(self, chunk):
        scores = Oracle.scores(self, chunk)
        if self.value is not None:
            scores[:, :, 3] = self.value
        return scores

    def units(self, chunk):
        return torch.full((len(chunk.heads),), self.unit)


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize("block_score", ["probability", "sum", "max", "leading_query"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_scores_that_are_not_finite_are_refused_before_rows_are_pooled(value, block_score, kernel):
    q, k, v = qkv(4, 2, 32, 64, 16)
    how = {"causal_offset": 32, "query_block": 8, "block_score": block_score, "kernel": kernel}
    with pytest.raises(InputError, match="NaN or infinity"):
        shadowattn.sparse_attention(q, k, v, 0.2, estimator=Exact(value), **how)
    assert shadowattn.sparse_attention(q, k, v, 0.2, estimator=Exact(3e38), **how).isfinite().all()


@pytest.mark.parametrize("unit", [float("nan"), float("inf"), 0.0, -1.0])
def test_units_that_make_no_logits_are_refused(unit):
    q, k, v = qkv(4, 2, 32, 64, 16)
    how = {"causal_offset": 32, "query_block": 8, "block_score": "probability"}
    with pytest.raises(InputError, match="units of Exact: expected positive finite"):
        shadowattn.sparse_attention(q, k, v, 0.2, estimator=Exact(unit=unit), **how)


def test_an_estimator_without_units_ranks_no_probabilities():
    q, k, v = qkv(4, 2, 32, 64, 16)
    with pytest.raises(InputError, match="q·k in known units, such as oracle or int8, got Streaming; use block_score=max"):
        shadowattn.sparse_attention(
            q, k, v, 0.2, causal_offset=32, estimator="streaming", query_block=8, block_score="probability"
        )
