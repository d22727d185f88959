"""A model that is not in the CPU's memory: calibration and all measures of quality find there what they find on the CPU."""

from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch

import shadowattn
from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.divergence import DenseLogits, window_divergences
from shadowattn.evaluation.fidelity import Fidelity, OutputError
from shadowattn.evaluation.outliers import Candidate, measure_head_errors, observe_channels, rescalings
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.evaluation.recall import measure_recall
from shadowattn.evaluation.tasks import ExactMatch, scores
from shadowattn.models import fingerprint
from shadowattn.offline import Race, measure_ablations, measure_sensitivity, observe_first_look, race_ablations
from shadowattn.offline.attention_ranges import observe_attention_ranges, observe_prepared_ranges
from shadowattn.offline.calibrations.mse import MeanSquaredError
from shadowattn.offline.concentration import measure_concentration
from shadowattn.offline.fake_quant import fake_quantised, observe_activations
from shadowattn.offline.key_offsets import observe_key_offset
from shadowattn.offline.requantisation import observe_products
from shadowattn.offline.scale_report import report_scales
from shadowattn.offline.scales import observe_scales, scale_grid
from shadowattn.offline.top_p import observe_top_p
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.quantised import Quantised
from shadowattn.online.estimators.top_p import TopP
from shadowattn.online.full_int8 import FullInt8
from shadowattn.types import ScaleGrid
from tests.elsewhere import elsewhere, moved
from tests.profiles import bank_for, profile_for
from tests.tiny import tiny_model

GRID = ScaleGrid((0.01, 0.05, 0.3), (0.01, 0.05, 0.3))
WINDOWS = torch.randint(0, 128, (2, 40), generator=torch.Generator().manual_seed(2))
# Elements that may come back at once: losses, or the scales of a layer's heads. The keys of a window are 5120 a layer.
MOST_DOWN = 100


def losses_and_divergences(model, folder):
    dense = DenseLogits(model, WINDOWS, chunk_tokens=16)
    logits = [dense[index] for index in range(len(WINDOWS))]
    fidelity = Fidelity()
    options = {"estimator": "int8_fused", "kernel": "torch", "query_block": 8, "observers": [fidelity]}
    with shadowattn.attach(model, 0.2, chunk_tokens=16, **options) as run:
        losses, divergences = window_divergences(model, WINDOWS, logits, chunk_tokens=16)
    return [*losses.mean(1).tolist(), *divergences, *fidelity.metrics().values(), run.counters.density]


def answers(model, folder):
    question = ExactMatch(WINDOWS[0], WINDOWS[1, :2])
    return [*scores(model, [question], chunk_tokens=16), *window_losses(model, WINDOWS, chunk_tokens=16).tolist()]


def npu_full(model, folder):
    found = []
    for how in ("none", "mean"):
        offset = observe_key_offset(model, WINDOWS, chunk_tokens=16, how=how)
        ranges, error = observe_attention_ranges(model, WINDOWS, chunk_tokens=16, key_offset=offset), OutputError()
        for form in (FullInt8(key_offset=how), FullInt8(granularity="head", probabilities="log2", key_offset=how)):
            with form(model, ranges, chunk_tokens=16, observers=[error]):
                found += window_losses(model, WINDOWS, chunk_tokens=16).tolist()
        found += [*error.metrics().values(), *flat(asdict(ranges))]
    return found


def recall(model, folder):
    estimates = {"grid": Quantised(GRID), "4 bits": Quantised(bits=4, smooth=True), "tensor": Int8Tensor(), "fused": Int8Fused()}
    found = measure_recall(model, WINDOWS, estimates, [0.1, 0.3], chunk_tokens=32)
    return flat([[one.heads, one.figures] for one in found.values()])


def scales(model, folder):
    offset = observe_key_offset(model, WINDOWS, chunk_tokens=16, how="midrange")
    observations = observe_scales(model, WINDOWS, chunk_tokens=16, key_offset=offset)
    others = observe_scales(model, WINDOWS, chunk_tokens=16, calibration=MeanSquaredError(steps=3))
    report = report_scales(model, WINDOWS, {"grid": scale_grid(observations)}, chunk_tokens=16)
    outputs = observe_products(model, WINDOWS, GRID, chunk_tokens=16)
    found = [asdict(report["grid"]), asdict(observations), asdict(others), asdict(outputs)]
    return flat([*found, asdict(measure_concentration(model, WINDOWS, chunk_tokens=16))])


