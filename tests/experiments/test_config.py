"""Every YAML composes, and every part it names can be built."""

import sys
from dataclasses import fields
from functools import cache

import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.utils import get_class, get_method
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf

import experiments.run
from experiments.compose import CONF, composed, settable, typed
from experiments.config import Config
from experiments.lab import Lab
from experiments.overrides import answer, check_known, check_used
from experiments.part_building import build, part_name
from experiments.part_settings import complete, declared, settings_of
from experiments.part_targets import definition
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.graphs import GraphForm, GraphShape
from shadowattn.graphs.estimation import estimation_graph
from shadowattn.graphs.nncf_graph import NNCFGraph, compile_int8
from shadowattn.offline.allocators import Allocator
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.lightning_indexer import LightningIndexer
from shadowattn.types import FirstLookLosses, IndexerWeights
from tests.online.estimators.test_channels import some as some_channels

PARTS = [(path.parent.name, path.stem) for path in sorted(CONF.glob("*/*.yaml")) if path.parent.name != "exp"]
EXPERIMENTS = [path.stem for path in sorted((CONF / "exp").glob("*.yaml"))]


def compose(overrides: list[str]) -> DictConfig:
    config = composed(overrides)
    complete(config)
    return config


@given(text=st.text(alphabet="ab ,:'\"\\\\${}[]()=~+-#\nä", max_size=20))
@example(text="\\\n")  # `$` of a pattern also matches before a last line feed
def test_a_prompt_is_taken_as_it_stands(text):
    assert typed(settable(f"prompt={text}")) == f"prompt={text}"
    parsed = OverridesParser.create().parse_override(settable(f"prompt={text}")).value()
    assert OmegaConf.create({"prompt": str(parsed)}).prompt == text


def test_there_is_something_to_test():
    assert len(PARTS) >= 16
    assert {"quickstart", "sweep_retention"} <= set(EXPERIMENTS)


@pytest.mark.parametrize(("group", "name"), PARTS)
def test_every_part_composes_and_its_target_exists(group, name):
    part = compose([f"+{group}@full.it={name}"]).full.it if group == "full_attention" else compose([f"{group}={name}"])[group]
    if "_target_" in part:
        target = part._target_
        assert callable(get_class(target) if target.rsplit(".", 1)[-1][0].isupper() else get_method(target))


@pytest.mark.parametrize(
    ("group", "name"),
    [part for part in PARTS if part[0] in ("allocator", "estimator") and part[1] not in ("int8", "int8_graph")],
)
def test_allocators_and_estimators_are_built_from_their_yaml(group, name):
    part = compose([f"{group}={name}"])[group]
    needs = get_class(part._target_).needs if group == "estimator" else ()
    made = {
        "first_look": lambda: FirstLookLosses([[0.0]], part.candidates, part.block_rows),
        "channels": some_channels,
        "nncf_graph": some_graph,
        "top_p": lambda: 0.5,
        "indexer": some_indexer,
    }
    built = build(part, **{name: make() for name, make in made.items() if name in needs})
    assert isinstance(built, {"allocator": Allocator, "estimator": Estimator}[group])


def some_indexer():
    """Of the heads and dimensions that the estimator has by default."""
    shape = LightningIndexer.heads, LightningIndexer.dims
    q, gate, k = torch.ones(1, *shape, 8), torch.ones(1, shape[0], 9), torch.ones(1, shape[1], 4)
    return IndexerWeights(q.tolist(), k.tolist(), gate.tolist())


def some_graph():
    shape = GraphShape(2, 8, 64, 16, 2)
    return NNCFGraph(compile_int8(estimation_graph(shape, GraphForm(), 0.02, 0.02), what="test"), shape, {"q": 0.02, "k": 0.02})


def test_what_a_run_builds_is_no_setting():
    with pytest.raises(InputError, match=r"estimator\.channels: there is no such setting"):
        complete(compose(["estimator=loki", "+estimator.channels=[1]"]))


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes_and_opens_with_its_command(name):
    config = compose([f"+exp={name}"])
    assert config.experiment == name
    check_known(config)
    OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    study = build(config.study)
    assert isinstance(study, Study)
    assert set(study.needs) <= {one.name for one in fields(Config)}
    assert declared(config.study._target_, "needs") == study.needs  # what is known of it before it is imported
    text = (CONF / "exp" / f"{name}.yaml").read_text()
    assert f"# python -m experiments.run +exp={name}" in text.splitlines()[1]


@cache
def _preset(name: str) -> DictConfig:
    return compose([f"importance={name}"]).importance


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_preset_chosen_by_name_beats_the_experiments(name):
    """An experiment names presets; values of its own would outlive the choice of another."""
    for preset in ("artifact", "racing"):
        chosen = compose([f"+exp={name}", f"importance={preset}"]).importance
        assert chosen == _preset(preset)
    own = OmegaConf.load(CONF / "exp" / f"{name}.yaml")
    assert not {path.parent.name for path in CONF.glob("*/*.yaml")} & set(own)


