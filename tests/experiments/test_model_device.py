"""`model.device=cuda`: experiments on a GPU, pretended where there is none, and what is refused before a model is loaded."""

import json
import re
import sys

import pandas as pd
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from transformers import AutoModelForCausalLM

import experiments.run
from tests.elsewhere import HAS_GPU, elsewhere
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures

GPU = torch.cuda.get_device_name(0) if HAS_GPU else "Pretended GPU"
FUSED = ["estimator=int8_fused", "graphs.chunk_tokens=32", "evaluation.windows=2"]


@pytest.fixture
def gpu(monkeypatch):
    """A machine with one GPU; what was copied from it and to it."""
    if not HAS_GPU:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: GPU)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 40, 1 << 40))  # bytes: free, and all
    with elsewhere() as copies:
        yield copies


def both(run, name: str, *arguments: str) -> list[pd.DataFrame]:
    """The rows of an experiment with the model on the CPU, by the torch kernels, and on the GPU."""
    read = []
    for where in ("cpu", "gpu"):
        device = ["kernel=torch"] if where == "cpu" else ["model.device=cuda"]
        folder = run(f"{name}_{where}", *arguments, f"experiment={name}_{where}", *device)
        read.append(pd.read_parquet(folder / "rows.parquet"))
    on = json.loads((folder / "meta.json").read_text())
    assert on["model"]["device"] == on["machine"]["gpu"] == GPU
    assert set(read[0].model_device) == {"cpu"}
    assert set(read[1].model_device) == {GPU}
    assert set(read[1].kernel) == {"torch"}
    return read


def assert_alike(cpu: pd.DataFrame, gpu: pd.DataFrame, metrics: list[str], **tolerance) -> None:
    keys = ["method", "retention", "metric", "query_block", "layer", "head"]
    cpu, gpu = (rows[rows.metric.isin(metrics)].set_index(keys).value for rows in (cpu, gpu))
    assert set(cpu.index.get_level_values("metric")) == set(metrics)
    pd.testing.assert_series_equal(cpu, gpu, **tolerance)


def test_every_kind_of_method_is_measured_on_the_gpu(gpu, run):
    methods = [
        *("+estimator@compare.oracle.estimator=oracle", "+allocator@compare.oracle.allocator=error_greedy"),
        "compare.oracle.allocator.measure=error",  # a pretended tensor has no backward pass, which the divergence takes
        *("+estimator@compare.random.estimator=random", "+allocator@compare.random.allocator=uniform"),
        *("+estimator@compare.streaming.estimator=streaming", "+allocator@compare.streaming.allocator=uniform"),
    ]
    short = ["sensitivity.window_tokens=64", "sensitivity.windows=1", "sensitivity.retentions=[0.2,0.6]"]
    pair = both(run, "quality", *FUSED, *methods, *short, "retentions=[0.3]", "key_offset=mean")
    fidelity = ["mass_recall", "topk_overlap", "output_error", "kl_divergence"]
    assert_alike(*pair, ["loss", "density", "mean_retention", *fidelity], rtol=1e-3)
    assert {"npu_full", "oracle", "random", "streaming", "shadowattn", "dense"} == set(pair[1].method)
    assert max(gpu.down) < 9000  # a sample of a weight, for the fingerprint; keys and logits are larger


def test_a_gpu_without_room_for_dense_logits_is_refused(gpu, run, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 40))
    with pytest.raises(SystemExit):
        run("default", *FUSED, "model.device=cuda", "evaluation.divergence_windows=2")
    assert f"evaluation.divergence_windows: the logits of 2 windows take 9.83e-05 GB, and {GPU} has" in capsys.readouterr().err


def test_recall_and_shared_lists_are_measured_on_the_gpu(gpu, run):
    estimates = "study.estimates={static: {quality: true}, dynamic: {dynamic: true, bits: 4, smooth: true, quality: true}, "
    estimates += "int8: {output: target_requant}, nncf: {nncf: true}}"
    recall = ["study._target_=experiments.studies.recall.Recall", estimates, "study.nncf_samples=0", "study.quality_windows=2"]
    pair = both(run, "recall", *recall, *FUSED[1:])
    assert_alike(*pair, ["recall"], rtol=1e-2)
    assert_alike(*pair, ["loss_increase"], atol=1e-3)
    assert set(pair[1].method) == {"static", "dynamic", "int8", "npu_full"}
    blocks = ["study._target_=experiments.studies.query_block.QueryBlock", "study.query_blocks=[8]", "study.rounds=1"]
    blocks += ["study.block_scores=[leading_query,max]", "method=per_row", "retention=0.3"]
    pair = both(run, "blocks", *blocks, *FUSED)
    assert_alike(*pair, ["loss", "density"], rtol=1e-3)
    assert "chunk_time" not in set(pair[1].metric)


