import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.offline import allocate
from shadowattn.offline.allocators.error_greedy import ErrorGreedy, spend
from shadowattn.offline.allocators.mixed import Mixed
from shadowattn.offline.allocators.paper import Paper
from shadowattn.offline.allocators.waterfill import Waterfill, fill
from shadowattn.offline.artifact_files import write_retention
from shadowattn.types import Sensitivity

METHODS = ["uniform", "paper", "artifact", "waterfill", "first_layers_dense"]
EXACT_MEAN = ["uniform", "waterfill", "first_layers_dense"]
# Perplexities, in wide and in narrow ranges: narrow ones make near ties, wide ones make heads that are capped.
perplexity = st.one_of(st.floats(1.001, 1e6), st.floats(10, 11))


@st.composite
def importances(draw):
    layers, heads = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    head_ppl = draw(st.lists(st.lists(perplexity, min_size=heads, max_size=heads), min_size=layers, max_size=layers))
    return head_ppl, draw(st.lists(perplexity, min_size=layers, max_size=layers)), draw(st.floats(1.001, 20))


@given(measured=importances(), retention=st.floats(0.01, 1.0), method=st.sampled_from(METHODS))
def test_one_retention_a_head_in_range(measured, retention, method):
    head_ppl, layer_ppl, base_ppl = measured
    allocated = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method=method)
    assert [len(layer) for layer in allocated] == [len(layer) for layer in head_ppl]
    assert all(0 < value <= 1 for layer in allocated for value in layer)


@given(measured=importances(), retention=st.floats(0.01, 1.0), method=st.sampled_from(EXACT_MEAN))
def test_the_mean_is_met_exactly(measured, retention, method):
    head_ppl, layer_ppl, base_ppl = measured
    allocated = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method=method)
    values = [value for layer in allocated for value in layer]
    assert sum(values) / len(values) == pytest.approx(retention, rel=1e-9)


@given(measured=importances(), retention=st.floats(0.01, 1.0))
def test_the_paper_never_exceeds_the_mean(measured, retention):
    head_ppl, layer_ppl, base_ppl = measured
    allocated = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method="paper")
    values = [value for layer in allocated for value in layer]
    assert sum(values) / len(values) <= retention * (1 + 1e-9)


@given(measured=importances(), retention=st.floats(0.01, 1.0), method=st.sampled_from(["paper", "waterfill"]))
def test_a_head_that_matters_more_gets_no_less(measured, retention, method):
    head_ppl, layer_ppl, base_ppl = measured
    allocated = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method=method)
    for ablated, layer, kept in zip(head_ppl, layer_ppl, allocated, strict=True):
        if layer < base_ppl:
            continue  # bypassing this layer helps; the product then turns the order of its heads around
        by_importance = [value for _, value in sorted(zip(ablated, kept, strict=True))]
        assert all(low <= high * (1 + 1e-9) for low, high in pairwise(by_importance))


@given(measured=importances(), retention=st.floats(0.01, 1.0), method=st.sampled_from(["uniform", "paper", "waterfill"]))
def test_the_order_of_layers_does_not_matter(measured, retention, method):
    head_ppl, layer_ppl, base_ppl = measured
    forward = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method=method)
    backward = allocate(head_ppl[::-1], layer_ppl[::-1], base_ppl=base_ppl, retention=retention, method=method)
    for one, two in zip(forward, backward[::-1], strict=True):
        assert one == pytest.approx(two, rel=1e-9)


@given(measured=importances(), retention=st.floats(0.01, 1.0), method=st.sampled_from(["uniform", "paper", "waterfill"]))
def test_the_order_of_heads_does_not_matter(measured, retention, method):
    head_ppl, layer_ppl, base_ppl = measured
    turned = [layer[::-1] for layer in head_ppl]
    one = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method=method)
    two = allocate(turned, layer_ppl, base_ppl=base_ppl, retention=retention, method=method)
    for before, after in zip(one, two, strict=True):
        assert before == pytest.approx(after[::-1], rel=1e-9)


