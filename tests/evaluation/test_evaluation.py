import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import shadowattn
from shadowattn.engine.observe import observe_prefill
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.evaluation.fidelity import Fidelity, measure_on_dense
from shadowattn.evaluation.perplexity import batch_losses, by_octave, token_losses, unigram_loss, window_losses
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from shadowattn.online.selection import Rule
from shadowattn.reference import _ranking, _scores, select, topk_attention
from tests.profiles import profile_for
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(3))


def test_losses_are_transformers_own():
    model, ids = tiny_model(), windows()
    with torch.no_grad():
        expected = [model(input_ids=window[None], labels=window[None]).loss.item() for window in ids]
    assert window_losses(model, ids, chunk_tokens=32).tolist() == pytest.approx(expected, rel=1e-5)
    assert batch_losses(model, ids, batch=1).tolist() == pytest.approx(expected, rel=1e-5)


@torch.no_grad()
def test_losses_of_tokens_are_those_of_the_rows_before_them():
    model, ids = tiny_model(), windows()
    found = token_losses(model, ids, chunk_tokens=32)
    assert found.shape == (2, 69)
    said = torch.log_softmax(model(input_ids=ids).logits[:, :-1].float(), -1)
    torch.testing.assert_close(found.float(), -said.gather(-1, ids[:, 1:, None])[..., 0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("rows", "firsts"), [(1, [1]), (15, [1]), (16, [1, 16]), (31, [1, 16]), (63, [1, 16, 32]), (69, [1, 16, 32, 64])]
)
def test_octaves_cover_every_row_once(rows, firsts):
    losses = torch.rand(3, rows, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    octaves = by_octave(losses)
    assert list(octaves) == firsts
    counts = [end - first for first, end in zip(firsts, [*firsts[1:], rows + 1], strict=True)]
    together = sum(count * mean for count, mean in zip(counts, octaves.values(), strict=True)) / rows
    torch.testing.assert_close(together, losses.mean(1))
    for first, count in zip(firsts, counts, strict=True):
        torch.testing.assert_close(octaves[first], losses[:, first - 1 : first - 1 + count].mean(1))


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 31, 32, 33, 64, 65, 70])
def test_chunks_cover_all_tokens_and_a_last_one_alone_is_no_decoding_step(length):
    model = tiny_model()
    tokens = torch.arange(length) % 60
    with shadowattn.attach(model, profile_for(model, 1.0), None, estimator=Random(), chunk_tokens=32, dense_above=1.0) as run:
        slices = [chunk for chunk, _ in prefill_chunks(model, tokens, chunk_tokens=32)]
    assert [i for s in slices for i in range(s.start, s.stop)] == list(range(length))
    assert all(s.stop - s.start == 32 for s in slices[:-1])
    assert run.counters.decode_rows == 0
    assert run.counters.dense_rows == 2 * 4 * length


@pytest.mark.parametrize("last", [1, 5, 6, 7, 32, 38, 39, 70])
def test_the_last_logits_are_those_of_all_chunks(last):
    model, tokens = tiny_model(), torch.arange(70) % 60
    whole = torch.cat([logits for _, logits in prefill_chunks(model, tokens, chunk_tokens=32)])
    parts = list(prefill_chunks(model, tokens, chunk_tokens=32, last=last))
    assert [at for part, _ in parts for at in range(part.start, part.stop)] == list(range(70 - last, 70))
    torch.testing.assert_close(torch.cat([logits for _, logits in parts]), whole[-last:], atol=1e-5, rtol=1e-5)


def test_unigram_loss_is_the_entropy():
    assert unigram_loss(torch.tensor([[0, 0, 1, 1], [2, 2, 3, 3]])) == pytest.approx(math.log(4))


