"""Times to the first token from rows that are made here: which parts a total has, and what grows with the cost of a launch."""

from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.publish import ROOT, read_reference
from experiments.studies.npu_ttft import AHEAD, CPU_DENSE, NPU_FULL, ONE_TASK, OURS, NpuTtft, NpuTtftRow
from shadowattn.artifacts import read_json
from shadowattn.errors import InputError
from shadowattn.graphs.npu.compiler import PLATFORMS
from shadowattn.online.simulation.description import load_device
from shadowattn.online.simulation.device import ChunkShape, Layer
from shadowattn.online.simulation.npu import npu_device, processor_line, with_launch
from shadowattn.reporting.figures.npu_ttft import draw
from tests.online.simulation.test_npu import compiled, measured

COMMON = {
    "experiment": "npu_ttft", "config_hash": "", "metric": "time_to_first_token", "value": 0.0, "unit": "s", "method": "",
    "model": "smollm2", "retention": 0.2, "n": 1, "seed": 0, "path_kind": "timing", "estimate_device": "NPU 4000",
    "measured": "simulated", "kernel": "none", "estimator": "none", "allocator": "none", "query_block": 1, "block_score": "none",
    "context_tokens": 0, "data": "none", "corpus_sha256": "", "flag": "compiler estimate", "platform": "4000", "blocks": "w8a8",
}  # fmt: skip


def graphs(*, fails: str = "") -> pd.DataFrame:
    """Blocks of 100 and 300 µs; dense attention of 1 µs for 10⁶ multiply-accumulates."""
    rows = [("block before", "w8a8", 1e6, 100.0), ("block behind", "w8a8", 1e6, 300.0)]
    rows += [("attention", "float16", 1e6 * size, 1.0 * size) for size in (10, 100, 1000)]
    made = pd.DataFrame(rows, columns=["part", "method", "macs", "value"])
    made.loc[made.part == fails, "value"] = float("nan")
    return made


def rows_of(study: NpuTtft, **options) -> pd.DataFrame:
    device = npu_device("4000", compiled(), measured(), Layer(9, 3, 64), "two cores")
    one_task = processor_line(measured(), Layer(9, 3, 64), "one task")
    return pd.DataFrame([vars(row) for row in study._rows(NpuTtftRow(**COMMON), device, one_task, graphs(**options), 0.2)])


def test_blocks_and_attention_add_up_and_launches_are_counted():
    study = NpuTtft(tokens=[512], launch_us=[0.0, 100.0])
    values = rows_of(study).set_index(["method", "launch_us"]).value
    times = 30 * 2  # layers × chunks
    attention = 1e-6 * 30 * sum(2e-6 * 9 * 256 * 64 * keys for keys in (256, 512))
    assert values[NPU_FULL, 0.0] == pytest.approx(1e-6 * times * 400 + attention)
    assert values[NPU_FULL, 100.0] - values[NPU_FULL, 0.0] == pytest.approx(1e-6 * times * 3 * 100)
    assert values[CPU_DENSE, 100.0] - values[CPU_DENSE, 0.0] == pytest.approx(1e-6 * times * 2 * 100)
    assert values[OURS, 100.0] >= values[OURS, 0.0] + 1e-6 * times * 2 * 100
    assert values[ONE_TASK, 100.0] - values[ONE_TASK, 0.0] == pytest.approx(1e-6 * times * 2 * 100)
    pairs = 256 * 256 - 256 * 255 / 2 + 256 * 512 - 256 * 255 / 2
    assert values[ONE_TASK, 0.0] == pytest.approx(1e-6 * times * 400 + 1e-6 * 30 * 9 * (2 * 20 + 2e-5 * 64 * pairs))


@pytest.mark.parametrize("launch_us", [0.0, 100.0, 3000.0])
def test_estimates_a_layer_ahead_pass_beside_attention_chunk_by_chunk(launch_us):
    """The longer of both in each chunk, of every layer but the last, whose attention nothing passes beside."""
    ours, early = (rows_of(NpuTtft(tokens=[512], launch_us=[launch_us])).set_index("method").loc[name] for name in (OURS, AHEAD))
    device = with_launch(npu_device("4000", compiled(), measured(), Layer(9, 3, 64), "two cores"), launch_us)
    layer, layers, projection_us = Layer(9, 3, 64), 30, 100 + launch_us
    longer = device_us = core_us = 0.0
    for keys in (256, 512):
        chunk = ChunkShape(256, keys)
        estimate = sum(device.estimate_us(layer, chunk, heads) for heads in (4, 4, 1))
        core = 9 * (device.head_select_us(chunk, 0.2) + device.head_attend_us(layer, chunk, 0.2))
        longer, device_us, core_us = longer + max(projection_us + estimate, core), device_us + estimate, core_us + core
    assert early.value - ours.value / layers == pytest.approx(
        1e-6 * (layers - 1) * (longer + 2 * (400 + 2 * launch_us)), rel=1e-6
    )
    assert early.cpu_share * early.value == pytest.approx(1e-6 * layers * core_us)