def test_settings_that_nothing_reads_are_refused_and_those_of_a_users_part_are_not():
    check_known(compose(["estimator._target_=mine.Mine", "+estimator.alpha=0.5"]))
    with pytest.raises(InputError, match="windws: there is no such setting; did you mean"):
        check_known(compose(["+evaluation.windws=3"]))


@pytest.mark.parametrize("override", ["sedd=1", "seed=abc", "selection.query_block=many", "model=unheard_of"])
def test_misspelt_keys_and_wrong_types_are_refused(override):
    with pytest.raises(HydraException):
        compose([override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["estimator=streaming", "estimator.sinkz=3"], "estimator.sinkz: there is no such setting; did you mean estimator.sinks"),
        (["estimator.sinks=3"], "estimator.sinks: there is no such setting; Int8 takes none"),
        (["estimator=streaming", "estimator.sinks=many"], "estimator.sinks: Value 'many' of type 'str' could not be converted"),
        (["estimator=int8_fused", "estimator.grid=1"], "estimator.grid: there is no such setting"),  # built by a run
        (["+exp=table4", "study.retention=[0.2]"], "study.retention: there is no such setting; did you mean study.retentions?"),
        (["+exp=fig10", "study.chunk_tokens=few"], "study.chunk_tokens: Value 'few' of type 'str' could not be converted"),
    ],
)
def test_a_part_takes_what_its_class_takes(overrides, message):
    with pytest.raises(InputError) as refused:
        compose(overrides)
    assert message in str(refused.value)


def test_a_part_has_all_settings_of_its_class_with_their_defaults():
    config = compose(["estimator=streaming", "task=needle", "grid=quantile", "allocator=error_greedy", "model=hub"])
    assert config.estimator.sinks == 4
    assert config.task == {"_target_": config.task._target_, "documents": 20, "tokens": 1024, "depths": [0, 0.25, 0.5, 0.75, 1],
                           "seed": 0, "wording": "note", "chat": False}  # fmt: skip
    assert config.grid.quantiles == [0.25, 0.75, 1.0]
    assert set(config.allocator) == {"_target_", "measure"}
    assert config.model.id is None
    samples = compose(["+exp=model_checks", "study.samples.text_rows=3"]).study.samples
    assert (samples.text_rows, samples.needle_documents) == (3, 300)
    estimates = compose(["+exp=table4"]).study.estimates
    assert estimates["4 bits, dynamic"].bits == 4
    assert not estimates["4 bits, dynamic"].quality


def test_settings_are_those_of_the_source(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "settings_of_theirs.py").write_text(
        "from dataclasses import dataclass, field\nfrom typing import ClassVar\n\nimport never\nLEAST = 3\n\n"
        "@dataclass\nclass Base:\n    first: int = LEAST\n    second: 'str' = ''\n    needs: ClassVar[tuple] = ('model',)\n\n"
        "@dataclass\nclass Part(Base):\n    third: list[float] = field(default_factory=lambda: [0.5])\n"
        "    made: never.Thing | None = None\n    inner: int = field(default=0, init=False)\n\n"
        "class Plain:\n    def __init__(self, a: int, b: float | None, *, c: bool = True): ...\n\n"
        "def open_ended(a: int = 1, **options): ...\n"
    )
    names = [one.name for one in fields(settings_of("settings_of_theirs.Part").schema)]
    assert names == ["_target_", "first", "second", "third"]
    assert OmegaConf.structured(settings_of("settings_of_theirs.Part").schema).first == 3
    assert declared("settings_of_theirs.Part", "needs") == ("model",)
    plain = OmegaConf.structured(settings_of("settings_of_theirs.Plain").schema)
    assert OmegaConf.is_missing(plain, "a")
    assert (plain.b, plain.c) == (None, True)
    assert settings_of("settings_of_theirs.open_ended") is None
    assert settings_of("settings_of_theirs.Nothing") is None


@pytest.mark.parametrize("override", ["model=smollm2", "evaluation.windows=3", "+estimator@compare.x.estimator=oracle"])
def test_an_override_without_effect_is_refused(override):
    config = compose(["+exp=fig10"])
    with pytest.raises(InputError, match=r"fig10 does not use it; it uses retention$"):
        check_used(config, ["+exp=fig10", override], declared(config.study._target_, "needs"))
    check_used(config, ["retention=0.1", "study.device=mine.yaml", "threads=1"], ("retention",))


def test_compared_methods_select_as_the_main_one_does():
    config = compose(["+exp=quickstart", "selection=shared_32"])
    assert config.compare.oracle.selection.query_block == 32


def test_a_selection_set_for_one_method_is_of_no_other():
    config = composed(["+exp=compare_estimators", "compare.oracle.selection.query_block=32", "selection.sinks=4"])
    selections = [config.selection, config.compare.oracle.selection, config.compare.sale.selection]
    assert [(one.query_block, one.sinks) for one in selections] == [(1, 4), (32, 4), (1, 4)]


