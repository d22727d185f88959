"""W8A8 as the artifact simulates it."""

import pytest
import torch

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.offline import measure_ablations
from shadowattn.offline.fake_quant import (
    ActivationRange,
    ProjectionRanges,
    fake_quantised,
    load_activation_scales,
    observe_activations,
    save_activation_scales,
)
from tests.tiny import tiny_model


def windows(count: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


def test_the_largest_value_sets_the_scale_unless_it_is_an_outlier():
    assert ActivationRange(12.7, 1.0).scale(64.0) == (pytest.approx(0.1), True)
    assert ActivationRange(127.0, 1.27).scale(64.0) == (pytest.approx(0.01), False)  # 1.27 · 64 < 127
    assert ActivationRange(0.0, 0.0).scale(64.0) == (1e-5, False)


def test_one_projection_by_hand():
    model, ids = tiny_model(), windows()
    layer = model.model.layers[0].mlp.up_proj
    x = torch.randn(7, 64) * 3
    ranges = observe_activations(model, ids)
    name = "model.layers.0.mlp.up_proj"
    ranges[name] = ProjectionRanges(ActivationRange(2.0, 1.0), ActivationRange(500.0, 5.0))
    with fake_quantised(model, ranges), torch.no_grad():
        found = layer(x)
    step = round(2.0 / 127, 5)
    quantised = (x / step).round().clamp(-128, 127) * step
    w = layer.weight.detach()
    weight_step = w.abs().max() / 127
    out = quantised @ ((w / weight_step).round() * weight_step).T
    out_step = 5.0 / 127  # an outlier: it passes unclamped
    torch.testing.assert_close(found, (out / out_step).round() * out_step, atol=1.01 * out_step, rtol=0)
    assert found.abs().max() > 128 * out_step


def test_the_model_changes_a_little_and_comes_back(tmp_path):
    model, ids = tiny_model(), windows()
    ranges = observe_activations(model, ids)
    save_activation_scales(ranges, tmp_path / "scales.json")
    ranges = load_activation_scales(tmp_path / "scales.json")
    assert len(ranges) == 2 * 7
    with torch.no_grad():
        before = model(ids).logits
        with fake_quantised(model, ranges):
            during = model(ids).logits
        torch.testing.assert_close(model(ids).logits, before, rtol=0, atol=0)
    assert 0 < (during - before).norm() / before.norm() < 0.3


def test_importance_of_a_quantised_model_is_measured_alike_both_ways(tmp_path):
    model, ids = tiny_model(), windows()
    with fake_quantised(model, observe_activations(model, ids)):
        plain = measure_ablations(model, ids, Units(tmp_path / "plain"), method="plain")
        exact = measure_ablations(model, ids, Units(tmp_path / "exact"))
    # Rounding to 8 bits turns a last digit into a whole step now and then.
    torch.testing.assert_close(torch.tensor(exact.heads), torch.tensor(plain.heads), rtol=2e-2, atol=0)
    assert measure_ablations(model, ids, Units(tmp_path / "float")).base != exact.base


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        "[]",
        '{"top_0_1": {"a": {"input": 1}}, "ori": {"a": {"input": 1}}}',
        '{"top_0_1": {"a": 3}, "ori": {}}',
        '{"top_0_1": {"a": {"input": 2, "output": 1}}, "ori": {"a": {"input": 1, "output": 1}}}',
    ],
)
def test_broken_scales_are_refused(content, tmp_path):
    (tmp_path / "scales.json").write_text(content)
    with pytest.raises(InputError, match="observe_activations"):
        load_activation_scales(tmp_path / "scales.json")


def test_a_projection_without_a_range_is_refused():
    with pytest.raises(InputError, match="and 13 more"), fake_quantised(tiny_model(), {}):
        pass
