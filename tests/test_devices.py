import openvino as ov
import pytest

from shadowattn import devices
from shadowattn.errors import InputError

HAS_NPU = "NPU" in ov.Core().available_devices


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


def test_a_listed_npu_that_aborts_is_not_used(monkeypatch):
    """The probe runs in a process of its own: a compiler that aborts takes only that one down."""
    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(devices, "_PROBE", "import os; os.abort()")
    found = devices.find_estimate_device("auto")
    assert found.name == "CPU"
    assert "a small INT8 graph fails on it (exit status -6" in found.reason
    with pytest.raises(InputError, match="fails on it"):
        devices.find_estimate_device("npu")


def test_a_listed_npu_that_works_is_used(monkeypatch):
    monkeypatch.setattr(devices.ov.Core, "available_devices", ["CPU", "NPU"])
    monkeypatch.setattr(devices, "_PROBE", devices._PROBE.replace('"NPU"', '"CPU"'))
    assert devices.find_estimate_device("auto").name == "NPU"


def test_refuses_an_unknown_device():
    with pytest.raises(InputError, match="auto, npu or cpu"):
        devices.find_estimate_device("tpu")