@given(measured=importances(), retention=st.floats(0.01, 1.0))
def test_the_artifact_gives_more_to_what_matters_more_before_it_hands_on(measured, retention):
    """Handing on adds about the same to all, so that only a head's position can turn the order round, and by a rounding."""
    head_ppl, layer_ppl, base_ppl = measured
    allocated = allocate(head_ppl, layer_ppl, base_ppl=base_ppl, retention=retention, method="artifact")
    products = [min(h * layer, 102400.0) for row, layer in zip(head_ppl, layer_ppl, strict=True) for h in row]
    kept = [value for row in allocated for value in row]
    raw = [retention * len(products) * p / sum(products) for p in products]
    assert all(now >= min(1.0, before) * (1 - 1e-12) for now, before in zip(kept, raw, strict=True))
    if max(raw) <= 1:
        assert kept == pytest.approx(raw)


curve = st.lists(st.floats(0, 10), min_size=3, max_size=3).map(lambda costs: (*costs, 0.0))
GRID = (0.05, 0.2, 0.5, 1.0)


@given(costs=st.lists(curve, min_size=1, max_size=8), mean=st.floats(0.01, 1.0))
def test_error_greedy_spends_just_the_budget_whatever_the_costs(costs, mean):
    given_out = spend(GRID, costs, mean)
    assert sum(given_out) / len(costs) == pytest.approx(mean, rel=1e-9)
    assert all(0 < value <= 1 for value in given_out)


@given(costs=st.lists(curve, min_size=2, max_size=8), mean=st.floats(0.01, 1.0), order=st.randoms())
def test_error_greedy_does_not_care_for_the_order_of_heads(costs, mean, order):
    places = list(range(len(costs)))
    order.shuffle(places)
    straight, shuffled = spend(GRID, costs, mean), spend(GRID, [costs[i] for i in places], mean)
    assert shuffled == pytest.approx([straight[i] for i in places], rel=1e-9)


@given(costs=st.lists(curve, min_size=2, max_size=8), mean=st.floats(0.01, 1.0), factor=st.floats(1.0, 100.0))
def test_error_greedy_gives_no_less_to_a_head_whose_error_grows(costs, mean, factor):
    falling = [tuple(sorted(values, reverse=True)) for values in costs]
    dearer = [tuple(value * factor for value in falling[0]), *falling[1:]]
    assert spend(GRID, dearer, mean)[0] >= spend(GRID, falling, mean)[0] * (1 - 1e-9)


@given(costs=st.lists(curve, min_size=2, max_size=5), mean=st.floats(0.06, 0.99))
def test_error_greedy_beats_uniform_on_the_hulls(costs, mean):
    falling = [tuple(sorted(values, reverse=True)) for values in costs]

    def hull_cost(values, at):
        """The lower convex hull at one point: the least of all chords over it."""
        points = list(zip(GRID, values, strict=True))
        return min(
            y0 + (y1 - y0) * (at - x0) / (x1 - x0) if x1 > x0 else y0 for x0, y0 in points for x1, y1 in points if x0 <= at <= x1
        )

    spent = sum(hull_cost(values, at) for values, at in zip(falling, spend(GRID, falling, mean), strict=True))
    assert spent <= sum(hull_cost(values, mean) for values in falling) * (1 + 1e-9) + 1e-9


def test_error_greedy_by_hand():
    # Gains per retention: head 0 falls 4 over 0.5, then nothing; head 1 falls 1 over 0.5, then 1 over 0.5.
    assert spend((0.0, 0.5, 1.0), [(4.0, 0.0, 0.0), (2.0, 1.0, 0.0)], 0.5) == pytest.approx([0.5, 0.5])
    assert spend((0.0, 0.5, 1.0), [(4.0, 0.0, 0.0), (2.0, 1.0, 0.0)], 0.25) == pytest.approx([0.5, 0.0])
    assert spend((0.0, 0.5, 1.0), [(4.0, 0.0, 0.0), (2.0, 1.0, 0.0)], 0.75) == pytest.approx([0.5, 1.0])


@given(measured=importances(), retention=st.floats(0.1, 1.0), share=st.floats(0.01, 0.99), data=st.data())
def test_a_mix_lies_between_its_two_parts_and_keeps_the_mean(measured, retention, share, data):
    head_ppl, layer_ppl, base_ppl = measured
    costs = st.lists(st.floats(0, 10), min_size=3, max_size=3).map(lambda values: tuple(sorted(values, reverse=True)))
    found = Sensitivity((0.1, 0.5, 1.0), tuple(tuple(data.draw(costs) for _ in layer) for layer in head_ppl), "error", 64)
    how = {"base_ppl": base_ppl, "retention": retention}
    mixed = Mixed(share, "error", sensitivity=found).allocate(head_ppl, layer_ppl, **how)
    parts = ErrorGreedy("error", found).allocate(head_ppl, layer_ppl, **how), Waterfill().allocate(head_ppl, layer_ppl, **how)
    kept, *ends = ([value for layer in table for value in layer] for table in (mixed, *parts))
    assert sum(kept) / len(kept) == pytest.approx(retention)
    for value, *two in zip(kept, *ends, strict=True):
        assert min(two) - 1e-12 <= value <= max(two) + 1e-12


