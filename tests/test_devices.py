import pytest

from shadowattn import device_check, devices
from shadowattn.device_check import CASES
from shadowattn.errors import InputError
from shadowattn.graphs import GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import multiplies_exactly
from shadowattn.graphs.estimation import FLOAT, estimation_graph
from tests.test_device_check import dying

HAS_NPU = "NPU" in core().available_devices


def test_the_cpu_is_there_when_asked_for():
    assert devices.find_estimate_device("cpu") == devices.EstimateDevice("CPU", "asked for")


@pytest.mark.skipif(HAS_NPU, reason="this machine has an NPU, so there is no fallback to see")
def test_without_an_npu_auto_takes_the_cpu_and_says_why():
    found = devices.find_estimate_device("auto")
    assert found.name == "CPU"
    assert "no NPU among OpenVINO's devices" in found.reason


@pytest.mark.skipif(HAS_NPU, reason="this machine has an NPU, so asking for it is no error")
def test_without_an_npu_asking_for_it_is_an_error():
    with pytest.raises(InputError, match="use device=auto or device=cpu"):
        devices.find_estimate_device("npu")


def test_a_listed_npu_that_aborts_is_not_used(monkeypatch, tmp_path):
    """The probe runs in a process of its own: a compiler that aborts takes only that one down."""
    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(device_check.sys, "executable", dying(tmp_path))
    found = devices.find_estimate_device("auto")
    assert found.name == "CPU"
    assert "a small INT8 graph fails on it (the process ended with status -6" in found.reason
    with pytest.raises(InputError, match="fails on it"):
        devices.find_estimate_device("npu")


def test_a_listed_npu_that_works_is_used(monkeypatch):
    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(devices, "check_device", lambda name, cases: device_check.check_device("CPU", cases))
    assert devices.find_estimate_device("auto").name == "NPU"


def test_a_listed_device_that_ranks_wrongly_is_not_used(monkeypatch):
    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(devices, "check_device", lambda name, cases: [device_check.Outcome("probe", recall=0.5)])
    assert "finds 50% of the top 20 %" in devices.find_estimate_device("auto").reason


@pytest.mark.skipif(HAS_NPU, reason="this machine has an NPU, so it is no wonder that one answers")
def test_npuw_is_never_taken_for_an_npu():
    """OpenVINO's NPUW compiles for the NPU without one, runs on the CPU and says NPU: only the list of devices counts."""
    graph = estimation_graph(GraphShape(1, 16, 64, 16), FLOAT, 0.1, 0.1)
    try:
        compiled = core().compile_model(graph, "NPU", {"NPU_USE_NPUW": "YES"})
    except RuntimeError as error:
        if multiplies_exactly():
            raise
        pytest.skip(f"NPUW does not compile on this processor, which has no VNNI: {str(error)[-100:]}")
    assert "NPU" in str(compiled.get_property("EXECUTION_DEVICES"))
    assert devices.find_estimate_device("auto").name == "CPU"
    assert devices.find_problem("NPU").startswith("no NPU among")


def test_of_several_gpus_the_first_is_taken(monkeypatch):
    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "GPU.1", "GPU.0"])
    monkeypatch.setattr(devices, "check_device", lambda name, cases: [device_check.Outcome("probe", recall=1.0)])
    assert devices.find_estimate_device("gpu").name == "GPU.0"
    monkeypatch.setattr(devices, "_property", lambda name, wanted: f"{name} {wanted}")
    assert [capability.name for capability in devices.survey()] == ["CPU", "GPU.0", "GPU.1", "NPU"]
    assert devices.drivers()["GPU.1"] == "GPU.1 FULL_DEVICE_NAME, driver GPU.1 DRIVER_VERSION"


def test_the_survey_names_what_is_here_and_what_is_not():
    found = {capability.name: capability for capability in devices.survey()}
    assert {"CPU", "GPU", "NPU"} <= set(found)
    assert found["CPU"].problem == ""
    assert found["CPU"].full_name
    for name, capability in found.items():
        if name not in core().available_devices:
            assert (capability.full_name, capability.driver) == ("not found", "none")
            assert f"no {name} among" in capability.problem


def test_refuses_an_unknown_device():
    with pytest.raises(InputError, match="one of auto, npu, gpu, cpu"):
        devices.find_estimate_device("tpu")


def test_the_graphs_that_are_tried_are_of_the_forms_that_are_to_run(monkeypatch):
    """A device that takes one form and not another is refused for the other alone, and is told which."""
    tried = {}

    def answer(name, cases):
        tried.update(cases)
        return [
            device_check.Outcome(what, error="cannot" if form.indices else "", recall=1.0) for what, (_, form) in cases.items()
        ]

    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(devices, "check_device", answer)
    plain, selecting = {"a graph": CASES["int8, float16 scores"]}, {"one that selects": CASES["int8, mask, TopK 205"]}
    assert devices.find_estimate_device("auto", lambda name: plain).name == "NPU"
    found = devices.find_estimate_device("auto", lambda name: plain | selecting)
    assert found.name == "CPU"
    assert "NPU is listed but one that selects fails on it (cannot)" in found.reason
    assert tried == plain | selecting