@torch.no_grad()
@pytest.mark.parametrize(("query_block", "block_score"), [(1, "leading_query"), (16, "leading_query"), (16, "max")])
def test_fidelity_is_what_whole_matrices_give(query_block, block_score):
    """Redone from the specification, on the Q, K and V that the observer was shown."""
    model, ids = tiny_model(), windows(1)
    fidelity, seen = Fidelity(), []
    how = {"query_block": query_block, "block_score": block_score}
    with shadowattn.attach(
        model,
        profile_for(model, 0.2),
        None,
        estimator=Random(),
        chunk_tokens=32,
        observers=[fidelity, seen.append],
        **how,
    ):
        model(ids)
    mass = common = kept_keys = own = attended = rows = 0.0
    layers: dict[int, list[float]] = {}
    by_head: dict[tuple[int, int], list[float]] = {}
    masses: dict[tuple[int, int], list[Tensor]] = {}  # of every row on its kept keys
    for one in seen:
        chunk, offset = one.chunk, one.chunk.first_position
        scores, visible = _scores(chunk.q, chunk.k, chunk.v, offset)
        hidden = torch.arange(scores.shape[-1]) >= visible[:, None]
        weights = torch.softmax((scores * chunk.scale).masked_fill(hidden, -math.inf), -1)
        random_scores = Random().scores(chunk)
        kept = select(random_scores, chunk.retention, visible, query_block, block_score)
        best = select(scores, chunk.retention, visible, query_block, block_score)
        exact = weights @ chunk.v.repeat_interleave(2, 0)
        mass += float((weights * kept).sum())
        rows += weights.shape[0] * weights.shape[1]
        common += int((kept & best).sum())
        kept_keys += int(best.sum())
        for head, one_kept, one_best in zip(chunk.heads.ids.tolist(), kept, best, strict=True):
            sums = by_head.setdefault((chunk.layer, head), [0.0, 0.0])
            sums[0] += int((one_kept & one_best).sum())
            sums[1] += int(one_best.sum())
        for head, of_rows in zip(chunk.heads.ids.tolist(), (weights * kept).sum(-1), strict=True):
            masses.setdefault((chunk.layer, head), []).append(of_rows)
        places = scores.masked_fill(hidden, -math.inf).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        own += int((kept & (places < kept.sum(-1, keepdim=True))).sum())
        attended += int(kept.sum())
        of_layer = layers.setdefault(chunk.layer, [0.0, 0.0])
        of_layer[0] += float((one.out - exact).square().sum())
        of_layer[1] += float(exact.square().sum())
    error, norm = (sum(sums) for sums in zip(*layers.values(), strict=True))
    metrics = fidelity.metrics()
    assert metrics["mass_recall"] == pytest.approx(mass / rows, rel=1e-4)
    assert metrics["topk_overlap"] == pytest.approx(common / kept_keys)
    assert len(by_head) == 8
    assert metrics["worst_head_overlap"] == pytest.approx(min(found / wanted for found, wanted in by_head.values()))
    assert metrics["worst_head_overlap"] < metrics["topk_overlap"]
    assert metrics["worst_head_mass"] == pytest.approx(min(float(torch.cat(one).mean()) for one in masses.values()), rel=1e-4)
    assert metrics.get("row_overlap", metrics["topk_overlap"]) == pytest.approx(own / attended)
    assert ("row_overlap" in metrics) == (query_block > 1)
    assert metrics["output_error"] == pytest.approx((error / norm) ** 0.5, rel=1e-4)
    assert fidelity.layers() == {layer: pytest.approx((off / all_) ** 0.5, rel=1e-4) for layer, (off, all_) in layers.items()}
    assert len(layers) == 2
    assert 0.1 < metrics["topk_overlap"] < 0.9


@settings(max_examples=8)
@given(share=st.floats(0.1, 0.6), query_block=st.sampled_from([1, 4]), chunk_tokens=st.sampled_from([16, 32]))
def test_lists_on_the_dense_trace_are_of_dense_attentions_own_queries_and_keys(share, query_block, chunk_tokens):
    model, ids = tiny_model(), windows(2)
    retention = [[1.0, share, 0.3, 0.2], [0.2, share, 0.2, 0.2]]  # a head that keeps every key
    block_score = "max"
    rule = Rule(query_block, block_score)
    found = measure_on_dense(model, ids, Random(), retention, rule, chunk_tokens=chunk_tokens)
    traced: list[Chunk] = []
    observe_prefill(model, ids, traced.append, chunk_tokens=chunk_tokens)
    mass = rows = common = wanted = 0.0
    by_head: dict[tuple[int, int], list[float]] = {}
    masses: dict[tuple[int, int], list[Tensor]] = {}
    for chunk in traced:
        scores, visible = _scores(chunk.q, chunk.k, chunk.v, chunk.first_position)
        hidden = torch.arange(scores.shape[-1]) >= visible[:, None]
        weights = torch.softmax((scores * chunk.scale).masked_fill(hidden, -math.inf), -1)
        wants = torch.tensor(retention[chunk.layer], dtype=torch.float64)
        kept = select(Random().scores(chunk), wants, visible, query_block, block_score)
        best = select(scores, wants, visible, query_block, block_score)
        mass += float((weights * kept).sum())
        rows += weights.shape[0] * weights.shape[1]
        for head in range(4):
            if wants[head] < 1:
                sums = by_head.setdefault((chunk.layer, head), [0.0, 0.0])
                sums[0] += int((kept & best)[head].sum())
                sums[1] += int(best[head].sum())
                masses.setdefault((chunk.layer, head), []).append((weights * kept)[head].sum(-1))
    common, wanted = (sum(one[at] for one in by_head.values()) for at in (0, 1))
    assert found["dense_mass_recall"] == pytest.approx(mass / rows, rel=1e-4)
    assert found["dense_topk_overlap"] == pytest.approx(common / wanted)
    assert found["dense_worst_head_overlap"] == pytest.approx(min(one / whole for one, whole in by_head.values()))
    assert found["dense_worst_head_mass"] == pytest.approx(min(float(torch.cat(one).mean()) for one in masses.values()), rel=1e-4)
    assert ("dense_row_overlap" in found) == (query_block > 1)
    assert 0.1 < found["dense_topk_overlap"] < 0.9


