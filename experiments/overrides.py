"""Settings that do not exist or have no effect: they are refused, with the known one that is spelt most like them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import get_type_hints

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from experiments.compose import CONF
from experiments.config import ALWAYS, PARTS, Config
from experiments.part_settings import settings_of
from shadowattn.errors import InputError

_SEVERAL_TASKS = (
    "; several tasks in one run are those of +exp=study_accuracy or +exp=study_retrieval, each as +task@study.tasks.NAME=TASK"
)
# Whatever a user calls methods.
_FREE = ("compare", "full")
_CHOICE = re.compile(
    r"Could not find '(?P<group>[\w/]+)/(?P<name>[^'/]+)' Available options in '[^']+': (?P<options>.*?) Config search path"
)
_VALUE = re.compile(r"Error merging override (?P<override>\S+) (?P<reason>.*?)(?: full_key: .*)?$")
_SEVERAL = re.compile(r"Ambiguous value for argument '(?P<override>\S+)'")
_APPENDED = re.compile(r"An item is already at '(?P<key>[\w.]+)'")
_UNKNOWN = re.compile(r"Could not (?:override|append to config)\D*?'(?P<key>[\w.]+)'|Key '(?P<leaf>\w+)' (?:is )?not in")


@cache
def known_keys() -> tuple[str, ...]:
    """Every setting there is, with those of all parts that a group can be, and of all studies."""
    return tuple(sorted({*_keys(Config), *_keys_of_parts()}))


def nearest(key: str) -> str | None:
    """The known setting that is spelt most like `key`: by its last part where only that was given, then by its
    whole name, then by a last part spelt nearly so.
    """
    names = [name for name in known_keys() if not key.startswith(f"{name}.")]
    last = {name.split(".")[-1]: name for name in reversed(names)}
    ending = key.split(".")[-1]
    if "." not in key and ending in last:
        return last[ending]
    whole = get_close_matches(key, names, n=1)
    by_last = get_close_matches(ending, last, n=1, cutoff=0.8)
    return whole[0] if whole else last[by_last[0]] if by_last else None


def answer(message: str, overrides: Sequence[str]) -> str | None:
    """One line for what Hydra says of a choice, a value, a setting or the grammar; None where it is about something else."""
    if match := _CHOICE.search(message):
        options, plus = match["options"].split(), "+" * (match["group"] == "exp")
        near = get_close_matches(match["name"], options, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        return f"{plus}{match['group']}={match['name']}: expected one of {', '.join(options)}{meant}"
    if "Multiple values for " in message:
        return f"{message.partition('Multiple values for ')[2].partition('.')[0]}: expected one choice, got several"
    if "use +exp=" in message:
        return f"exp: an experiment is named with a plus: +{message.rpartition('use +')[2]}"
    if "override_grammar" in message:
        return _misread(overrides)
    if match := _SEVERAL.search(message):
        key, _, values = match["override"].partition("=")
        remedy = _several(key) if _is_group(key) else f", a list is {key}=[{values}]"
        return f"{match['override']}: expected one value, got several; a sweep over them begins with -m{remedy}"
    if match := _APPENDED.search(message):
        return f"+{match['key']}: the setting is there already; leave out the plus"
    if match := _VALUE.search(message):
        key, _, value = match["override"].partition("=")
        if "Cannot convert 'dict'" in message:  # something below a single value
            parent = key.lstrip("+").rpartition(".")[0]
            return f"{key}: there is no such setting; {parent} is a single value, set {parent}=VALUE"
        if "is not a ListConfig" in message:
            return f"{key}: expected a list, such as {key}=[{value}], got {value}"
        if "no such" not in message and "not in" not in message:
            return f"{match['override']}: {match['reason']}"
    match = _UNKNOWN.search(message)
    full = re.search(r"full_key: ([\w.]+)", message)
    key = full[1] if full else match and (match["key"] or match["leaf"])
    if not match or "No match in the defaults list" in message or "already" in message:
        return None
    return _unknown(key)


def _misread(overrides: Sequence[str]) -> str | None:
    """What is wrong with the first word of the command line that Hydra cannot read."""
    parser = OverridesParser.create()
    for before, override in pairwise(["", *overrides]):
        if override.startswith("-") or before in ("--config-dir", "-cd"):
            continue
        try:
            parser.parse_override(override)
        except HydraException:
            return (
                f"{override!r}: expected KEY=VALUE; a list is KEY=[A,B], a sweep KEY=A,B, both without spaces, and a value with "
                f"special characters stands in two kinds of quotes: KEY='\"VALUE\"'"
            )
    return None


def check_known(config: DictConfig) -> None:
    """Raises `InputError` on a setting that was added with `+` and that nothing reads; those of parts are the parts' business."""
    keys = set(_keys(Config))
    for key in _settings(config):
        if key not in keys:
            raise InputError(_unknown(key))


