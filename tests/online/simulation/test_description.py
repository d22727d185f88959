"""Descriptions of devices as files: what was saved is loaded, and what is none is refused in one line."""

import copy
from dataclasses import replace

import pytest
import yaml

from shadowattn.errors import InputError
from shadowattn.online.simulation.description import load_device, save_device, shipped
from shadowattn.online.simulation.device import Device, Number

NUMBER = {"value": 1.0, "kind": "assumed", "source": "test"}
NAMES = ("cores", "launch_us", "estimate_ns", "select_us", "select_ns", "attend_us", "attend_ns")
MINE = {"name": "mine", "estimate_on": "NPU"} | {name: copy.copy(NUMBER) for name in NAMES}


@pytest.mark.parametrize("name", shipped())
def test_what_is_saved_is_loaded(tmp_path, name):
    device = load_device(name)
    assert load_device(str(save_device(device, tmp_path / "saved.yaml"))) == device


def test_what_is_unknown_stays_unknown(tmp_path):
    numbers = dict.fromkeys(NAMES, Number(1e-7, "fitted", "median error of estimate 7.7%: “µs”"))
    device = Device("this machine", "CPU", **numbers, list_ns=Number(0.25, "measured", "test"))
    loaded = load_device(str(save_device(device, tmp_path / "saved.yaml")))
    assert loaded == device
    assert loaded.dense_ns is loaded.score_ns is loaded.copy_ns is None
    assert load_device(str(save_device(replace(device, list_ns=None), tmp_path / "saved.yaml"))).list_ns is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch_us": NUMBER | {"value": -1}}, "launch_us: value: expected a finite number of at least 0, got -1"),
        ({"launch_us": NUMBER | {"value": float("nan")}}, "expected a finite number of at least 0, got nan"),
        ({"launch_us": NUMBER | {"value": "1e-3"}}, "expected a number, got '1e-3' (YAML takes 1e-3 for text; write 1.0e-3)"),
        ({"launch_us": NUMBER | {"value": True}}, "expected a number, got True"),
        ({"launch_us": NUMBER | {"kind": "guessed"}}, "launch_us: kind: expected one of published"),
        ({"launch_us": NUMBER | {"source": " "}}, "launch_us: source: expected text that says where the value is from, got ' '"),
        ({"launch_us": NUMBER | {"source": 7}}, "launch_us: source: expected text"),
        ({"launch_us": NUMBER | {"unit": "us"}}, "launch_us: expected {value: …, kind: …, source: …}, got {"),
        ({"launch_us": 5}, "launch_us: expected {value: …, kind: …, source: …}, got 5"),
        ({"copy_ns": None}, "copy_ns: expected {value: …, kind: …, source: …}, got None"),
        ({"cores": NUMBER | {"value": 0}}, "cores: value: expected a finite number above 0, got 0"),
        ({"dense_ns": NUMBER | {"value": 0.0}}, "dense_ns: value: expected a finite number above 0"),
        ({"bandwidth_gb_s": NUMBER | {"value": 0}}, "bandwidth_gb_s: value: expected a finite number above 0, got 0"),
        (
            dict.fromkeys(("launch_us", "estimate_ns"), NUMBER | {"value": 0}),
            "expected an estimate that takes time, got 0 for launch_us, estimate_ns",
        ),
        ({"bandwith_gb_s": NUMBER}, "expected fields of name, estimate_on, cores"),
        ({"name": None}, "name: expected text, got None"),
        ({"estimate_on": "cpu"}, "estimate_on: expected one of CPU, GPU, NPU, got 'cpu'"),
        ({"estimate_on": None}, "estimate_on: expected one of CPU, GPU, NPU, got None"),
        ({"core_speeds": None}, "core_speeds: expected a number for each kind of core by name, got None"),
        ({"core_speeds": [NUMBER]}, "core_speeds: expected a number for each kind of core by name, got ["),
        ({"core_speeds": {1: NUMBER}}, "core_speeds: expected a number for each kind of core by name, got {1"),
        ({"core_speeds": {"slow": 0.5}}, "core_speeds: slow: expected {value: …"),
        ({"core_speeds": {"slow": NUMBER | {"value": "half"}}}, "core_speeds: slow: value: expected a number, got 'half'"),
        ({"core_speeds": {"slow": NUMBER | {"value": 0}}}, "core_speeds: slow: value: expected a finite number above 0, got 0"),
    ],
)
def test_fields_that_make_no_sense_are_refused(tmp_path, change, message):
    _refused(tmp_path, yaml.safe_dump(MINE | change), message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (yaml.safe_dump({key: value for key, value in MINE.items() if key != "cores"}), "got no cores"),
        ("- 1\n- 2\n", "expected a field a line, as in the shipped descriptions, got [1, 2]"),
        ("fast", "expected a field a line, as in the shipped descriptions, got 'fast'"),
        ("", "expected a field a line, as in the shipped descriptions, got None"),
        ("name: [", "expected a description like the shipped ones"),
        (b"\xff\xfe\x00", "expected a description like the shipped ones"),
    ],
)
def test_files_that_are_no_descriptions_are_refused(tmp_path, content, message):
    _refused(tmp_path, content, message)


def _refused(tmp_path, content, message):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINE))
    assert load_device(str(path)).name == "mine"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(InputError) as refused:
        load_device(str(path))
    assert str(refused.value).startswith(f"device {path}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
