"""Which graphs a device is tried with: those of the run's own forms and launches."""

import pytest

from experiments.probes import probes
from experiments.refusals import check
from shadowattn.device_check import SMALLEST, check_device
from shadowattn.errors import InputError
from shadowattn.graphs import GraphForm
from tests.experiments.test_lab import lab

NEEDS = ("model", "graphs", "estimator", "allocator", "selection", "method", "compare")
MODEL = ["model=random", "model.shape=qwen2_0_5b", "model.layers=1", "model.hidden=64", "model.vocabulary=2560"]


def tried(*overrides: str, device: str = "NPU") -> dict:
    return probes(lab(*NEEDS, overrides=[*MODEL, *overrides]), device)


def test_a_run_without_graphs_asks_for_the_smallest():
    assert probes(lab("retention"), "NPU") == {"a small INT8 graph": SMALLEST}


def test_every_number_of_heads_of_a_launch_is_tried():
    found = tried("graphs.launch_heads=[1,2,4]", "graphs.chunk_tokens=64")
    launches = lab(*NEEDS, overrides=MODEL).shape
    most = launches.heads // launches.kv_heads if launches.kv_heads < launches.heads else launches.heads
    assert sorted(shape.heads for shape, _ in found.values()) == sorted({min(count, most) for count in (1, 2, 4)})
    assert {shape.rows for shape, _ in found.values()} == {64}
    assert {form for _, form in found.values()} == {GraphForm("int8")}
    assert {form for _, form in tried(device="CPU").values()} == {GraphForm("static")}


def test_every_way_to_select_on_the_device_is_tried():
    found = tried(
        "estimator=int8", "selection=device", "+estimator@compare.other.estimator=int8",
        "+allocator@compare.other.allocator=uniform", "+selection@compare.other.selection=device_blocks",
    )  # fmt: skip
    assert {(form.indices, form.pool) for _, form in found.values()} == {(False, (1, 1)), (True, (1, 1)), (True, (1, 16))}
    assert all(0 < shape.top_k <= shape.keys // form.pool[1] for shape, form in found.values() if form.indices)


def test_the_graphs_that_are_tried_run_and_rank_on_the_cpu():
    found = tried("graphs.launch_heads=[2]", "graphs.chunk_tokens=32")
    for outcome in check_device("CPU", found):
        assert not outcome.error
        assert outcome.recall > 0.99


def test_banks_compiled_ahead_are_refused_without_an_npu():
    with pytest.raises(InputError, match=r"graphs\.ahead: expected an NPU for what was compiled ahead, and graphs run on CPU"):
        check(lab(*NEEDS, "device", overrides=[*MODEL, "device=cpu", "graphs.ahead=banks"]))