def test_what_keeps_every_key_has_no_lists():
    rule = Rule()
    assert measure_on_dense(tiny_model(), windows(1), Random(), [[1.0] * 4] * 2, rule, chunk_tokens=32) == {}


@torch.no_grad()
def test_the_oracle_overlaps_fully_and_matches_the_specification():
    model, ids = tiny_model(), windows(1)
    fidelity, seen = Fidelity(), []
    with shadowattn.attach(
        model, profile_for(model, 0.3), None, estimator=Oracle(), chunk_tokens=32, observers=[fidelity, seen.append]
    ):
        model(ids)
    assert fidelity.metrics()["topk_overlap"] == 1.0
    for one in seen:
        chunk, offset = one.chunk, one.chunk.first_position
        expected = topk_attention(chunk.q, chunk.k, chunk.v, 0.3, causal_offset=offset, scale=chunk.scale)
        torch.testing.assert_close(one.out, expected, atol=1e-4, rtol=1e-4)


def test_dense_heads_count_as_fully_recalled():
    model, ids = tiny_model(layers=1), windows(1)
    profile = profile_for(model, 0.1)
    half = type(profile)(**vars(profile) | {"retention": ((1.0, 1.0, 0.1, 0.1),)})
    recall = []
    for one in (profile, half):
        fidelity = Fidelity()
        with (
            torch.no_grad(),
            shadowattn.attach(model, one, None, estimator=Random(), chunk_tokens=32, observers=[fidelity]),
        ):
            model(ids)
        recall.append(fidelity.metrics()["mass_recall"])
    assert recall[1] > 0.5 + recall[0] / 4


def test_nothing_sparse_nothing_measured():
    model, ids = tiny_model(), windows(1)
    fidelity = Fidelity()
    with torch.no_grad(), shadowattn.attach(model, profile_for(model, 1.0), None, estimator=Oracle(), observers=[fidelity]):
        model(ids)
    assert fidelity.metrics() == {}


@torch.no_grad()
def test_a_rows_own_best_keys_have_its_sinks_and_its_window_too():
    """Lists of 16 rows, held to the specification's order of every row's own keys."""
    model, ids = tiny_model(layers=1), windows(1)
    fidelity, seen = Fidelity(), []
    rule = {"query_block": 16, "block_score": "sum", "sinks": 2, "recent": 3}
    profile, observers = profile_for(model, 0.2), [fidelity, seen.append]
    with shadowattn.attach(model, profile, None, estimator=Random(), chunk_tokens=32, observers=observers, **rule):
        model(ids)
    found = attended = 0
    for one in seen:
        chunk = one.chunk
        scores, visible = _scores(chunk.q, chunk.k, chunk.v, chunk.first_position)
        kept = select(Random().scores(chunk), chunk.retention, visible, 16, "sum", 2, 3)
        for head, row in itertools.product(range(len(scores)), range(len(visible))):
            best = _ranking(scores[head, row, : visible[row]], 2, 1, 2)[: int(kept[head, row].sum())]
            found += int(kept[head, row, best].sum())
            attended += len(best)
    assert fidelity.metrics()["row_overlap"] == pytest.approx(found / attended)
