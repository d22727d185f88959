"""Calibrations, grids, and what grids do to values."""

from dataclasses import astuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.offline import layer_grids, observe_scales, report_scales, scale_grid
from shadowattn.offline.calibrations.absmax import Absmax
from shadowattn.offline.calibrations.mse import MeanSquaredError
from shadowattn.offline.calibrations.percentile import Percentile
from shadowattn.offline.concentration import measure_concentration
from shadowattn.offline.grids.mean import Mean
from shadowattn.offline.grids.quantile import Quantile
from shadowattn.offline.scales import ScaleObservations
from shadowattn.types import ScaleGrid
from tests.tiny import tiny_model

CALIBRATIONS = [Absmax(), Percentile(0.99), MeanSquaredError()]


def windows(count: int, length: int) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


@given(seed=st.integers(0, 1000), outlier=st.floats(1, 100))
def test_no_calibration_exceeds_absmax(seed, outlier):
    x = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(seed))
    x[1, 3, 2] = outlier
    full = Absmax().scales(x)
    assert torch.equal(full, x.abs().amax((1, 2)) / 127)
    for calibration in CALIBRATIONS[1:]:
        scales = calibration.scales(x)
        assert scales.shape == (3,)
        assert bool(((scales > 0) & (scales <= full)).all())


def test_a_percentile_ignores_outliers_and_all_of_them_is_absmax():
    x = torch.arange(1, 101, dtype=torch.float32).view(1, 10, 10)
    assert Percentile(0.9).scales(x) == pytest.approx(90 / 127)
    assert Percentile(1.0).scales(x) == Absmax().scales(x)


def test_the_least_squares_scale_is_the_best_of_those_tried():
    x = torch.randn(1, 64, 32, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0] = 60.0

    def error(scale):
        return float(((x / scale).round().clamp(-127, 127) * scale - x).square().sum())

    found = float(MeanSquaredError(steps=20, least=0.2).scales(x))
    full = float(Absmax().scales(x))
    assert error(found) == pytest.approx(min(error(full * share) for share in torch.linspace(1, 0.2, 20).tolist()))


def test_all_zeros_have_a_scale():
    for calibration in CALIBRATIONS:
        assert float(calibration.scales(torch.zeros(1, 4, 8))) > 0


@pytest.mark.parametrize("calibration", CALIBRATIONS)
def test_k_scales_never_fall_within_a_prompt(calibration):
    observed = observe_scales(tiny_model(), windows(2, 96), chunk_tokens=32, calibration=calibration)
    k = np.array([pair[3] for pair in observed.pairs]).reshape(2, 3, 2, 4)  # window, chunk, layer, head
    assert (np.diff(k, axis=1) >= 0).all()


@given(observed=st.lists(st.floats(1e-4, 10), min_size=1, max_size=30), sigma=st.floats(0.05, 0.95), steps=st.integers(0, 3))
def test_the_mean_grid_steps_by_sigma(observed, sigma, steps):
    scales = Mean(sigma, steps).scales(observed)
    assert len(scales) == 2 * steps + 1
    assert scales[steps] == pytest.approx(sum(observed) / len(observed))
    assert all(low / high == pytest.approx(sigma) for low, high in zip(scales, scales[1:], strict=False))


@given(observed=st.lists(st.floats(1e-4, 10), min_size=1, max_size=30))
def test_a_quantile_grid_up_to_one_clips_no_observed_scale(observed):
    scales = Quantile((0.25, 0.75, 1.0)).scales(observed)
    assert list(scales) == sorted(scales)
    assert scales[-1] == max(observed)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Mean(sigma=1.0), "sigma"),
        (lambda: Mean(steps=-1), "steps"),
        (lambda: Quantile(()), "ascending"),
        (lambda: Quantile((0.5, 0.2)), "ascending"),
        (lambda: Percentile(0.0), "share"),
        (lambda: MeanSquaredError(steps=0), "steps"),
    ],
)
def test_what_makes_no_sense_is_refused(build, message):
    with pytest.raises(InputError, match=message):
        build()


def test_each_layer_has_a_grid_of_its_own():
    observed = observe_scales(tiny_model(), windows(1, 64), chunk_tokens=32)
    grids = layer_grids(observed)
    assert len(grids) == 2
    assert grids[1] == scale_grid(observed.of_layer(1))
    assert grids[0] != grids[1]


def test_the_report_counts_what_a_grid_does():
    model, ids = tiny_model(), windows(1, 96)
    observed = observe_scales(model, ids, chunk_tokens=32)
    grids = {
        "wide": ScaleGrid((1e6,), (1e6,)),  # everything becomes 0
        "tiny": ScaleGrid((1e-9,), (1e-9,)),  # everything is cut
        "own": scale_grid(observed),
        "layers": layer_grids(observed),
    }
    found = report_scales(model, ids, grids, chunk_tokens=32)
    assert found["wide"].q_zero == found["wide"].k_zero == 1.0
    assert found["wide"].q_clipped_heads == found["wide"].q_saturated == 0.0
    assert found["tiny"].q_clipped_heads == found["tiny"].k_clipped_heads == 1.0
    assert found["tiny"].q_saturated == pytest.approx(1.0, abs=1e-3)
    for fit in found.values():
        assert sum(fit.assigned) == 2 * 4 * 3  # layers × heads × chunks
    own, fit = found["own"], observed.fit(grids["own"])
    assert (own.q_clipped_heads, own.k_clipped_heads) == pytest.approx((fit["q_clipped"], fit["k_clipped"]))
    assert max(own.assigned) / 24 == pytest.approx(fit["largest_bucket"])
    assert found["layers"] != own


def test_concentration_is_that_of_dense_attention_and_chunks_do_not_matter():
    model, ids = tiny_model(), windows(2, 64)
    found = measure_concentration(model, ids, chunk_tokens=64)
    for whole, parts in zip(astuple(found), astuple(measure_concentration(model, ids, chunk_tokens=16)), strict=True):
        assert np.array(parts) == pytest.approx(np.array(whole), rel=1e-4)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = torch.stack(model(ids, output_attentions=True).attentions)  # [L, W, H, Q, K]
    assert np.array(found.top_weight) == pytest.approx(weights.amax(-1).mean((1, 3)).numpy(), rel=1e-4)
    entropy = torch.special.entr(weights).sum(-1)
    assert np.array(found.effective_keys) == pytest.approx(entropy.exp().mean((1, 3)).numpy(), rel=1e-3)


def test_a_grid_that_says_nothing_of_its_pattern_pairs_every_scale_with_every_other():
    assert scale_grid(ScaleObservations(((0, 0, 1.0, 2.0),)), Quantile((0.5, 1.0))).pattern == Quantile.pattern == "product"