def test_error_greedy_through_allocate():
    costs = tuple(tuple((scale, scale / 4, 0.0) for scale in row) for row in ((8.0, 1.0), (1.0, 1.0)))
    found = Sensitivity((0.1, 0.5, 1.0), costs, "error", 64)
    assert ErrorGreedy(sensitivity=found).allocate([[1.0] * 2] * 2, [1.0] * 2, base_ppl=1.0, retention=0.2) == [
        [pytest.approx(0.5), pytest.approx(0.1)],
        [pytest.approx(0.1), pytest.approx(0.1)],
    ]


@pytest.mark.parametrize(
    ("retention", "first", "others"),
    [(0.3, 1.0, 0.2), (0.2, 1.0, 0.6 / 7), (0.05, 8 * 0.05 - 7 * 0.0125, 0.0125), (1.0, 1.0, 1.0)],
)
def test_first_layers_are_as_dense_as_the_budget_allows(retention, first, others):
    allocated = allocate([[2.0] * 3] * 8, [2.0] * 8, base_ppl=1.5, retention=retention, method="first_layers_dense", layers=1)
    assert [value for layer in allocated for value in layer] == pytest.approx([first] * 3 + [others] * 21)


def test_a_file_is_allotted_as_it_stands_for_its_own_mean_alone(tmp_path):
    write_retention([[0.5, 0.1], [0.1, 0.1]], tmp_path / "r.txt")
    options = {"base_ppl": 1.0, "method": "file", "path": str(tmp_path / "r.txt")}
    assert allocate([[2.0] * 2] * 2, [2.0] * 2, retention=0.2, **options) == [[0.5, 0.1], [0.1, 0.1]]
    with pytest.raises(InputError, match=r"mean retention is 0.2, asked for 0.3; set retention=0.2"):
        allocate([[2.0] * 2] * 2, [2.0] * 2, retention=0.3, **options)
    with pytest.raises(InputError, match="the model has 3 × 2"):
        allocate([[2.0] * 2] * 3, [2.0] * 3, retention=0.2, **options)


def test_the_papers_formula_on_perplexities():
    allocated = Paper(clamp=1e3, metric="perplexity").allocate([[11.0, 13.0]], [20.0], base_ppl=10.0, retention=0.2)
    assert allocated == [pytest.approx([0.1, 0.3])]


def test_the_papers_printed_clamp_makes_it_nearly_uniform():
    head_ppl, layer_ppl = [[12.0, 40.0], [11.0, 13.0]], [1000.0, 30.0]
    printed = Paper().allocate(head_ppl, layer_ppl, base_ppl=10.0, retention=0.2)
    assert printed == [[pytest.approx(0.2)] * 2] * 2
    intended = Paper(clamp=1e3).allocate(head_ppl, layer_ppl, base_ppl=10.0, retention=0.2)
    products = [math.log(h / 10) * math.log(layer / 10) for row, layer in zip(head_ppl, layer_ppl, strict=True) for h in row]
    expected = [min(1.0, 0.2 * 4 * p / sum(products)) for p in products]
    assert [value for row in intended for value in row] == pytest.approx(expected)


def test_the_artifact_by_hand():
    # Products 8, 4, 2, 2 of 16; r·N = 2: 1.0, 0.5, 0.25, 0.25, nothing above 1.
    assert allocate([[4.0, 2.0], [1.0, 1.0]], [2.0, 2.0], base_ppl=1.0, retention=0.5, method="artifact") == [
        [1.0, 0.5],
        [0.25, 0.25],
    ]


def test_the_artifact_hands_on_what_capped_heads_lose():
    # r·N = 2.4, products 12, 2, 1, 1 of 16: 1.8, 0.3, 0.15, 0.15. The 0.8 above 1 goes in equal parts to the other three.
    (first, second), (third, fourth) = allocate(
        [[6.0, 1.0], [0.5, 0.5]], [2.0, 2.0], base_ppl=1.0, retention=0.6, method="artifact"
    )
    shares = [0.8 / 3, (0.8 - 0.8 / 3) / 2, 0.8 - 0.8 / 3 - (0.8 - 0.8 / 3) / 2]
    assert first == 1.0
    assert [second, third, fourth] == pytest.approx([0.3 + shares[0], 0.15 + shares[1], 0.15 + shares[2]])


