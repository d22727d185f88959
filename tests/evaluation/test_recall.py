"""Recall by its definition, and the integers that it is measured on against the graphs'."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.evaluation import recall
from shadowattn.evaluation.recall import SAMPLED_ROWS, Recall, _Ranking, measure_recall, measured_rows, sampled_rows
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.estimation import estimation_graph
from shadowattn.graphs.nncf_graph import NNCFGraph, compile_int8, input_steps
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.nncf import NNCF
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.types import Requant, ScaleGrid
from tests.profiles import GRID, profile_for
from tests.tensors import integer_qkv, qkv
from tests.tiny import tiny_model

RETENTIONS = torch.tensor([0.1, 0.5, 1.0], dtype=torch.float64)


@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 8), before=st.integers(0, 20), seed=st.integers(0, 50))
def test_recall_is_the_share_of_the_best_keys_found(rows, before, seed):
    """By sets, row by row and over all rows; small integers make many ties."""
    generator = torch.Generator().manual_seed(seed)
    exact, guess = torch.randint(-3, 4, (2, 2, rows, before + rows), generator=generator).float()
    visible = before + 1 + torch.arange(rows)
    found = _Ranking(exact, visible, RETENTIONS).found_by(guess)
    for at, retention in enumerate(RETENTIONS.tolist()):
        for head in range(2):
            hits = wanted = 0
            for row, seen in enumerate(visible.tolist()):
                keep = max(1, -int(-retention * seen // 1))
                best, picked = (set(_first(x[head, row, :seen], keep)) for x in (exact, guess))
                hits, wanted = hits + len(best & picked), wanted + keep
            assert (int(found["row"][0][at, head]), int(found["row"][1][at, head])) == (hits, wanted)
            hidden = torch.arange(before + rows) >= visible[:, None]
            keep = min(int(retention * int(visible.sum())) + 1, int(visible.sum()))
            best, picked = (set(_first(x[head].masked_fill(hidden, -99).flatten(), keep)) for x in (exact, guess))
            assert (int(found["pooled"][0][at, head]), int(found["pooled"][1][at, head])) == (len(best & picked), keep)


def _first(scores, keep):
    return sorted(range(len(scores)), key=lambda i: (-float(scores[i]), i))[:keep]


def test_exact_scores_find_everything():
    model = tiny_model()
    windows = torch.randint(0, 128, (1, 96), generator=torch.Generator().manual_seed(0))
    perfect = measure_recall(model, windows, {"same": _Same()}, [0.2, 1.0], chunk_tokens=32)["same"]
    for granularity in ("row", "pooled"):
        assert perfect.mean(granularity, 0) == perfect.mean(granularity, 1) == 1
    assert perfect.passes(0)
    assert perfect.figures["score_correlation"] == pytest.approx(1)


class _Same(Oracle):
    def figures(self, chunk, scores, visible):
        return {"seen": float(visible[-1])}


def test_more_bits_find_more():
    model = tiny_model()
    windows = torch.randint(0, 128, (2, 96), generator=torch.Generator().manual_seed(0))
    made = {f"{bits}": Quantised(bits=bits) for bits in (2, 4, 8)}
    found = measure_recall(model, windows, made, [0.2], chunk_tokens=48)
    means = [found[name].mean("row", 0) for name in ("2", "4", "8")]
    assert means == sorted(means)
    assert means[0] < means[2] < 1
    assert found["2"].figures["score_correlation"] < found["8"].figures["score_correlation"] < 1
    assert found["8"].figures["clipped_heads"] == 0
    assert found["8"].figures["q_levels"] > 0.1
    assert found["2"].figures["q_levels"] == 1


@pytest.mark.parametrize("requant", [None, Requant("target_requant", 3.1731e-3)])
def test_bucketed_scores_are_the_banks(requant):
    bank = GraphBank.build(profile_for(tiny_model(), 1.0), (GraphShape(2, 40, 64, 64, 2),), form=GraphForm("unit", requant))
    q, k, _ = qkv(4, 2, 40, 60, 64)
    scores = Quantised(GRID, requant=requant).scores(Chunk.of(q, k))
    expected = torch.cat([Int8Graph(bank).scores(Chunk.of(q[g : g + 2], k[g // 2][None])) for g in (0, 2)])
    assert scores.equal(expected.float())


def test_dynamic_scores_are_those_of_the_tensors_scales():
    q, k, _ = qkv(4, 2, 40, 60, 64)
    expected = Int8Tensor.of(q, k).scores(Chunk.of(q, k))
    assert Quantised().scores(Chunk.of(q, k)).equal(expected)


def test_smoothing_leaves_the_exact_product_where_integers_are_exact():
    """The mean's product is added again, and only what is left of the keys is rounded: a large mean costs nothing."""
    q, k, _ = integer_qkv(2, 2, 4, 30, 64)
    k = torch.cat([k, -k], 1)  # mean 0
    moved = k + 1000.0
    errors = {}
    for smooth in (False, True):
        scores = Quantised(smooth=smooth).scores(Chunk.of(q, moved))
        scale = 1 if smooth else float(q.abs().max() * moved.abs().max()) / 127**2  # without, integers are returned
        errors[smooth] = float((scores * scale - q @ moved.mT).abs().max())
    assert errors[True] < 2
    assert errors[False] > 10 * errors[True]


