"""What `estimator=int8` is in a run: said, written down, and never another thing than asked for."""

import json
import shutil

import pandas as pd
import pytest
from hydra.utils import get_class
from omegaconf import OmegaConf

from experiments.compose import CONF, composed
from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.part_settings import complete
from experiments.studies.attention_candidates import LOOKED
from shadowattn.devices import EstimateDevice, find_estimate_device
from shadowattn.kernels import native
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.tiny import tiny_model

__all__ = ["run", "tiny_folder"]  # fixtures
NEEDS = ("model", "method", "estimator", "allocator", "selection", "compare", "graphs", "grid", "device", "pipeline")
needs_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")


def lab_of(*overrides: str, needs=NEEDS) -> Lab:
    config = composed(list(overrides))
    complete(config)
    return Lab(config, needs)


@needs_kernels
@pytest.mark.parametrize(
    ("overrides", "name", "why"),
    [
        ([], "int8_fused", "int8 is int8_fused here: CPU, no NPU among OpenVINO's devices (CPU)"),
        (["device=cpu"], "int8_fused", "int8 is int8_fused here: CPU, asked for"),
        (["selection=device"], "int8_graph", "int8 is int8_graph here: selection.place=device takes graphs"),
        (["pipeline=grouped"], "int8_graph", "int8 is int8_graph here: pipeline=grouped takes graphs"),
        (["pipeline=overlap"], "int8_fused", "int8 is int8_fused here: CPU, no NPU among OpenVINO's devices (CPU)"),
        (["grid.pattern=cross"], "int8_graph", "int8 is int8_graph here: grid.pattern=cross takes graphs"),
        (["graphs.inputs=unit"], "int8_graph", "int8 is int8_graph here: graphs.inputs=unit takes graphs"),
        (["graphs.output=fixed_output"], "int8_graph", "int8 is int8_graph here: graphs.output=fixed_output takes graphs"),
        (["graphs.lookup=log"], "int8_graph", "int8 is int8_graph here: graphs.lookup=log takes graphs"),
        (["graphs.launch_heads=[1]"], "int8_fused", "int8 is int8_fused here: CPU, no NPU among OpenVINO's devices (CPU)"),
        (["estimator=int8_graph"], "int8_graph", ""),
        (["estimator=int8_fused"], "int8_fused", ""),
        (["estimator=oracle", "selection=device"], "oracle", ""),
    ],
)
def test_which_serves_and_why(overrides, name, why):
    lab = lab_of(*overrides)
    assert (part_name(lab.main.estimator), lab.int8) == (name, [why] if why else [])
    assert get_class(lab.main.estimator._target_) is lab.main.estimator_class


def test_an_npu_takes_graphs(monkeypatch):
    monkeypatch.setattr("experiments.lab.find_estimate_device", lambda *_: EstimateDevice("NPU", "listed by OpenVINO"))
    lab = lab_of()
    assert (part_name(lab.main.estimator), lab.int8) == ("int8_graph", ["int8 is int8_graph here: NPU, listed by OpenVINO"])


def test_without_native_kernels_graphs_serve(monkeypatch):
    monkeypatch.setattr(native, "library", lambda: None)
    assert lab_of().int8 == ["int8 is int8_graph here: the native kernels were not built"]


@needs_kernels
def test_a_study_without_a_device_for_graphs_takes_none():
    (why,) = lab_of(needs=("method", "estimator", "allocator", "selection")).int8
    assert why == "int8 is int8_fused here: the study takes no device for graphs"


@needs_kernels
def test_it_serves_every_method_and_those_around_another():
    overrides = ["estimator=top_p", "estimator.estimator._target_=shadowattn.online.estimators.int8.Int8"]
    overrides += ["+estimator@compare.ours.estimator=int8", "+allocator@compare.ours.allocator=uniform"]
    overrides += ["+estimator@compare.cells.estimator=int8", "+allocator@compare.cells.allocator=uniform"]
    lab = lab_of(*overrides, "compare.cells.selection.place=device")
    assert {name: part_name(one.estimator) for name, one in lab.methods.items()} == {
        "top_p": "top_p",
        "ours": "int8_fused",
        "cells": "int8_graph",
    }
    assert part_name(lab.main.within.estimator) == "int8_fused"
    assert len(lab.int8) == 2