@pytest.mark.parametrize(("group", "name"), PARTS)
def test_a_part_is_one_short_file(group, name):
    """A class and three settings besides comments; groups without a class hold values only."""
    lines = [line for line in (CONF / group / f"{name}.yaml").read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) <= 4 or not lines[0].startswith("_target_") or name in ("random_layer", "retrieval_kv_lengths")


AWKWARD = """
from dataclasses import dataclass, field
from typing import Literal, Optional
import math
import streams as st
from streams import Base

SIZE: int = 8

@dataclass
class Inner:
    depth: int = 1

@dataclass
class Given:
    inner: Inner = field(default_factory=lambda: Inner(depth=7))

@dataclass
class A:
    page: int = 4

@dataclass
class B:
    page: int = 8

@dataclass
class Two(A, B):
    pass

class OwnInit(Base):
    def __init__(self, page: int = 8):
        self.page = page

@dataclass
class Fixed(Base):
    sinks: int = field(default=3, init=False)

@dataclass
class ByModule(st.Base):
    page: int = 4 * 8
    size: int = SIZE
    most: float = math.inf

@dataclass
class Typed:
    quoted: "int" = 8
    maybe: Optional[int] = None
    never: int = None
    one_of: Literal["a", "b"] = "a"
    both: int | list[int] = 3

def plain(page=8): ...
"""


@pytest.mark.parametrize(
    ("name", "settings", "others"),
    [
        ("Given", {}, ("inner",)),  # only running it tells the default: it is not passed unless it is set
        ("Two", {"page": 4}, ()),
        ("OwnInit", {"page": 8}, ()),
        ("Fixed", {}, ()),
        ("ByModule", {"sinks": 5, "size": 8}, ("page", "most")),
        ("Typed", {"quoted": 8, "maybe": None, "never": None, "one_of": "a", "both": 3}, ()),
        ("plain", {"page": 8}, ()),
    ],
)
def test_awkward_parts_are_read_as_python_reads_them(name, settings, others, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "streams.py").write_text("from dataclasses import dataclass\n\n@dataclass\nclass Base:\n    sinks: int = 5\n")
    (tmp_path / "awkward.py").write_text(AWKWARD)
    for cached in (settings_of, definition):
        cached.cache_clear()
    found = settings_of(f"awkward.{name}")
    assert found.others == others
    shown = OmegaConf.to_container(OmegaConf.structured(found.schema))
    assert {key: value for key, value in shown.items() if key != "_target_"} == settings
    config = compose([f"estimator._target_=awkward.{name}", *([f"estimator.{others[0]}=9"] if others else [])])
    built = build(config.estimator)
    if others:
        assert getattr(built, others[0]) == 9
    if name != "plain":
        assert {key: getattr(built, key) for key in settings} == settings


def test_further_configuration_is_printed_too(tmp_path, monkeypatch, capsys):
    (tmp_path / "estimator").mkdir()
    (tmp_path / "estimator" / "mine.yaml").write_text("_target_: shadowattn.online.estimators.streaming.Streaming\nsinks: 9\n")
    for options in (["--cfg", "job"], ["--help"]):
        monkeypatch.setattr(sys, "argv", ["run", "--config-dir", str(tmp_path), "estimator=mine", *options])
        experiments.run.main()
        assert "sinks: 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "shadowattn"),
        (["estimator=int8_fused"], "shadowattn"),
        (["estimator=oracle"], "oracle"),
        (["estimator=quantised", "estimator.bits=4"], "quantised"),
        (["estimator=oracle", "method=mine"], "mine"),
    ],
)
def test_a_method_without_a_name_is_called_by_its_estimator(overrides, name):
    config = compose(overrides)
    assert Lab(config, ("method", "estimator", "selection", "allocator")).main.name == name


def test_a_method_is_called_by_the_class_of_its_estimator_wherever_that_is_imported_from(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(
        "from shadowattn.online.estimators.int8_fused import Int8Fused\n\nclass Coarse(Int8Fused):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for target, name in (("mine.Int8Fused", "shadowattn"), ("mine.Coarse", "mine.Coarse")):
        config = compose([f"estimator._target_={target}"])
        assert Lab(config, ("method", "estimator", "selection", "allocator")).main.name == name


def test_parts_of_others_share_no_name_with_ours_or_each_other():
    ours = ["shadowattn.online.estimators.oracle.Oracle", "shadowattn.offline.allocators.uniform.Uniform"]
    others = ["oracle.A", "oracle.B", "mine.oracle.A", "shadowattn_mine.oracle.A"]
    names = [part_name(OmegaConf.create({"_target_": target})) for target in (*ours, *others)]
    assert names == ["oracle", "uniform", *others]


def test_a_setting_below_a_single_value_is_refused_in_our_words():
    message = "Error merging override device.nope=1 Cannot convert 'dict' to string: '{}' full_key: device object_type=Config"
    assert answer(message, ["device.nope=1"]) == (
        "device.nope: there is no such setting; device is a single value, set device=VALUE"
    )