def test_a_last_chunk_of_fewer_rows_takes_less_of_the_processor_and_as_much_of_the_npu():
    """Graphs have a fixed number of rows."""
    values = rows_of(NpuTtft(tokens=[300, 512], launch_us=[0.0])).set_index(["method", "context_tokens"]).value
    ends = 1e-6 * 30 * 9 * 256 * 64 * 2e-6
    assert values[NPU_FULL, 512] - values[NPU_FULL, 300] == pytest.approx(ends * (512 - 300))
    kept = 256 * 256 - 256 * 255 / 2 + 44 * 300 - 44 * 43 / 2
    assert values[CPU_DENSE, 300] == pytest.approx(1e-6 * 60 * 400 + 1e-6 * 30 * 9 * 5e-5 * 64 * kept, rel=0.02)


def test_shares_are_of_the_whole_time():
    made = rows_of(NpuTtft(tokens=[512], launch_us=[0.0])).set_index("method")
    assert made.npu_share[NPU_FULL] == pytest.approx(1)
    assert made.cpu_share[NPU_FULL] == 0
    assert made.npu_share[CPU_DENSE] + made.cpu_share[CPU_DENSE] == pytest.approx(1)
    assert 0 < made.cpu_share[OURS] < 1
    assert draw(rows_of(NpuTtft(tokens=[512, 1024], launch_us=[0.0, 100.0]))).get_suptitle().startswith("SIMULATED")


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_devices_that_ship_are_those_of_the_published_rows(platform):
    """Written by the study into its folder, and copied from there."""
    compiled_rows, rates = (
        read_reference(ROOT / "results" / "reference" / f"{name}.csv") for name in ("npu_compile", "roofline")
    )
    machine = read_json(ROOT / "results" / "reference" / "roofline.json", "publish it again")["machine"]
    processor = f"{machine['cores']} cores of {machine['processor'].split(' (')[0]}"
    expected = npu_device(platform, compiled_rows, rates, Layer(9, 3, 64), processor)
    shipped = load_device(f"intel_npu_{platform}")
    assert shipped.name == expected.name
    for name in ("launch_us", "estimate_ns", "select_us", "select_ns", "attend_us", "attend_ns", "dense_ns"):
        assert getattr(shipped, name).value == pytest.approx(getattr(expected, name).value, rel=1e-6)


def test_what_does_not_compile_has_no_time():
    assert rows_of(NpuTtft(tokens=[512]), fails="attention").empty


def test_one_task_has_rates_of_one_retention_alone():
    lab = SimpleNamespace(of=lambda name: 0.1)
    with pytest.raises(InputError, match=r"retention: the rates of one task are of 0.2, got 0.1; measure them with"):
        NpuTtft().check(lab)


def test_without_published_rows_the_study_names_the_command():
    with pytest.raises(InputError, match=r"publish a run of \+exp=nothing first"):
        NpuTtft(compiled="nothing").check(SimpleNamespace(of=lambda name: 0.2))


@pytest.mark.parametrize(("name", "of"), [("compiled", "roofline"), ("rates", "npu_compile"), ("rates", "table4")])
def test_rows_of_another_experiment_are_refused(name, of):
    with pytest.raises(InputError, match=f"study.{name}: expected published rows of .*, and {of} has others"):
        NpuTtft(**{name: of}).check(SimpleNamespace(of=lambda name: 0.2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"launch_us": [float("inf")]}, "study.launch_us: expected microseconds from 0 on, got inf"),
        ({"rows": 0}, "study.rows: expected at least 1"),
        ({"platforms": []}, "study.platforms: expected at least one"),
        ({"launch_us": []}, "study.launch_us: expected at least one"),
        ({"launch_us": [-500.0]}, "study.launch_us: expected microseconds from 0 on"),
    ],
)
def test_empty_lists_and_negative_launches_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        NpuTtft(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rows": 128}, "has no blocks float16, w8a8 of smollm2"),
        ({"tokens": [1 << 20]}, "has no attention to 1048576 keys of smollm2"),
    ],
)
def test_what_was_never_compiled_is_refused_with_the_command(settings, message):
    with pytest.raises(InputError, match=message):
        NpuTtft(**settings).check(SimpleNamespace(of=lambda name: 0.2))


def test_other_head_dimensions_have_no_measured_rates():
    with pytest.raises(InputError, match="the rates are of head dimension 64, got qwen2_1_5b"):
        NpuTtft(models=["qwen2_1_5b"])