def test_budgets_of_rows_are_measured_on_the_gpu(gpu, run):
    short = ["evaluation.windows=2", "evaluation.context_tokens=64", "graphs.chunk_tokens=32", "retentions=[0.3]"]
    short += ["sensitivity.window_tokens=64", "sensitivity.windows=1", "sensitivity.retentions=[0.2,0.6]"]
    short += ["compare.error_greedy.allocator.measure=error"]  # a pretended tensor has no backward pass
    pair = both(run, "budgets", "+exp=study_top_p", *short)
    assert_alike(*pair, ["loss", "density", "output_error"], rtol=1e-3)


SHORT = ["evaluation.context_tokens=48", "graphs.chunk_tokens=32", "importance.windows=1", "importance.window_tokens=24"]


@pytest.mark.parametrize(
    ("experiment", "arguments"),
    [
        (
            "offline",
            [
                "compare.error_greedy.allocator.measure=loss",
                *FUSED[:1],
                *SHORT,
                "retentions=[0.3]",
                "sensitivity.window_tokens=24",
                "sensitivity.retentions=[0.5]",
            ],
        ),
        ("racing", ["allocator=waterfill", "importance.windows=3", "importance.race.first=2", "study.orders=2"]),
        ("study_outliers", [*SHORT[:2], "study.calibration_windows=1", "study.calibration_tokens=[24]"]),
    ],
)
def test_what_calibration_finds_is_studied_on_the_gpu(experiment, arguments, gpu, run):
    folder = run(experiment, f"+exp={experiment}", "model.device=cuda", *arguments)
    assert set(pd.read_parquet(folder / "rows.parquet").model_device) == {GPU}
    assert max(gpu.down) < 9000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["model.device=gpu"], "model.device: expected cpu, cuda or cuda:NUMBER, got 'gpu'"),
        (["model.device=cuda:1"], "expected a GPU of cuda:0 … cuda:0"),
        (
            ["model.device=cuda", "estimator=int8_graph"],
            "shadowattn: estimator=int8_graph runs OpenVINO's graphs .* use int8_fused",
        ),
        (
            ["model.device=cuda", "grid.pattern=cross"],
            "shadowattn: int8 is int8_graph here: grid.pattern=cross takes graphs, and graphs read the CPU's memory",
        ),
        (["model.device=cuda", "device=npu"], "device=npu: its graphs read the CPU's memory"),
        (["model.device=cuda", "selection=device"], "shadowattn: selection=device selects in OpenVINO's graphs"),
        (["model.device=cuda", "kernel=native", *FUSED], "kernel=native: reads the CPU's memory"),
        (["model.device=cuda", "pipeline=overlap", *FUSED], "pipeline=overlap: .* use pipeline=batched"),
        (["model.device=cuda", "importance.linear=onednn", *FUSED], "importance.linear=onednn: multiplies on the CPU"),
        (["model.device=cuda", "+exp=table4"], "study.estimates: 'NNCF, 1 bucket' .* study.nncf_samples=0"),
        (["model.device=cuda", "+exp=fig9"], "fig9 times or builds what runs on the CPU alone"),
        (["model.device=cuda", "+exp=graphs"], "graphs times or builds what runs on the CPU alone"),
    ],
    ids=str,
)
def test_what_runs_on_the_cpu_alone_is_refused_before_the_model_is_loaded(arguments, message, gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *args, **options: pytest.fail("loaded"))
    monkeypatch.setattr(sys, "argv", ["run", f"paths.results={tmp_path / 'results'}", *arguments])
    with pytest.raises(SystemExit):
        experiments.run.main()
    GlobalHydra.instance().clear()
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "results").exists()