def test_figures_count_what_happens_to_values():
    q, k = torch.ones(2, 8, 64), torch.ones(1, 8, 64)
    q[0, 0, 0], q[1, :, 1:] = 1000.0, 0.001
    estimate = Quantised(ScaleGrid((1 / 127,), (1 / 127,)), requant=Requant("fixed_output", 0.001))
    chunk = Chunk.of(q, k)
    figures = estimate.figures(chunk, estimate.scores(chunk), 1 + torch.arange(8))
    assert figures["clipped_heads"] == 0.5
    assert figures["q_saturated"] == 1 / (2 * 8 * 64)
    assert figures["q_zero"] == 63 / 128
    assert figures["k_zero"] == 0
    assert figures["score_saturated"] == 1


def test_a_fixed_graph_scores_every_group():
    shape = GraphShape(2, 40, 64, 64, 2)
    model = estimation_graph(shape, GraphForm(), 0.02, 0.02)
    q, k, _ = qkv(4, 2, 40, 60, 64)
    fixed = NNCF(NNCFGraph(compile_int8(model, what="test"), shape, input_steps(model)))
    same = Quantised(ScaleGrid((0.02,), (0.02,)))
    chunk = Chunk.of(q, k)
    torch.testing.assert_close(fixed.scores(chunk), same.scores(chunk) * 0.02**2)
    torch.testing.assert_close(fixed.scores(chunk[[1, 2]]), fixed.scores(chunk)[1:3])
    figures = fixed.figures(chunk, q, q)
    assert figures == pytest.approx(same.figures(chunk, q, q), abs=0.005)  # −128 is one more integer
    assert figures["q_saturated"] > 0
    with pytest.raises(InputError, match="at most 40 rows and 64 keys, got 41 and 64"):
        fixed.scores(Chunk.of(*qkv(4, 2, 41, 64, 64)[:2]))


def test_the_gate_is_the_authors():
    def found(values):
        return Recall({"row": [[values]], "pooled": [[values]]}, {})

    assert found([0.95, 0.9]).passes(0)
    assert not found([0.95, 0.8]).passes(0)
    assert not found([1.0] * 9 + [0.4]).passes(0)
    assert found([0.95, 0.7]).worst("row", 0) == (0.7, 0, 1)


def test_refusals():
    with pytest.raises(InputError, match="whose products it was calibrated on"):
        Quantised(requant=Requant("target_requant", 0.1))
    with pytest.raises(InputError, match=f"at least {SAMPLED_ROWS} rows"):
        measure_recall(tiny_model(), torch.zeros(1, 8, dtype=torch.long), {}, [0.2], chunk_tokens=16)
    with pytest.raises(InputError, match="windows of at least 32 tokens"):
        measure_recall(tiny_model(), torch.zeros(1, 8, dtype=torch.long), {}, [0.2], chunk_tokens=32)


@pytest.mark.parametrize("rows", [32, 33, 48, 95, 96, 128, 130, 512])
def test_the_rows_looked_at_are_spread_over_the_chunk(rows):
    """32 of them, at equal distances, with as much of the chunk before the first as behind the last."""
    found = range(rows)[sampled_rows(rows)]
    assert len(found) == SAMPLED_ROWS
    assert found.step == rows // SAMPLED_ROWS
    assert abs(found[0] - (rows - 1 - found[-1])) <= 1


def test_recall_counts_the_rows_it_ranks(monkeypatch):
    seen, rows_of = [], recall.sampled_rows

    def counting(*how):
        seen.append(range(how[0])[rows_of(*how)])
        return rows_of(*how)

    monkeypatch.setattr(recall, "sampled_rows", counting)
    tokens = torch.randint(0, 50, (1, 170), generator=torch.Generator().manual_seed(0))
    found = measure_recall(tiny_model(), tokens, {"one": _Same()}, [0.2], chunk_tokens=64)["one"]
    assert found.mean("row", 0) == 1
    assert sum(map(len, seen)) == 2 * measured_rows(170, 64) == 2 * 96  # two layers; chunks of 64, 64 and 42
    assert {tuple(rows)[:2] for rows in seen} == {(1, 3), (5, 6)}


ESTIMATORS = {
    "dynamic": Quantised(),
    "4 bits": Quantised(bits=4),
    "smoothed": Quantised(smooth=True),
    "INT8 scores": Quantised(GRID, requant=Requant("target_requant", 3e-3)),
}


@pytest.mark.parametrize("block_score", ["leading_query", "max", "probability"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_way_to_estimate_runs_in_a_model(name, block_score):
    model, ids = tiny_model(), torch.arange(70)[None]
    how = {"estimator": ESTIMATORS[name], "query_block": 8, "block_score": block_score}
    with torch.no_grad(), shadowattn.attach(model, 0.3, **how) as run:
        assert model(ids).logits.isfinite().all()
    assert run.counters.sparse_rows == 2 * 4 * 70


def test_a_short_chunk_at_the_end_does_not_count():
    """32 rows pooled are 32, or none."""
    tokens = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(0))
    found = [
        measure_recall(tiny_model(), window, {"one": Quantised(bits=3)}, [0.2], chunk_tokens=32)["one"].heads
        for window in (tokens, tokens[:, :32])
    ]
    assert found[0] == found[1]
