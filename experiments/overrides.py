"""Settings that do not exist: they are refused, and answered with the known one that is spelt most like them."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import get_type_hints

from omegaconf import DictConfig, OmegaConf

from experiments.config import PARTS, Config
from shadowattn.errors import InputError

# Whatever a user calls methods and estimates.
_FREE = ("compare", "recall.estimates")
_UNKNOWN = re.compile(r"Could not (?:override|append to config)\D*?'(?P<key>[\w.]+)'|Key '(?P<leaf>\w+)' (?:is )?not in")


def known_keys() -> list[str]:
    """Every setting there is, with those of all parts that a group can be."""
    groups = {f"{group}.{key}" for group, parts in PARTS.items() for part in parts.values() for key in _keys(part)}
    return sorted({*_keys(Config), *groups})


def nearest(key: str) -> str | None:
    """The known setting that is spelt most like `key`: first by its whole name, then by its last part."""
    known = [name for name in known_keys() if not key.startswith(f"{name}.")]
    last = {name.split(".")[-1]: name for name in known}
    whole = get_close_matches(key, known, n=1)
    by_last = get_close_matches(key.split(".")[-1], last, n=1, cutoff=0.75)
    return whole[0] if whole else last[by_last[0]] if by_last else None


def answer(message: str) -> str | None:
    """One line for Hydra's message on a setting that does not exist; None where it is about something else."""
    found = _UNKNOWN.search(message)
    full = re.search(r"full_key: ([\w.]+)", message)
    key = full[1] if full else found and (found["key"] or found["leaf"])
    if not found or "No match in the defaults list" in message or "already" in message:
        return None
    return _unknown(key)


def check_known(config: DictConfig) -> None:
    """Raises `InputError` on a setting that was added with `+` and that nothing reads. Parts may have settings of their own."""
    known = set(known_keys())
    for key in _settings(config):
        if key not in known:
            raise InputError(_unknown(key))


def _unknown(key: str) -> str:
    near = nearest(key)
    meant = f"did you mean {near}?" if near else "print all settings with: python -m experiments.run --cfg job"
    return f"{key}: there is no such setting; {meant}"


def _settings(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in config:
        key = f"{prefix}{name}"
        yield key
        if key in _FREE or OmegaConf.is_missing(config, name) or not OmegaConf.is_dict(config[name]):
            continue
        if "_target_" not in config[name]:
            yield from _settings(config[name], f"{key}.")


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for field in fields(schema):
        if field.name.startswith("_"):
            continue
        yield prefix + field.name
        if is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")
