"""What an estimator promises: ours keep it, and of broken ones each is refused for its own reason; scores are checked in use."""

from dataclasses import replace

import pytest
import torch

import shadowattn
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.kernels import native
from shadowattn.online.attention import Request, SparseAttention
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from tests.profiles import GRID, bank_for, profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model

SMALL = {"rows": 8, "keys": 20}


def device_bank() -> GraphBank:
    form = GraphForm("static", mask=True, indices=True)
    return GraphBank.build(profile_for(tiny_model(), 1.0), (GraphShape(1, 8, 64, 20, top_k=20),), form=form)


OURS = {
    "oracle": Oracle,
    "random": Random,
    "streaming": Streaming,
    "int8_tensor": lambda: Int8Tensor(torch.full((4,), 0.03), torch.full((2,), 0.04)),
    "int8_fused with scales": lambda: Int8Fused(q_scales=torch.full((4,), 0.03), k_scales=torch.full((2,), 0.04)),
    "int8_fused with a grid": lambda: Int8Fused(GRID),
    "int8": lambda: Int8Graph(bank_for(tiny_model())),
    "int8, one graph for all buckets": lambda: Int8Graph(bank_for(tiny_model(), form=GraphForm("unit"))),
    "int8_device": lambda: Int8Device(device_bank()),
}


@pytest.mark.parametrize("name", OURS)
def test_ours_keep_the_contract(name):
    if name.startswith("int8_fused") and native.library() is None:
        pytest.skip("the native kernels were not built: the installation found no compiler")
    shadowattn.check_estimator(OURS[name](), **SMALL)


class Broken(Oracle):
    """Its scores and what is wrong with them, as a method of one of the classes below."""

    def scores(self, chunk):
        return self.spoil(super().scores(chunk), chunk.q, chunk.k, chunk.positions)


class WrongRank(Broken):
    def spoil(self, scores, q, k, positions):
        return scores[0]


class TooFewKeys(Broken):
    def spoil(self, scores, q, k, positions):
        return scores[..., :-1]


class OneForAllRows(Broken):
    def spoil(self, scores, q, k, positions):
        return scores[:, :1]


class Double(Broken):
    def spoil(self, scores, q, k, positions):
        return scores.double()


class Array(Broken):
    def spoil(self, scores, q, k, positions):
        return scores.numpy()


class OneNan(Broken):
    def spoil(self, scores, q, k, positions):
        scores[-1, -1, 3] = float("nan")
        return scores


class OneInfinity(Broken):
    def spoil(self, scores, q, k, positions):
        scores[-1, -1, 3] = float("inf")
        return scores


class LastKeyCounts(Broken):
    """Centres keys on the mean of all of them and squares: what a key scores depends on later keys."""

    def spoil(self, scores, q, k, positions):
        return (scores - k.mean(1).sum(-1).repeat_interleave(2)[:, None, None]) ** 2


class LaterQueriesCount(Broken):
    def spoil(self, scores, q, k, positions):
        return scores + scores.mean(1, keepdim=True)


class Unseeded(Broken):
    def spoil(self, scores, q, k, positions):
        return torch.rand(scores.shape)


class Changing(Broken):
    def spoil(self, scores, q, k, positions):
        k *= 0.5
        return scores


class ByPlaceInChunk(Broken):
    """Ranks by the place of a row in its chunk, not by its position."""

    def spoil(self, scores, q, k, positions):
        return scores * torch.where(torch.arange(q.shape[1]) % 8 < 4, 1.0, -1.0)[:, None]


class Known:
    """So many keys, once and for all."""

    length = 0

    def extend(self, k):
        self.length = self.length or k.shape[1]


class ForgetsToGrow(Oracle):
    """Knows the keys of the first chunk alone."""

    def scores(self, chunk):
        scores, known = super().scores(chunk), chunk.cache.derived("known", Known, chunk.k).length
        scores[:, :, known:] = 0
        return scores


class ByPlaceAmongHeads(Broken):
    def spoil(self, scores, q, k, positions):
        return scores * torch.where(torch.arange(len(q)) % 2 == 0, 1.0, -1.0)[:, None, None]