def check_used(config: DictConfig, overrides: Sequence[str], needs: Sequence[str]) -> None:
    """Raises `InputError` on an override that this study does not use, and on an empty list of retentions: either would change
    nothing that it says."""
    settings = {one.name for one in fields(Config)}
    for override in overrides:
        name, package = re.match(r"[+~]*([\w/]+)(?:@([\w:]+))?", override).groups()
        key = package or name
        if _is_group(name) and "=[" in override.replace(" ", ""):  # Hydra would take the last, with settings of the others
            values = override.partition("=")[2].strip().strip("[]")
            sweep = f"a sweep over several is -m {key}={values}"
            raise InputError(f"{override}: expected one choice, got a list; {sweep}{_several(name)}")
        if key in settings and key not in (*needs, *ALWAYS):
            raise InputError(f"{key}: {config.experiment} does not use it; it uses {', '.join(needs) or 'no part of the rest'}")
        if key == "retentions" and not config.retentions:
            raise InputError(
                f"retentions: expected one or more, got an empty list; for one, set retentions=[{config.retention:g}]"
            )


def _several(name: str) -> str:
    """How several of a group are run at once, where that is another thing than a sweep."""
    return _SEVERAL_TASKS if name.lstrip("+~").partition("@")[0] == "task" else ""


def _is_group(name: str) -> bool:
    """Whether a setting is chosen among the files of a folder of `conf`."""
    return (CONF / re.sub(r"@.*", "", name.lstrip("+~")).strip("/")).is_dir()


def _unknown(key: str) -> str:
    near = nearest(key)
    meant = f"did you mean {near}?" if near else "print all settings with: python -m experiments.run --cfg job"
    return f"{key}: there is no such setting; {meant}"


def _settings(config: DictConfig, prefix: str = "") -> Iterator[str]:
    for name in config:
        key = f"{prefix}{name}"
        yield key
        if key in (*_FREE, *PARTS) or OmegaConf.is_missing(config, name) or not OmegaConf.is_dict(config[name]):
            continue
        yield from _settings(config[name], f"{key}.")


def _keys(schema: type, prefix: str = "") -> Iterator[str]:
    hints = get_type_hints(schema)
    for field in fields(schema):
        if field.name.startswith("_"):
            continue
        yield prefix + field.name
        if is_dataclass(hints[field.name]):
            yield from _keys(hints[field.name], f"{prefix}{field.name}.")


def _keys_of_parts() -> Iterator[str]:
    for path in sorted(CONF.glob("*/*.yaml")):
        content = yaml.safe_load(path.read_text()) or {}
        group, part = ("study", content.get("study") or {}) if path.parent.name == "exp" else (path.parent.name, content)
        settings = settings_of(part["_target_"]) if "_target_" in part else None
        names = [] if settings is None else [*settings.schema.__dataclass_fields__, *settings.others]
        yield from (f"{group}.{name}" for name in names if not name.startswith("_"))
