"""Top-p: rows keep what the definition says, and as many keys in the mean as the budget has."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.kernels import TorchKernels
from shadowattn.models import fingerprint
from shadowattn.offline.top_p import _Counts, observe_top_p
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import check_lists
from shadowattn.online.estimators.h2o import H2O
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.top_p import TopP
from shadowattn.online.selection import Rule
from shadowattn.reference import dense_attention
from shadowattn.types import RetentionProfile, ScaleGrid, Selection
from tests.tensors import qkv
from tests.tiny import tiny_model


def lists_of(estimator: TopP, chunk: Chunk, rule: Rule) -> Selection:
    lists = rule.lists(chunk.retention, chunk.positions)
    return check_lists(estimator.select(chunk, rule, lists, TorchKernels()), lists, estimator)


@given(
    seed=st.integers(0, 10_000), rows=st.integers(1, 6), before=st.integers(0, 30), retention=st.floats(0.02, 1),
    top_p=st.floats(0.05, 1), loose=st.floats(1, 6), sinks=st.integers(0, 2), recent=st.integers(0, 3),
    min_budget=st.sampled_from([1, 1, 6]),
)  # fmt: skip
def test_a_row_keeps_the_fewest_keys_of_its_loose_list(seed, rows, before, retention, top_p, loose, sinks, recent, min_budget):
    q, k, _ = qkv(4, 2, rows, before + rows, 32, seed=seed)
    chunk, rule = Chunk.of(3 * q, k, retention=retention), Rule(sinks=sinks, recent=recent, min_budget=min_budget)
    found = lists_of(TopP(Oracle(), top_p=top_p, loose=loose), chunk, rule)
    budget = rule.lists((chunk.retention * loose).clamp(max=1), chunk.positions)
    wide = TorchKernels().select(Oracle().scores(chunk), budget)
    steps = k.abs().amax(-1, keepdim=True) / 7
    logits = 3 * q @ ((k / steps).round() * steps).repeat_interleave(2, 0).mT * chunk.scale
    for head in range(4):
        for row in range(rows):
            members = wide.list_of(head, row).long().tolist()
            weights = torch.softmax(logits[head, row, members], 0).double().tolist()
            forced = {key for key in members if key < sinks or key > before + row - recent}
            by_weight = sorted(zip(weights, members, strict=True), key=lambda pair: (-pair[0], pair[1]))
            kept, total = [], 0.0
            for weight, key in by_weight:
                if kept and total >= top_p - 1e-6:
                    break
                kept.append(key)
                total += weight
            others = [key for _, key in by_weight if key not in forced]
            at_least = forced | set(others[: max(0, min_budget - len(forced))])
            one_more = set(found.list_of(head, row).tolist()) ^ (set(kept) | at_least)
            assert len(one_more) <= (abs(total - top_p) < 1e-5 or top_p > 1 - 1e-5) * len(members)


def test_everything_is_dense_attention():
    q, k, v = qkv(4, 2, 20, 60, 64)
    out = shadowattn.sparse_attention(q, k, v, 1.0, causal_offset=40, estimator=TopP(Oracle(), top_p=1.0))
    expected = dense_attention(q, k, v, causal_offset=40)
    torch.testing.assert_close(out, expected, atol=2e-3, rtol=0)  # weights below what float64 adds up may be left out


@pytest.mark.parametrize("inner", [Oracle(), Quantised(), Random(), Int8Fused.of(*qkv(4, 2, 16, 36, 64)[:2])])
def test_it_keeps_the_contract_around_others(inner):
    shadowattn.check_estimator(TopP(inner, top_p=0.8))


@pytest.mark.parametrize("inner", [Oracle(), H2O()])
@pytest.mark.parametrize("rule", [Rule(), Rule(sinks=3, recent=5), Rule(min_budget=16), Rule(sinks=3, recent=5, min_budget=12)])
def test_the_mean_number_of_keys_is_that_of_the_budget(rule, inner):
    model = tiny_model()
    windows = torch.randint(0, 128, (6, 160), generator=torch.Generator().manual_seed(1))
    profile = RetentionProfile(((0.2, 1.0, 0.1, 0.3),) * 2, ScaleGrid((1.0,), (1.0,)), 64, fingerprint(model), "tiny", "")
    found = observe_top_p(model, windows[:3], profile=profile, estimator=TopP(inner, top_p=1.0), rule=rule, chunk_tokens=32)
    assert 0 < found.share < 1
    assert found.rows == 3 * 5 * 2 * 3 * 32  # windows, chunks, layers, heads that are not dense, rows
    counts = {}
    how = {"chunk_tokens": 32, "sinks": rule.sinks, "recent": rule.recent, "min_budget": rule.min_budget}
    for name, estimator in (("top-k", inner), ("top-p", TopP(inner, top_p=found.share))):
        with shadowattn.attach(model, profile, estimator=estimator, **how) as run, torch.no_grad():
            for window in windows[3:]:
                model(input_ids=window[None])
        counts[name] = run.counters.density
    assert counts["top-p"] == pytest.approx(counts["top-k"], rel=0.05)


def test_a_window_larger_than_the_budget_has_no_share():
    model, windows = tiny_model(), torch.zeros(1, 64, dtype=torch.long)
    profile = RetentionProfile(((0.05,) * 4,) * 2, ScaleGrid((1.0,), (1.0,)), 64, fingerprint(model), "tiny", "")
    with pytest.raises(InputError, match=r"the least that rows can keep, .* with the rule's sinks and window, is more than the"):
        observe_top_p(model, windows, profile=profile, estimator=TopP(Oracle(), 1.0), rule=Rule(recent=32), chunk_tokens=32)


def test_a_budget_of_one_key_a_row_is_met():
    model, windows = tiny_model(), torch.zeros(1, 96, dtype=torch.long)
    profile = RetentionProfile(((0.005,) * 4,) * 2, ScaleGrid((1.0,), (1.0,)), 64, fingerprint(model), "tiny", "")
    found = observe_top_p(model, windows, profile=profile, estimator=TopP(Oracle(), 1.0), chunk_tokens=32)
    with shadowattn.attach(model, profile, estimator=TopP(Oracle(), found.share), chunk_tokens=32) as run, torch.no_grad():
        model(input_ids=windows)
    assert run.counters.sparse_kept == 2 * 4 * 96


def test_a_least_budget_is_kept_though_no_share_asks_for_it():
    model, windows = tiny_model(), torch.zeros(1, 96, dtype=torch.long)
    profile = RetentionProfile(((0.005,) * 4,) * 2, ScaleGrid((1.0,), (1.0,)), 64, fingerprint(model), "tiny", "")
    how = {"chunk_tokens": 32, "rule": Rule(min_budget=16)}
    found = observe_top_p(model, windows, profile=profile, estimator=TopP(Oracle(), 1.0), **how)
    attached = shadowattn.attach(model, profile, estimator=TopP(Oracle(), found.share), chunk_tokens=32, min_budget=16)
    with attached as run, torch.no_grad():
        model(input_ids=windows)
    assert run.counters.sparse_kept == 2 * 4 * (sum(range(1, 17)) + 80 * 16)


def test_lists_of_several_rows_have_no_share():
    model, windows = tiny_model(), torch.zeros(1, 64, dtype=torch.long)
    profile = RetentionProfile(((0.2,) * 4,) * 2, ScaleGrid((1.0,), (1.0,)), 64, fingerprint(model), "tiny", "")
    with pytest.raises(InputError, match="prunes the lists of single rows, got query_block=4"):
        observe_top_p(model, windows, profile=profile, estimator=TopP(Oracle(), 1.0), rule=Rule(query_block=4), chunk_tokens=32)


def test_looking_at_rows_changes_nothing_for_those_after():
    """H2O adds up what rows attended to: a calibration that did so twice would rank by other sums."""
    model, windows = tiny_model(), torch.randint(0, 128, (1, 160), generator=torch.Generator().manual_seed(1))
    profile = RetentionProfile(((0.2,) * 4,) * 2, ScaleGrid((1.0,), (1.0,)), 64, fingerprint(model), "tiny", "")
    estimator, runs = TopP(H2O(), top_p=0.9), []
    for add in (lambda chunk: None, _Counts(profile, estimator, Rule()).add):
        lists = []
        observers = (lambda seen, lists=lists: lists.append(seen.selection.indices), lambda seen, add=add: add(seen.chunk))
        with shadowattn.attach(model, profile, estimator=estimator, chunk_tokens=32, observers=observers), torch.no_grad():
            model(input_ids=windows)
        runs.append(torch.cat(lists))
    assert torch.equal(*runs)


def test_dense_heads_alone_have_no_share():
    profile = RetentionProfile(((1.0,) * 4,) * 2, ScaleGrid((1.0,), (1.0,)), 16, "", "tiny", "")
    with pytest.raises(InputError, match="heads that keep less than every key"):
        observe_top_p(
            tiny_model(), torch.zeros(1, 32, dtype=torch.long), profile=profile, estimator=TopP(Oracle(), 1.0), chunk_tokens=32
        )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopP(Oracle(), top_p=0.0), r"share of the weights in \(0, 1\], got 0.0"),
        (lambda: TopP(Oracle(), top_p=1.5), "got 1.5"),
        (lambda: TopP(Oracle, top_p=0.5), "estimator"),
        (lambda: TopP(TopP(Oracle(), 0.5), 0.5), "budgets of its own"),
    ],
)
def test_what_makes_no_sense_is_refused(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_shared_lists_are_refused():
    q, k, v = qkv(4, 2, 20, 60, 64)
    with pytest.raises(InputError, match="prunes the lists of single rows, got query_block=4"):
        shadowattn.sparse_attention(q, k, v, 0.2, causal_offset=40, estimator=TopP(Oracle(), top_p=0.9), query_block=4)


def test_lists_that_are_empty_or_too_few_are_refused():
    chunk = Chunk.of(*qkv(4, 2, 8, 20, 32)[:2], retention=0.5)
    lists = Rule().lists(chunk.retention, chunk.positions)
    good = lists_of(TopP(Oracle(), top_p=0.9), chunk, Rule())
    empty = good.indptr.clone()
    empty[1] = 0
    for indptr in (good.indptr[:-1], empty):
        broken = Selection(good.indices, indptr, good.positions, 1)
        with pytest.raises(InputError, match="32 lists of a key or more each"):
            check_lists(broken, lists, TopP(Oracle(), top_p=0.9))
