"""Parts that can be swapped: built from their settings, named in rows, and hashed by the content of the files that they name."""

from collections.abc import Callable
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from hydra.utils import get_object
from omegaconf import OmegaConf

from experiments.part_targets import PACKAGES
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError

# In place of a file of activation scales: take them from the calibration windows.
OBSERVE = "observe"
# Settings that may name a file: its content is hashed then, not where it lies.
_FILES = ("path", "activation_scales", "profile", "template", "intents", "examples", "functions")


def build(part: Any, **built: Any) -> Any:
    """The part that settings describe, those within it first; `built` are its arguments that are no settings."""
    settings = OmegaConf.to_container(part, resolve=True) if OmegaConf.is_config(part) else dict(part)
    target = settings["_target_"]
    arguments = {name: _built(value) for name, value in settings.items() if not name.startswith("_")}
    missing = [name for name, value in arguments.items() if value == "???"]
    if missing:
        remedy = f"set it beside the part's name, as GROUP.{missing[0]}=…"
        raise InputError(f"{target}: expected a value of {', '.join(missing)}, got none; {remedy}")
    kind = get_object(target)
    arguments |= _lists(target, kind, arguments)
    try:
        return kind(**arguments, **built)
    except TypeError as error:
        raise InputError(f"{target}: could not be built ({error})") from error


def _lists(target: str, kind: Callable, arguments: dict[str, Any]) -> dict[str, list]:
    """Those arguments that a dataclass declares as lists; numbers among names, which YAML reads from digits, as names."""
    found = {}
    for name, hint in get_type_hints(kind).items() if is_dataclass(kind) else ():
        value = arguments.get(name)
        if get_origin(hint) is not list or value is None:
            continue
        if not isinstance(value, list):
            raise InputError(f"{target}: {name}: expected a list, got {value!r}; write {name}=[{value}]")
        found[name] = [str(one) if isinstance(one, int) else one for one in value] if get_args(hint) == (str,) else value
    return found


def _built(value: Any) -> Any:
    if isinstance(value, dict):
        return build(value) if "_target_" in value else {name: _built(one) for name, one in value.items()}
    return [_built(one) for one in value] if isinstance(value, list) else value


def part_name(part: Any) -> str:
    """What a swappable part is called in rows: ours by its file, anyone else's as MODULE.CLASS, which is nobody else's name."""
    target = part._target_
    return target.rsplit(".", 2)[-2] if target.split(".")[0] in PACKAGES else target


def by_content(settings: Any) -> Any:
    """Settings with the SHA-256 of a file in place of its path."""
    if isinstance(settings, dict):
        return {
            key: sha256(Path(value).expanduser()) if key in _FILES and _is_file(value) else by_content(value)
            for key, value in settings.items()
        }
    return [by_content(value) for value in settings] if isinstance(settings, list) else settings


def _is_file(value: Any) -> bool:
    return isinstance(value, str) and Path(value).expanduser().is_file()