REASONS = {
    WrongRank: r"scores of WrongRank: expected \[H, Q, K\]",
    TooFewKeys: r"scores of TooFewKeys: expected \[H, Q, K\]",
    OneForAllRows: r"scores of OneForAllRows: expected \[H, Q, K\]",
    Double: "scores of Double: expected float32, float16 or int8, got torch.float64",
    Array: "scores of Array: expected a torch.Tensor, got ndarray",
    OneNan: "scores of OneNan: got NaN",
}
ONLY_CHECKED = {
    OneInfinity: "scores of OneInfinity: got NaN or infinity",
    LastKeyCounts: "LastKeyCounts: not causal",
    LaterQueriesCount: "LaterQueriesCount: not causal",
    Unseeded: "Unseeded: the same input gave other scores",
    Changing: "Changing: it changed q or k",
    ByPlaceInChunk: "ByPlaceInChunk: it depends on the chunk length",
    ForgetsToGrow: "ForgetsToGrow: it depends on the chunk length",
    ByPlaceAmongHeads: "ByPlaceAmongHeads: it depends on the order of heads",
}


@pytest.mark.parametrize(("kind", "reason"), (REASONS | ONLY_CHECKED).items())
def test_a_broken_one_is_refused_for_its_reason(kind, reason):
    with pytest.raises(InputError, match=reason):
        shadowattn.check_estimator(kind(), **SMALL)


class FutureLists(Int8Fused):
    """Selects by what the whole chunk scores."""

    def select(self, chunk, rule, lists, kernels):
        return super().select(chunk.asking(lambda q: q.flip(1), chunk.positions), rule, lists, kernels)


class OutOfRange(Int8Fused):
    def select(self, chunk, rule, lists, kernels):
        made = super().select(chunk, rule, lists, kernels)
        return replace(made, indices=made.indices + 1000)


class NotAscending(Int8Fused):
    def select(self, chunk, rule, lists, kernels):
        made = super().select(chunk, rule, lists, kernels)
        return replace(made, indices=made.indices.flip(0))


class Lists(Oracle):
    """Selects by itself, with one thing made wrong."""

    def __init__(self, wrong):
        object.__setattr__(self, "wrong", wrong)

    def select(self, chunk, rule, lists, kernels):
        return self.wrong(Estimator.select(self, chunk, rule, lists, kernels))


@pytest.mark.parametrize("kernel", ["torch", "auto"])
@pytest.mark.parametrize(
    "wrong",
    [
        lambda made: replace(made, indices=made.indices + 1),  # the last of a row that keeps itself is after it
        lambda made: replace(made, indices=made.indices - 40),
        lambda made: replace(made, indices=made.indices.long()),
        lambda made: replace(made, indices=made.indices.float()),
        lambda made: replace(made, indices=made.indices.flip(0)),
        lambda made: replace(made, indices=torch.zeros_like(made.indices)),
        lambda made: replace(made, indices=made.indices[:-1]),
        lambda made: replace(made, indptr=made.indptr.flip(0)),
        lambda made: replace(made, positions=made.positions + 1),
        lambda made: replace(made, query_block=2),
        lambda made: made.indices,
    ],
)
def test_lists_are_looked_at_in_use(wrong, kernel):
    q, k, v = qkv(4, 2, 20, 40, 64)
    how = {"causal_offset": 20, "kernel": kernel, "sinks": 0, "recent": 1}
    sound = shadowattn.sparse_attention(q, k, v, 0.3, estimator=Lists(lambda made: made), **how)
    assert sound.equal(shadowattn.sparse_attention(q, k, v, 0.3, estimator=Oracle(), **how))
    with pytest.raises(InputError, match=r"of Lists|of the lists of Lists"):
        shadowattn.sparse_attention(q, k, v, 0.3, estimator=Lists(wrong), **how)


@pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: the installation found no compiler")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FutureLists, "FutureLists: not causal"),
        (OutOfRange, r"expected keys of 0 … 19"),
        (NotAscending, r"ascending in each list"),
    ],
)
def test_lists_of_a_broken_one_are_refused(kind, reason):
    with pytest.raises(InputError, match=reason):
        shadowattn.check_estimator(kind(GRID), **SMALL)


class PageMeans(Oracle):
    """A page of many keys scores its mean key, those after the row among them."""

    def __init__(self, page):
        object.__setattr__(self, "page", page)

    def scores(self, chunk):
        pages = [chunk.k[:, start : start + self.page].mean(1, keepdim=True) for start in range(0, chunk.keys, self.page)]
        scores = chunk.q @ torch.cat(pages, 1)[chunk.heads.kv].mT
        return scores.repeat_interleave(self.page, 2)[..., : chunk.keys].contiguous()


