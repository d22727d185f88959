"""Parameter sets of the phone: those kept reproduce the published, rounded values; another engine's ratios are held out."""

import random
from dataclasses import replace

import pytest

from shadowattn.online.simulation import ttft
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import LAYERS
from shadowattn.online.simulation.methods import METHODS, prompt_cost
from shadowattn.online.simulation.parameters import (
    CHOICES,
    RANGES,
    draw_parameters,
    fit_core,
    fits_launches,
    prompt_costs,
    speedups,
)


def test_launches_fit_where_they_round_to_the_published_milliseconds():
    assert fits_launches(1500, 643)  # 2.14, 2.79, 4.07
    assert fits_launches(510, 995)
    assert fits_launches(2150, 345)
    assert not fits_launches(400, 1000)  # 1.4
    assert not fits_launches(2200, 310)  # 2.51, but 2.82 and 3.44


def test_drawn_sets_reproduce_launches_and_fig_4a():
    draw = random.Random(3)
    for _ in range(50):
        drawn = draw_parameters(draw)
        assert [round((drawn.launch_us + heads * drawn.head_us) / 1e3) for heads in (1, 2, 4)] == [2, 3, 4]
        left = drawn.estimation + 0.2 * drawn.overhead
        assert round(1 - left, 3) == 0.343
        assert round(drawn.estimation / left, 3) == 0.667
        assert drawn.estimation >= drawn.score_share
        assert all(low <= getattr(drawn, name) <= high for name, (low, high) in RANGES.items())
        assert all(getattr(drawn, name) in choices for name, choices in CHOICES.items())


def test_the_core_reproduces_the_mean_speed_up_or_the_set_does_not_fit():
    draw = random.Random(1)
    fitted = [fit_core(draw_parameters(draw)) for _ in range(4)]
    kept = [fitting for fitting in fitted if fitting is not None]
    assert 0 < len(kept) < 4
    for fitting in kept:
        found = speedups(fitting.device, fitting.parameters.chunk_tokens)
        assert len(found) == 12
        assert found.mean() == pytest.approx(fitting.parameters.mean_speedup, abs=0.01)


@pytest.mark.parametrize("name", ["ours", "C/G-Full"])
def test_prompts_are_what_all_their_chunks_are(name, monkeypatch):
    monkeypatch.setattr("shadowattn.online.simulation.methods._SAMPLES", 1000)
    device = load_device("snapdragon_8_gen_3")
    for layer in (LAYERS["PhoneLM-0.5B"], LAYERS["Qwen2-1.5B"]):
        for tokens, cost in zip((1024, 4096), prompt_costs(device, layer, METHODS[name], (1024, 4096), 128), strict=True):
            whole = prompt_cost(device, layer, METHODS[name], tokens=tokens)
            assert cost.total_us == pytest.approx(whole.total_us, rel=0.01)
            assert cost.core_us == pytest.approx(whole.core_us, rel=0.01)


def test_the_time_to_the_first_token_by_hand():
    """Without an NPU to wait for, and with dense attention alone, only the cores count."""
    device, model = load_device("snapdragon_8_gen_3"), ttft.MODELS["Qwen1.5-0.5B"]
    how = {"core_efficiency": 1.0, "linear_tokens_per_s": 1000.0}
    dense, sparse = ttft.ttft_us(device, model, 128, 0.2, **how)
    rest = 128 * 0.308 * 1e3
    pairs = 128 * 129 / 2
    assert dense == pytest.approx(rest + 24 * 16 * pairs * 64 * 0.2959e-3 / (2.2 + 3))
    launch = 1500 + 16 * 128 * 128 * 64 * 0.03832e-3
    assert sparse > rest + 23 * launch
    all_dense = replace(model, dense_layers=model.layers)
    assert ttft.ttft_us(device, all_dense, 128, 0.2, **how) == (pytest.approx(dense), pytest.approx(dense))
