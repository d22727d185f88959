"""Descriptions of devices: every number with its source, costs by hand, a fit that finds what it was made from."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from shadowattn.errors import InputError
from shadowattn.online.latency import Latency, LatencyProfile
from shadowattn.online.plan import Group
from shadowattn.online.simulation import description
from shadowattn.online.simulation.description import load_device, shipped
from shadowattn.online.simulation.device import LAYERS, ChunkShape, Device, Layer, Number
from shadowattn.online.simulation.fit import fit_device
from shadowattn.online.simulation.methods import METHODS, known_methods, pooled, prompt_cost
from shadowattn.reporting.paper import FIG_10


def number(value):
    return Number(value, "assumed", "test")


SIMPLE = Device(
    "simple", "NPU", number(1), number(10), number(1000), number(1), number(1000), number(2), number(1000), number(2000),
    number(1000),
)  # fmt: skip
LAYER, CHUNK = Layer(2, 1, 1), ChunkShape(2, 4)  # 7 pairs: 3 and 4 keys


def test_costs_by_hand():
    assert CHUNK.pairs == 7
    assert SIMPLE.estimate_us(LAYER, CHUNK, 2) == 10 + 2 * 2 * 4
    assert SIMPLE.estimate_us(LAYER, CHUNK, 2, query_block=2) == 10 + 2 * 1 * 4
    assert SIMPLE.head_select_us(CHUNK, 0.5) == 8
    assert SIMPLE.head_attend_us(LAYER, CHUNK, 0.5) == 2 + 3.5
    assert SIMPLE.head_dense_us(LAYER, CHUNK) == 14
    work = SIMPLE.work(LAYER, CHUNK, [Group((0, 1))], [0.5, 1.0])
    assert work.launches[0].estimate_us == 26
    assert work.attend_us == (5.5, 9.0)


def test_small_costs_by_hand():
    device = replace(SIMPLE, copy_ns=number(1000), list_ns=number(4000), read_ns=number(500))
    assert device.estimate_us(LAYER, CHUNK, 2, capacity=6) == 10 + 2 * 2 * 6 + 2 * 2 * 4
    assert device.head_select_us(CHUNK, 0.5) == 1 + 7 + 14
    assert device.head_select_us(CHUNK, 0.5, query_block=2) == 1 + 3.5 + 7
    assert device.head_select_us(CHUNK, 1.0) == 1 + 28  # nothing is ranked
    assert SIMPLE.head_select_us(CHUNK, 1.0) == 1
    assert device.head_attend_us(LAYER, CHUNK, 0.5) == 2 + 3.5 + 2 * 4 / 2
    halved = replace(device, core_speeds={"slow": number(0.5)}).on_core("slow")
    assert (halved.copy_ns.value, halved.list_ns.value, halved.read_ns.value) == (2000, 8000, 1000)
    assert replace(SIMPLE, core_speeds={"slow": number(0.5)}).on_core("slow").list_ns is None


def test_waiting_and_the_pipeline_itself_take_time_where_that_is_known():
    ours, chunk = METHODS["ours"], ChunkShape(2, 4)
    for slower in (replace(SIMPLE, wakeup_latency_us=number(100)), replace(SIMPLE, task_overhead_us=number(100))):
        assert ours(slower, LAYER, chunk, 0.5).total_us > ours(SIMPLE, LAYER, chunk, 0.5).total_us


def test_memory_is_a_floor():
    slow = replace(SIMPLE, bandwidth_gb_s=number(1e-3))  # 4 µs a value
    assert slow.head_select_us(CHUNK, 0.5) == 1 + 7 * 4
    assert slow.head_attend_us(LAYER, CHUNK, 0.5) == 2 + 2 * 4 * 4
    fast = replace(SIMPLE, bandwidth_gb_s=number(1e3))
    assert fast.head_select_us(CHUNK, 0.5) == SIMPLE.head_select_us(CHUNK, 0.5)


def test_a_prompt_is_the_sum_of_its_chunks():
    full = METHODS["C/G-Full"]
    by_hand = full(SIMPLE, LAYER, ChunkShape(2, 2), 1.0) + full(SIMPLE, LAYER, ChunkShape(1, 3), 1.0)
    assert prompt_cost(SIMPLE, LAYER, full, tokens=3, chunk_tokens=2) == by_hand


def test_a_sample_of_many_chunks_is_close_to_all(monkeypatch):
    device = load_device("snapdragon_8_gen_3")
    sampled = {name: prompt_cost(device, LAYERS["Qwen2-0.5B"], m, tokens=128 * 60).total_us for name, m in METHODS.items()}
    monkeypatch.setattr("shadowattn.online.simulation.methods._SAMPLES", 1000)
    for name, method in METHODS.items():
        whole = prompt_cost(device, LAYERS["Qwen2-0.5B"], method, tokens=128 * 60).total_us
        assert sampled[name] == pytest.approx(whole, rel=0.01)


def test_sharing_lists_saves_the_estimate():
    device, layer = load_device("snapdragon_8_gen_3"), LAYERS["Qwen2-1.5B"]
    each, shared = (prompt_cost(device, layer, method, tokens=4096) for method in (METHODS["ours"], pooled))
    assert shared.total_us < 0.7 * each.total_us
    long = prompt_cost(device, layer, pooled, tokens=1 << 20)
    assert long.estimate_us < 0.1 * long.total_us  # the core is what is left


def test_launches_are_as_wide_as_is_fastest():
    """Many heads share what a launch costs; on many keys, few let the core begin sooner."""
    device, layer = load_device("snapdragon_8_gen_3"), LAYERS["Qwen2-1.5B"]
    fixed = device.launch_us.value
    for keys, launches in ((128, 3), (1 << 20, 12)):
        cost = METHODS["ours"](device, layer, ChunkShape(128, keys), 0.2)
        products = layer.heads * 128 * keys * layer.head_dim * device.estimate_ns.value * 1e-3
        assert cost.estimate_us == pytest.approx(launches * fixed + products)


@pytest.mark.parametrize("name", shipped())
def test_every_number_of_every_description_has_a_source(name):
    device = load_device(name)
    numbers = [value for value in vars(device).values() if isinstance(value, Number)] + list(device.core_speeds.values())
    written = (Path(description.__file__).parent / "devices" / f"{name}.yaml").read_text()
    assert len(numbers) == written.count("value:") >= 8  # those that a device has to have, and `dense_ns`
    assert all(number.source for number in numbers)


def test_what_was_fitted_to_the_paper_still_fits():
    device = load_device("snapdragon_8_gen_3")
    launches = [device.estimate_us(Layer(heads, heads, 64), ChunkShape(128, 2048), heads) / 1e3 for heads in (1, 2, 4)]
    assert launches == pytest.approx([2, 3, 4], rel=0.08)
    speedups = [
        prompt_cost(device, layer, METHODS["C/G-Full"], tokens=tokens).total_us
        / prompt_cost(device, layer, METHODS["ours"], tokens=tokens).total_us
        for layer in LAYERS.values()
        for tokens in (1024, 2048, 4096)
    ]
    assert sum(speedups) / len(speedups) == pytest.approx(FIG_10["mean_speedup"], rel=0.01)


def test_a_fit_finds_what_a_profile_was_made_from():
    layer, rows = Layer(4, 2, 64), 32
    points = []
    for keys, capacity in ((64, 128), (128, 128), (256, 512), (512, 512)):
        chunk = ChunkShape(rows, keys)
        for heads in (1, 2):
            took = 20 + heads * rows * (capacity * 64 * 1e-4 + keys * 7e-4)
            points.append(_point("estimate", heads, 1.0, keys, took, capacity))
        for retention in (0.1, 0.5):
            points.append(_point("select", 1, retention, keys, 5 + chunk.pairs * (1e-3 + retention * 2e-3)))
            points.append(_point("attend", 1, retention, keys, 3 + retention * chunk.pairs * 64 * 2e-4 + keys * 128 * 5e-4))
        points.append(_point("select", 1, 1.0, keys, 1e6))  # nothing is ranked, whatever that takes
    fitted = fit_device(LatencyProfile({"rows": rows}, tuple(points)), layer, name="made", cores=2)
    made = fitted.device
    values = [x.value for x in (made.launch_us, made.estimate_ns, made.select_us, made.select_ns, made.attend_us, made.attend_ns)]
    assert values == pytest.approx([20, 0.1, 5, 1, 3, 0.2])
    assert [x.value for x in (made.copy_ns, made.list_ns, made.read_ns)] == pytest.approx([0.7, 2, 0.5])
    assert max(fitted.errors.values()) < 1e-9
    assert set(known_methods(made)) == {"NPU-Full", "ours"}
    with pytest.raises(InputError, match="made: expected a description with dense_ns, got one where it is unknown"):
        prompt_cost(made, layer, METHODS["C/G-Full"], tokens=64)
    with pytest.raises(InputError, match="score_ns"):
        prompt_cost(made, layer, METHODS["C/G-Sparse"], tokens=64)


def test_too_little_to_fit_is_refused():
    with pytest.raises(InputError, match="expected estimate at several lengths"):
        fit_device(LatencyProfile({"rows": 8}, ()), LAYER, name="none", cores=1)


def test_lists_with_a_least_budget_have_no_fit():
    with pytest.raises(InputError, match=r"min_budget=16; measure it with selection.min_budget=1"):
        fit_device(LatencyProfile({"rows": 8, "min_budget": 16}, ()), LAYER, name="none", cores=1)


def _point(stage, heads, retention, keys, us, capacity=0):
    return Latency(stage, heads, -1, capacity, retention, keys, us, us, us, 1)


def test_unknown_devices_and_cores_are_refused():
    with pytest.raises(InputError, match="expected one of intel_core_ultra_7_155h, intel_npu_3720"):
        load_device("iphone")
    with pytest.raises(InputError, match="expected a core of small, middle, prime"):
        load_device("snapdragon_8_gen_3").on_core("huge")
    with pytest.raises(InputError, match="at least one token"):
        prompt_cost(SIMPLE, LAYER, METHODS["ours"], tokens=0)
    assert math.isclose(load_device("snapdragon_8_gen_3").on_core("prime").dense_ns.value, 0.2959 / 2.2)
