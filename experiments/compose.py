"""Configurations from overrides, as the command line makes them, without Hydra's application around."""

import re
from collections.abc import Sequence
from pathlib import Path

import hydra
from omegaconf import DictConfig

from experiments import config as schema

CONF = Path(__file__).parents[1] / "conf"
# A setting of a part, which the part's class may have though no YAML names it.
_OF_A_PART = re.compile(rf"(?:{'|'.join(schema.PARTS)}|compare\.\w+\.(?:estimator|allocator)|full\.\w+)\.[\w.]+=")

# What may be said shortly: the tasks of lm_eval.
_SHORT = "tasks="

# Taken as it stands: commas, colons, quotes and braces of a text are none of Hydra's.
_TEXT = "prompt="

schema.register()


def settable(override: str) -> str:
    """An override as Hydra takes it: a text is quoted, and a setting of a part may be new to the configuration."""
    if override.startswith(_TEXT):
        text = re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", override.removeprefix(_TEXT))  # no interpolation
        return _TEXT + "'" + re.sub(r"(\\*)('|\Z)", lambda found: 2 * found[1] + (r"\'" if found[2] else ""), text) + "'"
    if override.startswith(_SHORT):
        return f"study.{override}"
    return f"++{override}" if _OF_A_PART.match(override) else override


def typed(override: str) -> str:
    """What `settable` was given."""
    if override.startswith(_TEXT + "'"):
        text = re.sub(r"(\\*)(\\'|\Z)", lambda found: found[1][::2] + ("'" if found[2] else ""), override[len(_TEXT) + 1 : -1])
        return _TEXT + re.sub(r"(\\*)\\\$\{", lambda found: found[1][::2] + "${", text)
    return override[2:] if override.startswith("++") and _OF_A_PART.match(override[2:]) else override


def composed(overrides: Sequence[str], folders: Sequence[str] = ()) -> DictConfig:
    """The configuration of `python -m experiments.run OVERRIDES`, parts as their YAMLs have them; `folders` hold further ones."""
    paths = ",".join(f"file://{Path(folder).absolute()}" for folder in folders)
    further = [f"hydra.searchpath=[{paths}]"] if folders else []
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", [*(settable(one) for one in overrides), *further])


def choices(folders: Sequence[str] = ()) -> dict[str, list[str]]:
    """What each group can be, and the experiments, by the names of their files; `folders` hold further ones."""
    names: dict[str, set[str]] = {}
    for folder in (CONF, *map(Path, folders)):
        for path in folder.glob("*/*.yaml"):
            names.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(names[group]) for group in sorted(names)}
