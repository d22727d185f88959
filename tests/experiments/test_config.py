"""Every YAML composes, and every part it names can be built."""

from functools import cache
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from hydra.utils import get_class, get_method, instantiate
from omegaconf import DictConfig, OmegaConf

from experiments import config as schema
from experiments.overrides import check_known
from shadowattn.errors import InputError
from shadowattn.offline.allocators import Allocator
from shadowattn.online.estimators import Estimator

CONF = Path(__file__).parents[2] / "conf"
PARTS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name != "exp"]
EXPERIMENTS = [path.stem for path in sorted((CONF / "exp").glob("*.yaml"))]


@pytest.fixture(autouse=True)
def hydra():
    schema.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        yield


def test_there_is_something_to_test():
    assert len(PARTS) >= 16
    assert {"quickstart", "sweep_retention"} <= set(EXPERIMENTS)


@pytest.mark.parametrize(("group", "name"), PARTS)
def test_every_part_composes_and_its_target_exists(group, name):
    part = compose("config", [f"{group}={name}"])[group]
    if "_target_" in part:
        target = part._target_
        assert callable(get_class(target) if target.rsplit(".", 1)[-1][0].isupper() else get_method(target))


@pytest.mark.parametrize(
    ("group", "name"), [part for part in PARTS if part[0] in ("allocator", "estimator") and part[1] != "int8"]
)
def test_allocators_and_estimators_are_built_from_their_yaml(group, name):
    built = instantiate(compose("config", [f"{group}={name}"])[group])
    assert isinstance(built, {"allocator": Allocator, "estimator": Estimator}[group])


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_opens_with_its_command(name):
    config = compose("config", [f"+exp={name}"])
    assert config.experiment == name
    check_known(config)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    text = (CONF / "exp" / f"{name}.yaml").read_text()
    assert f"# python -m experiments.run +exp={name}" in text.splitlines()[1]


@cache
def _preset(name: str) -> DictConfig:
    return compose("config", [f"importance={name}"]).importance


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_preset_chosen_by_name_beats_the_experiments(name):
    """An experiment names presets; values of its own would outlive the choice of another."""
    for preset in ("artifact", "racing"):
        chosen = compose("config", [f"+exp={name}", f"importance={preset}"]).importance
        assert chosen == _preset(preset)
    own = OmegaConf.load(CONF / "exp" / f"{name}.yaml")
    assert not {path.parent.name for path in CONF.glob("*/*.yaml")} & set(own)


def test_settings_that_nothing_reads_are_refused_and_those_of_a_users_part_are_not():
    check_known(compose("config", ["estimator._target_=mine.Mine", "+estimator.alpha=0.5"]))
    with pytest.raises(InputError, match="windws: there is no such setting; did you mean"):
        check_known(compose("config", ["+evaluation.windws=3"]))


@pytest.mark.parametrize(
    "override", ["sedd=1", "seed=abc", "estimator.sinkz=3", "selection.query_block=many", "model=unheard_of"]
)
def test_misspelt_keys_and_wrong_types_are_refused(override):
    with pytest.raises(HydraException):
        compose("config", [override])


def test_compared_methods_select_as_the_main_one_does():
    config = compose("config", ["+exp=quickstart", "selection=block32"])
    assert config.compare.oracle.selection.query_block == 32