@pytest.mark.parametrize("page", [8, 32, 64, 128, 256])
def test_pages_that_look_ahead_are_found_however_long_they_are(page):
    with pytest.raises(InputError, match="PageMeans: not causal"):
        shadowattn.check_estimator(PageMeans(page))


def test_a_select_of_ones_own_is_used():
    calls = []

    class Selecting(Oracle):
        def scores(self, chunk):
            return super().scores(chunk)

        def select(self, chunk, rule, lists, kernels):
            calls.append(chunk.layer)
            return super().select(chunk, rule, lists, kernels)

    shadowattn.check_estimator(Selecting())
    checked = len(calls)
    q, k, v = qkv(4, 2, 20, 40, 64)
    shadowattn.sparse_attention(q, k, v, 0.3, causal_offset=20, estimator=Selecting())
    assert len(calls) > checked > 0


@pytest.mark.parametrize("wrong", [Oracle, GraphForm(), "oracle", None, 3])
def test_what_is_no_estimator_is_refused(wrong):
    with pytest.raises(InputError, match=r"estimator: expected (an object|a shadowattn.Estimator)"):
        shadowattn.check_estimator(wrong)


def test_sizes_that_cannot_be_halved_are_refused():
    for sizes in ({"rows": 7}, {"heads": 3}, {"keys": 8}, {"rows": 2.0}, {"rule": Rule(8)}):
        with pytest.raises(InputError, match="expected"):
            shadowattn.check_estimator(OURS["int8_fused with scales"](), **SMALL | sizes)


@pytest.mark.parametrize("kernel", ["auto", "torch"])
@pytest.mark.parametrize("query_block", [1, 8])
@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
def test_wrong_scores_are_refused_wherever_they_are_used(kind, reason, query_block, kernel):
    q, k, v = qkv(4, 2, 16, 48, 64)
    how = {"estimator": kind(), "query_block": query_block, "block_score": "max", "kernel": kernel}
    with pytest.raises(InputError, match=reason):
        shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=32, **how)


@pytest.mark.parametrize("mode", ["serial", "overlap"])
@pytest.mark.parametrize(("kind", "reason"), REASONS.items())
def test_a_pipeline_refuses_wrong_scores(kind, reason, mode):
    prefill = SparseAttention([[0.2] * 4], kind(), pipeline=Pipeline(mode))
    with pytest.raises(InputError, match=reason):
        prefill(0, *(x[None] for x in qkv(4, 2, 16, 16, 64)), 0.125)


@pytest.mark.parametrize(("kind", "reason"), [pair for pair in REASONS.items() if pair[0] is not OneForAllRows])
def test_shared_decode_refuses_wrong_scores(kind, reason):
    prefill = SparseAttention([[0.2] * 4], kind(), decode="shared")
    with pytest.raises(InputError, match=reason):
        prefill(0, *(x[None] for x in qkv(4, 2, 1, 48, 64)), 0.125, Request(decode=True))


@pytest.mark.parametrize("mode", ["batched", "serial", "overlap"])
@pytest.mark.parametrize("parent", [Oracle, Int8Graph, Int8Fused])
def test_scores_that_a_class_defines_govern_every_path(parent, mode):
    """Whatever its parent does instead of asking for scores."""
    if parent is Int8Fused and native.library() is None:
        pytest.skip("the native kernels were not built: the installation found no compiler")
    kind = type("Mine", (parent,), {"scores": lambda self, chunk: -parent.scores(self, chunk)})
    built = [k() if parent is Oracle else k(bank_for(tiny_model())) if parent is Int8Graph else k(GRID) for k in (kind, parent)]
    q, k, v = (x[None] for x in qkv(4, 2, 32, 64, 64))
    run = [SparseAttention([[0.2] * 4], one, pipeline=Pipeline(mode))(0, q, k, v, 0.125) for one in built]
    assert not torch.allclose(*run, atol=1e-2)
    batched = SparseAttention([[0.2] * 4], built[0])(0, q, k, v, 0.125)
    torch.testing.assert_close(run[0], batched, atol=1e-5, rtol=1e-5)
    with pytest.raises(InputError, match="in known units"):
        SparseAttention([[0.2] * 4], built[0], query_block=8, block_score="probability")(0, q, k, v, 0.125)