def test_the_artifacts_quirk_lets_the_mean_end_too_high():
    """Raw 1.5, 0.95, 0.05: the second head's share of the 0.5 would push it over 1. It takes 0.05, and 0.5 stays to hand on."""
    allocated = allocate([[15.0, 9.5, 0.5]], [1.0], base_ppl=1.0, retention=2.5 / 3, method="artifact")
    assert allocated[0] == pytest.approx([1.0, 1.0, 0.55])
    assert sum(allocated[0]) == pytest.approx(2.55)


def test_the_artifact_clamps_the_product():
    allocated = allocate([[1e6, 102400.0]], [1.0], base_ppl=1.0, retention=0.5, method="artifact")
    assert allocated == [[0.5, 0.5]]


def test_waterfill_caps_and_raises_the_others_alike():
    assert fill([100.0, 2.0, 1.0, 1.0], mean=0.5, floor=0.0) == pytest.approx([1.0, 0.5, 0.25, 0.25])


@pytest.mark.parametrize("method", METHODS)
def test_retention_one_keeps_every_key_of_every_head(method):
    measured = ([[1.3, 7.7], [3.1, 1.1]], [9.0, 2.3])
    allocated = allocate(*measured, base_ppl=1.05, retention=1.0, method=method)
    if method in EXACT_MEAN:
        assert allocated == [[1.0, 1.0], [1.0, 1.0]]
    else:  # neither the paper's formula nor the artifact's code promises it
        assert max(value for layer in allocated for value in layer) == 1.0


def test_waterfill_keeps_the_floor():
    values = fill([100.0, 1.0, 0.0, 0.0], mean=0.3, floor=0.1)
    assert values[2:] == [0.1, 0.1]
    assert sum(values) == pytest.approx(1.2)


def test_waterfill_gives_heads_of_no_importance_the_rest():
    assert fill([5.0, 0.0, 0.0], mean=0.6, floor=0.1) == pytest.approx([1.0, 0.4, 0.4])


def test_waterfill_of_all_equal_heads_is_uniform():
    allocated = Waterfill().allocate([[12.0] * 3] * 2, [20.0] * 2, base_ppl=10.0, retention=0.2)
    assert [value for layer in allocated for value in layer] == pytest.approx([0.2] * 6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"method": "best"},
            "artifact, error_greedy, file, first_layers_dense, mixed, paper, uniform, waterfill",
        ),
        ({"retention": 0.0}, r"in \(0, 1\]"),
        ({"retention": 1.5}, r"in \(0, 1\]"),
        ({"head_ppl": [[1.0, 2.0], [1.0]]}, "importance"),
        ({"layer_ppl": [1.0]}, "importance"),
        ({"head_ppl": [[1.0, math.inf], [1.0, 1.0]]}, "finite"),
        ({"base_ppl": 0.0}, "positive"),
        ({"method": "first_layers_dense", "layers": -1}, "layers ≥ 0"),
        ({"method": "first_layers_dense", "floor": 0.0}, "floor"),
        ({"method": "paper", "metric": "accuracy"}, "loss or perplexity"),
        ({"method": "paper", "clamp": 0.0}, "positive clamp"),
        ({"method": "error_greedy"}, "measured sensitivity"),
        ({"method": "mixed"}, "measured sensitivity"),
        ({"method": "mixed", "share": 1.0}, "above 0 and below 1"),
        ({"method": "error_greedy", "measure": "vibes"}, "expected one of error, divergence, loss"),
        ({"method": "error_greedy", "sensitivity": Sensitivity((1.0,), (((0.0,),),), "loss", 1)}, "4 heads, got 1"),
        ({"method": "file"}, "allocator.path=FILE"),
    ],
)
def test_refuses_what_does_not_fit(change, message):
    options = {"head_ppl": [[2.0, 3.0], [2.0, 3.0]], "layer_ppl": [4.0, 5.0], "base_ppl": 1.5, "retention": 0.5}
    options |= {"method": "uniform"} | change
    with pytest.raises(InputError, match=message):
        allocate(options.pop("head_ppl"), options.pop("layer_ppl"), **options)