def ablations(model, folder):
    found = []
    for method, ablation in (("shared", "zero"), ("shared", "uniform"), ("plain", "uniform")):
        units = Units(folder / method / ablation)
        found.append(asdict(measure_ablations(model, WINDOWS, units, ablation=ablation, method=method, batch=2)))
    with fake_quantised(model, observe_activations(model, WINDOWS, batch=2)):
        found.append(asdict(measure_ablations(model, WINDOWS, Units(folder / "quantised"), batch=2)))
    race = race_ablations(model, WINDOWS, Units(folder / "race"), lambda importance: [[0.2] * 4] * 2, race=Race(first=2), batch=2)
    return flat([*found, asdict(race)])


def sensitivity(model, folder):
    """Without `divergence`: a pretended tensor has no backward pass, for which autograd asks the device itself."""
    options = {"retentions": [0.1, 0.5], "batch": 2}
    found = [measure_sensitivity(model, WINDOWS, Units(folder / m), measure=m, **options) for m in ("error", "loss")]
    return flat([asdict(one) for one in found])


def outliers(model, folder):
    mean_key = observe_key_offset(model, WINDOWS, how="mean", chunk_tokens=16)
    both = rescalings(observe_channels(model, WINDOWS, chunk_tokens=16), mean_key)["both"]
    (ranges,) = observe_prepared_ranges(model, WINDOWS, {"both": both}, chunk_tokens=16).values()
    errors = measure_head_errors(model, WINDOWS, {"both": Candidate(FullInt8(), both, ranges)}, chunk_tokens=16)
    return [*errors.relative("both").flatten().tolist(), *errors.sink.flatten().tolist()]


def flat(value) -> list[float]:
    """All numbers of something nested."""
    if isinstance(value, dict):
        return flat(list(value.values()))
    if isinstance(value, list | tuple):
        return [number for one in value for number in flat(one)]
    return [float(value)] if isinstance(value, int | float) else []


def budgets_of_rows(model, folder):
    profile = profile_for(model, 0.3)
    return [observe_top_p(model, WINDOWS, profile=profile, estimator=TopP(Int8Fused(), 1.0), chunk_tokens=16).share]


def first_looks(model, folder):
    return flat(asdict(observe_first_look(model, WINDOWS, chunk_tokens=16, candidates=1.0, block_rows=8, retention=0.2)))


MEASUREMENTS = (budgets_of_rows, losses_and_divergences, answers, npu_full, recall, scales, ablations, sensitivity, outliers)
MEASUREMENTS += (first_looks,)


@pytest.mark.parametrize("measure", MEASUREMENTS, ids=lambda one: one.__name__)
def test_what_is_measured_where_the_model_is_equals_the_cpus(measure: Callable, tmp_path):
    model = tiny_model()
    expected = measure(model, tmp_path / "cpu")
    with elsewhere() as copies:
        moved(model)
        copies.clear()
        fingerprint(model)
        samples = set(copies.down)  # of the weights, which several measurements ask for
        copies.clear()
        found = measure(model, tmp_path / "elsewhere")
        assert max(size for size in copies.down if size not in samples) < MOST_DOWN
    assert len(expected) > 2 or measure is budgets_of_rows
    # Sums in another order may round to another integer, which the error of a single head shows.
    assert found == pytest.approx(expected, rel=1e-2 if measure is outliers else 1e-3, abs=1e-5)


def test_recall_refuses_graphs_before_the_forward_pass():
    model = tiny_model()
    bank = bank_for(model)
    with elsewhere():
        moved(model)
        with pytest.raises(InputError, match="Int8Graph runs OpenVINO's graphs"):
            measure_recall(model, WINDOWS, {"exact": Oracle(), "graphs": Int8Graph(bank)}, [0.1], chunk_tokens=32)