@needs_kernels
def test_a_run_says_it_and_its_rows_and_record_too(run, capsys):
    small = ["allocator=uniform", "retention=0.5", "evaluation.windows=2"]
    folders = [run(name, *small, f"experiment={name}", f"estimator={name}") for name in ("int8", "int8_graph")]
    printed = "".join(capsys.readouterr())
    why = "int8 is int8_fused here: CPU, no NPU among OpenVINO's devices (CPU)"
    assert printed.count(why) == 1
    native_rows, graph_rows = (pd.read_parquet(folder / "rows.parquet") for folder in folders)
    records = [json.loads((folder / "meta.json").read_text()) for folder in folders]
    assert [record.get("int8") for record in records] == [[why], None]
    ours, theirs = (rows[(rows.method == "shadowattn") & (rows.metric == "loss_increase")] for rows in (native_rows, graph_rows))
    assert (ours.estimator.item(), ours.estimate_device.item()) == ("int8_fused", "none")
    assert (theirs.estimator.item(), theirs.estimate_device.item()) == ("int8_graph", find_estimate_device("cpu").label)
    assert ours.value.item() == pytest.approx(theirs.value.item(), abs=1e-5)  # the same keys
    clipped = [rows.value[rows.metric == "clipped_heads"].item() for rows in (native_rows, graph_rows)]
    assert clipped[0] == clipped[1] > 0


@needs_kernels
def test_a_model_that_the_native_kernels_do_not_serve_is_refused_before_any_work(run, tiny_folder, tmp_path, capsys):
    shutil.copytree(tiny_folder, tmp_path / "odd")
    tiny_model(family="llama", kv_heads=1, head_dim=20).save_pretrained(tmp_path / "odd")
    with pytest.raises(SystemExit):
        run("odd", "experiment=odd", f"model.path={tmp_path / 'odd'}")
    assert "multiple of 8 up to 256, got torch.float32 and 20; use estimator=int8_graph" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_the_native_kernels_their_estimate_is_refused_by_name_whatever_attends(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(SystemExit):
        run("unbuilt", "experiment=unbuilt", "estimator=int8_fused", "kernel=torch")
    error = capsys.readouterr().err
    assert "shadowattn: estimator=int8_fused" in error
    assert "or use estimator=int8_graph" in error
    assert "kernel=torch" not in error
    assert not (tmp_path / "runs").exists()


@needs_kernels
def test_heads_are_spared_a_first_look_by_what_calibration_text_says(run, tmp_path):
    few = ["estimator=hierarchical", "allocator=uniform", "retention=0.2", "evaluation.windows=2", "estimator.block_rows=8"]
    folder = run("spared", "experiment=spared", *few, "estimator.flat_share=0.5")
    measured = [path for path in (tmp_path / "artifacts").iterdir() if path.name.startswith("first_look")]
    assert len(measured) == 1
    lost = json.loads((measured[0] / "result.json").read_text())["lost"]
    assert [len(of_layer) for of_layer in lost] == [4, 4]
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.estimator[rows.method == "hierarchical"]) == {"hierarchical"}
    whole = run("all", "experiment=all", *few, "estimator.flat_share=0")
    losses = [_loss(pd.read_parquet(one / "rows.parquet")) for one in (folder, whole)]
    assert losses[0] != losses[1]  # the heads' losses reached the estimator
    assert len([path for path in (tmp_path / "artifacts").iterdir() if path.name.startswith("first_look")]) == 1


def _loss(rows: pd.DataFrame) -> float:
    return rows.value[(rows.method == "hierarchical") & (rows.metric == "loss")].item()


def test_without_the_native_kernels_what_needs_them_within_another_is_named(run, monkeypatch, capsys):
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(SystemExit):
        run("unbuilt", "experiment=unbuilt", "estimator=top_p")
    error = capsys.readouterr().err
    assert "estimator=int8_fused: its estimate runs on the native kernels" in error
    assert "or use another estimator within top_p" in error


def test_speed_is_measured_with_the_settings_of_the_yaml():
    part = OmegaConf.load(CONF / "estimator" / "hierarchical.yaml")
    assert {name: part[name] for name in LOOKED} == LOOKED
    assert set(part) == {"_target_", *LOOKED}
