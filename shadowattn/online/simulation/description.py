"""Descriptions of devices as files: those shipped (`devices/NAME.yaml`), a user's own, and one fitted to this machine."""

import reprlib
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any

import yaml

from shadowattn.artifacts import write_text
from shadowattn.errors import InputError
from shadowattn.online.simulation.device import Device, Number

KINDS = ("published", "fitted", "assumed", "datasheet", "measured", "compiler estimate")
ESTIMATE_ON = ("CPU", "GPU", "NPU")
_FOLDER = Path(__file__).parent / "devices"
_FIELDS = {field.name: field for field in fields(Device)}
_NUMBERS = tuple(name for name in _FIELDS if name not in ("name", "estimate_on", "core_speeds"))
_REQUIRED = tuple(name for name, field in _FIELDS.items() if field.default is MISSING and field.default_factory is MISSING)
# What others are divided by.
_ABOVE_ZERO = ("cores", "dense_ns", "score_ns", "bandwidth_gb_s")


def shipped() -> list[str]:
    """Names of the descriptions that come with the package."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_device(name: str) -> Device:
    """A shipped description by name, or one of your own by its path. Raises `InputError` where it is none."""
    path = Path(name).expanduser() if name.endswith(".yaml") else _FOLDER / f"{name}.yaml"
    where = f"device {name}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{where}: expected one of {', '.join(shipped())}, or a .yaml file; there is none") from error
    except (OSError, ValueError, yaml.YAMLError) as error:
        problem = " ".join(str(error).split())
        raise InputError(f"{where}: expected a description like the shipped ones, got {problem}") from error
    return _device(where, content)


def save_device(device: Device, path: Path) -> Path:
    """Writes a description that `load_device` reads as the same device; what is unknown is left out."""
    content = {name: value for name, value in asdict(device).items() if value not in (None, {})}
    write_text(path, yaml.safe_dump(content, sort_keys=False, allow_unicode=True, default_flow_style=None, width=1 << 16))
    return path


def _device(where: str, content: Any) -> Device:
    if not isinstance(content, dict):
        raise InputError(f"{where}: expected a field a line, as in the shipped descriptions, got {reprlib.repr(content)}")
    for key in content:
        if key not in _FIELDS:
            raise InputError(f"{where}: expected fields of {', '.join(_FIELDS)}, got {key!r}")
    missing = [name for name in _REQUIRED if name not in content]
    if missing:
        raise InputError(f"{where}: expected {', '.join(_REQUIRED)}, got no {', '.join(missing)}")
    if not _is_text(content["name"]):
        raise InputError(f"{where}: name: expected text, got {content['name']!r}")
    if content["estimate_on"] not in ESTIMATE_ON:
        raise InputError(f"{where}: estimate_on: expected one of {', '.join(ESTIMATE_ON)}, got {content['estimate_on']!r}")
    numbers = {name: _number(f"{where}: {name}", content[name], name in _ABOVE_ZERO) for name in _NUMBERS if name in content}
    estimate = [name for name in ("launch_us", "estimate_ns", "copy_ns") if name in numbers]
    if not any(numbers[name].value for name in estimate):
        raise InputError(f"{where}: expected an estimate that takes time, got 0 for {', '.join(estimate)}")
    of_cores = content.get("core_speeds", {})
    if not isinstance(of_cores, dict) or not all(map(_is_text, of_cores)):
        raise InputError(f"{where}: core_speeds: expected a number for each kind of core by name, got {reprlib.repr(of_cores)}")
    speeds = {kind: _number(f"{where}: core_speeds: {kind}", speed, True) for kind, speed in of_cores.items()}
    return Device(name=content["name"], estimate_on=content["estimate_on"], core_speeds=speeds, **numbers)


def _number(where: str, content: Any, above_zero: bool) -> Number:
    if not isinstance(content, dict) or set(content) != {"value", "kind", "source"}:
        raise InputError(f"{where}: expected {{value: …, kind: …, source: …}}, got {reprlib.repr(content)}")
    value, kind, source = content["value"], content["kind"], content["source"]
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"{where}: value: expected a number, got {value!r} (YAML takes 1e-3 for text; write 1.0e-3)")
    if not 0 <= value < float("inf") or (above_zero and not value):
        raise InputError(f"{where}: value: expected a finite number {'above' if above_zero else 'of at least'} 0, got {value}")
    if kind not in KINDS:
        raise InputError(f"{where}: kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    if not _is_text(source):
        raise InputError(f"{where}: source: expected text that says where the value is from, got {source!r}")
    return Number(float(value), kind, source)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())
