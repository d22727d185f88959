"""What a study may ask for, and what it may not."""

import json
from dataclasses import dataclass
from importlib.metadata import version

import pytest

from experiments.compose import choices, composed
from experiments.lab import Lab
from experiments.part_building import build, by_content
from experiments.part_settings import complete, declared
from experiments.refusals import check
from shadowattn.errors import InputError
from shadowattn.graphs.npu.compiler import MANIFEST, compiler_folder
from shadowattn.online.simulation.description import load_device, save_device
from tests.evaluation.test_harness import write_tasks


@dataclass
class Outer:
    inner: object
    several: dict


def lab(*needs: str, overrides=()) -> Lab:
    config = composed(list(overrides))
    complete(config)
    return Lab(config, needs)


def test_what_a_study_did_not_name_is_not_to_be_had():
    assert lab("retention").of("retention") == 0.2
    with pytest.raises(RuntimeError, match="uses 'seed' and does not name it"):
        lab("retention").of("seed")
    with pytest.raises(RuntimeError, match="uses 'model'"):
        lab("retention").loaded  # noqa: B018


def test_a_hash_holds_what_the_study_needs_and_nothing_else():
    first = lab("retention", "seed").config_hash({})
    assert lab("retention", "seed", overrides=["evaluation.windows=3", "model=random"]).config_hash({}) == first
    assert lab("retention", "seed", overrides=["seed=1"]).config_hash({}) != first
    assert lab("retention", "seed", overrides=["threads=1", "paths.results=x", "reuse=any"]).config_hash({}) == first
    assert lab("retention", "seed").config_hash({"device": "other"}) != first


def test_a_row_says_none_of_what_is_not_used():
    made = lab("retention")
    made.folder = made.root / "runs" / "x" / "0123"
    row = made.row()
    assert (row.model, row.data, row.kernel, row.config_hash) == ("none", "none", "none", "0123")


def test_parts_are_built_with_those_within_them():
    inner = {"_target_": "shadowattn.online.estimators.streaming.Streaming", "sinks": 7}
    assert build(inner).sinks == 7
    outer = {"_target_": "tests.experiments.test_lab.Outer", "inner": inner, "several": {"a": [inner]}}
    built = build(outer)
    assert built.inner == built.several["a"][0] == build(inner)
    with pytest.raises(InputError, match="expected a value of shape, got none"):
        build({"_target_": "shadowattn.models.load_random", "shape": "???"})
    with pytest.raises(InputError, match="could not be built"):
        build({"_target_": "shadowattn.models.load_random", "form": "x"})


@pytest.mark.parametrize("setting", ["path", "activation_scales", "profile", "template", "intents", "examples"])
def test_files_count_by_their_content(setting, tmp_path):
    (tmp_path / "a").write_text("1")
    first = by_content({"part": {setting: str(tmp_path / "a")}, "list": [1]})
    (tmp_path / "b").write_text("1")
    assert by_content({"part": {setting: str(tmp_path / "b")}, "list": [1]}) == first
    (tmp_path / "a").write_text("2")
    assert by_content({"part": {setting: str(tmp_path / "a")}, "list": [1]}) != first
    assert by_content({"path": "no file", "profile": ["a"]}) == {"path": "no file", "profile": ["a"]}  # somebody's own settings


def test_a_device_counts_by_what_its_description_holds(tmp_path):
    """Two files of one content are one run; where they lie is of no matter."""
    made = []
    for name in ("x", "y"):
        path = save_device(load_device("snapdragon_8_gen_3"), tmp_path / f"{name}.yaml")
        config = composed(["+exp=fig15", f"study.device={path}"])
        complete(config)
        study = build(config.study)
        made.append(Lab(config, study.needs).config_hash(study.inputs()))
    assert made[0] == made[1]


def test_times_depend_on_the_number_of_threads():
    hashes = set()
    for threads in (1, 2):
        config = composed(["+exp=npu_selfcheck", f"threads={threads}"])
        complete(config)
        hashes.add(Lab(config, build(config.study).needs).config_hash({}))
    assert len(hashes) == 2


@pytest.mark.parametrize("name", choices()["exp"])
def test_no_check_of_an_experiment_asks_for_what_its_study_did_not_name(name, tmp_path, monkeypatch):
    """With the settings of importance that ask for most; where the experiment's model or tasks have to be fetched, with
    the bundled one and windows that fit it, with tasks of local files, and as if the NPU's compiler, openvino-genai and llama.cpp
    were set up and the processor multiplied in bfloat16.
    """
    for study in ("blocks", "roofline"):
        monkeypatch.setattr(f"experiments.studies.{study}.multiplies_in_bfloat16", lambda: True)
    chosen = composed([f"+exp={name}"])
    needs = declared(chosen.study._target_, "needs")
    most = [one for one in ("importance=racing", "allocator=waterfill") if one.partition("=")[0] in needs]
    most += ["model=bundled", "evaluation.context_tokens=1024"] if chosen.model.get("source") == "fetched" else []
    if chosen.study._target_.endswith("LmEval"):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
        most += [f"study.include_path={write_tasks(tmp_path)}", "study.tasks=[choice]"]
    if chosen.study._target_.endswith("NpuCompile"):
        monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
        (compiler_folder() / "app").mkdir(parents=True)
        wine = compiler_folder() / "wine" / "usr" / "lib" / "wine" / "wine64"
        wine.parent.mkdir(parents=True)
        wine.touch()
        (compiler_folder() / MANIFEST).write_text(json.dumps({"openvino": version("openvino")}))
    if name in ("ttft_all", "ttft_chunks", "ttft_peers", "ttft_shapes"):
        for package in ("openvino_genai", "llama_cpp"):
            monkeypatch.setattr(f"experiments.studies.prefill_runners._{package}", lambda: None)
        # The first keys and the last piece are more of so short a prompt than a tri-shape's share.
        most += ["study.prompts=[512]", "evaluation.context_tokens=1024"]
        most += [f"~study.runners.{one}" for one in chosen.study.runners if "trishape" in one]
    most += ["prompt=def"] if "prompt" in needs else []
    config = composed([f"+exp={name}", *most])
    complete(config)
    study = build(config.study)
    made = Lab(config, study.needs)
    study.check(made)
    check(made)
    assert made.config_hash(study.inputs())
