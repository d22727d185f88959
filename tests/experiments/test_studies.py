"""The studies of the estimate and of the pipeline from the command line, on a tiny model."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from omegaconf import OmegaConf

from experiments.asked import Asked
from experiments.publish import read_reference
from experiments.studies import graph_banks, pipeline_speed, query_block, validate_simulator
from experiments.studies.answers import AnswerRow, _change_rows, means
from experiments.studies.schedulers import schedulers
from experiments.studies.self_check import _check_import, whole_cases
from experiments.studies.self_check_report import Checked, report
from experiments.studies.validate_simulator import MODES, ValidateSimulator
from shadowattn import device_check, graph_check
from shadowattn.devices import Capability
from shadowattn.energy import energy_source
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.questions import ExactMatch
from shadowattn.graphs import GraphBank, GraphShape
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.executor import Threads
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.selection import Rule
from shadowattn.online.simulation.description import load_device, save_device
from shadowattn.online.simulation.device import Number
from shadowattn.reporting.figures.retrieval import draw as draw_retrieval
from shadowattn.reporting.verdicts import gains
from shadowattn.types import RetentionProfile, ScaleGrid
from tests.experiments.test_pipeline import LITTLE, run
from tests.experiments.test_run import tiny_folder
from tests.graphs.npu.test_blobs import StandIn
from tests.reporting.test_reporting import rows as some_rows

__all__ = ["run", "tiny_folder"]  # fixtures


RECALL = "study._target_=experiments.studies.recall.Recall"


def rows_of(folder: Path) -> pd.DataFrame:
    return pd.read_parquet(folder / "rows.parquet")


def test_recall_of_every_kind_of_estimate(run):
    folder = run("table4", "+exp=table4", "graphs.chunk_tokens=32", "evaluation.windows=1")
    rows = rows_of(folder)
    recalls = rows[(rows.metric == "recall") & (rows.retention == 0.2) & (rows.granularity == "row")].set_index("method").value
    assert len(recalls) == 16
    assert recalls["dynamic scales"] > recalls["4 bits, dynamic"] > 0.2
    offsets = rows.drop_duplicates("method").set_index("method").key_offset
    assert offsets["static, 9 buckets"] == offsets["NNCF, 1 bucket"] == "none"
    assert offsets["static, 9 buckets, less mean K"] == offsets["4 bits, 9 buckets, less mean K"] == "mean"
    assert offsets["static, 9 buckets, less midrange of K"] == "midrange"
    heads = rows[(rows.metric == "head_recall") & (rows.method == "dynamic scales")]
    assert heads[heads.granularity == "row"].groupby("retention").size().unique().tolist() == [2 * 4]
    assert (folder / "recall.png").is_file()
    ranked = rows[rows.metric.isin(["recall", "head_recall"])]
    assert set(ranked.sampled) == {32}
    assert set(ranked.chunk) == {32}
    assert set(ranked.n) == {32 * (ranked.context_tokens.iloc[0] // 32)}


def test_nncfs_graph_estimates_in_a_model(run):
    folder = run(
        "default", "estimator=nncf", "allocator=uniform", "retention=0.5", "graphs.chunk_tokens=32", "graphs.nncf_samples=4"
    )
    rows = rows_of(folder).set_index(["method", "metric"]).value
    assert 0.9 < rows["nncf", "topk_overlap"] < 1
    assert rows["nncf", "loss"] != rows["dense", "loss"]


@pytest.mark.parametrize("inner", ["oracle.Oracle", "int8_fused.Int8Fused"])
def test_top_p_keeps_the_budget_in_the_mean(run, inner, capsys):
    around = f"estimator.estimator._target_=shadowattn.online.estimators.{inner}"
    rows = rows_of(run("default", "estimator=top_p", around, "allocator=uniform", "retention=0.3", "key_offset=mean"))
    assert "top-p: the share that keeps 0.3 of the keys" in capsys.readouterr().err
    assert rows[rows.metric == "density"].value.item() == pytest.approx(0.3, rel=0.1)
    assert rows[rows.metric == "topk_overlap"].value.item() > 0.8  # of an exact top-k of as many keys a row


def test_generated_tokens_are_compared_with_dense_ones(run):
    how = ["estimator=oracle", "allocator=uniform", "retention=0.1", "evaluation.generated_tokens=8"]
    rows = rows_of(run("default", *how, "evaluation.windows=3", "evaluation.fidelity_windows=2"))
    values, n = (rows.set_index(["method", "metric"])[column] for column in ("value", "n"))
    assert values["oracle", "first_divergent_token"] * 2 in range(17)
    assert values["oracle", "divergent_tokens"] * 16 in range(17)
    assert n["oracle", "divergent_tokens"] == 16  # tokens
    assert n["oracle", "first_divergent_token"] == n["oracle", "first_divergent_token_min"] == 2  # prompts
    ends = [values["oracle", f"divergent_tokens{end}"] for end in ("_min", "", "_max")]
    assert ends == sorted(ends)
    assert values["npu_full", "divergent_tokens"] <= 1


def test_divergences_of_several_windows_have_an_interval(run):
    how = ["estimator=oracle", "allocator=uniform", "retention=0.1", "evaluation.windows=3"]
    rows = rows_of(run("default", *how, "evaluation.fidelity_windows=2"))
    for method in ("oracle", "npu_full"):
        values = rows[rows.method == method].set_index("metric").value
        low, high = values.kl_divergence_low, values.kl_divergence_high
        assert low < values.kl_divergence < high
        assert (low + high) / 2 == pytest.approx(values.kl_divergence)
        # Student's t at one degree of freedom.
        assert high - values.kl_divergence == pytest.approx(12.706 * values.kl_divergence_error, rel=1e-3)
    assert set(rows[rows.metric.str.startswith("kl_divergence_")].n) == {2}
    one = rows_of(run("one", *how, "evaluation.fidelity_windows=1", "experiment=one"))
    assert not one.metric.str.startswith("kl_divergence_").any()


@pytest.mark.parametrize("experiment", ["study_outliers", "study_look_ahead"])
def test_windows_for_divergence_are_refused_where_none_is_measured(run, capsys, experiment):
    with pytest.raises(SystemExit):
        run(experiment, f"+exp={experiment}", "evaluation.divergence_windows=1")
    assert f"evaluation.divergence_windows: {experiment} measures no divergence from dense" in capsys.readouterr().err


@pytest.mark.parametrize(("fidelity", "divergence"), [(1, 3), (3, 2), (0, 3)])
def test_divergences_of_other_windows_than_fidelitys(run, fidelity, divergence):
    """Which windows are measured for what changes no value: only what is averaged over, and whether methods are compared."""
    how = ["estimator=oracle", "allocator=uniform", "retention=0.1", "evaluation.windows=4"]
    asked = [f"evaluation.fidelity_windows={fidelity}", f"evaluation.divergence_windows={divergence}"]
    rows = rows_of(run("default", *how, *asked)).set_index(["method", "metric"])
    plain = rows_of(run("plain", *how, f"evaluation.fidelity_windows={divergence}", "experiment=plain"))
    plain = plain.set_index(["method", "metric"])
    for method in ("oracle", "npu_full"):
        same = ["loss", "loss_increase_error", "kl_divergence", "kl_divergence_low", "kl_divergence_error"]
        for metric in same:
            assert rows.value[method, metric] == pytest.approx(plain.value[method, metric], rel=1e-9), metric
            assert rows.n[method, metric] == plain.n[method, metric]
        assert rows.n[method, "kl_divergence"] == divergence * rows.context_tokens[method, "kl_divergence"]
        assert ((method, "output_error") in rows.index) == bool(fidelity)
    gain = rows.value["oracle", "closer_than_npu_full"]
    assert gain == pytest.approx(rows.value["npu_full", "kl_divergence"] - rows.value["oracle", "kl_divergence"])
    assert rows.n["oracle", "closer_than_npu_full"] == divergence
    assert not any(metric.startswith("closer_than_") for _, metric in plain.index)


def test_a_disk_without_room_for_dense_logits_is_refused_by_the_settings_name(run, monkeypatch, capsys):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(total=9, used=9, free=0))
    with pytest.raises(SystemExit):
        run("default", "estimator=oracle", "allocator=uniform", "evaluation.fidelity_windows=2", "evaluation.windows=2")
    assert "evaluation.fidelity_windows: the logits of 2 windows take" in capsys.readouterr().err


def test_buckets_and_their_quality(run):
    few = "study.estimates={one: {steps: 0, quality: true}, nine: {quality: true, lookup: log}, cross: {pattern: cross}, "
    few += "rough: {dynamic: true, bits: 2, quality: true}}"
    windows = ["evaluation.windows=2", "study.quality_windows=3", "study.reference=nine"]
    rows = rows_of(run("recall", RECALL, "experiment=recall", "graphs.chunk_tokens=32", few, *windows))
    buckets = rows.set_index("method").buckets.to_dict()
    assert buckets == {"one": 1, "nine": 9, "cross": 5, "rough": 0, "npu_full": 0}
    losses = rows[rows.metric == "loss_increase"].set_index("method")
    assert set(losses.index) == {"one", "nine", "rough", "npu_full"}
    assert losses.retention["npu_full"] == 1
    assert "npu_full" not in set(rows[rows.metric == "recall"].method)  # it ranks no key
    assert set(losses.n) == {3}  # windows, and not those of the recall
    recalls = rows[rows.metric == "recall"]
    means = recalls.groupby("method").value.mean()
    assert means["rough"] < means["nine"] - 0.1
    assert set(recalls.n) == {2 * 32 * (recalls.context_tokens.iloc[0] // 32)}  # rows of two windows, all in chunks of 32
    gain = rows[rows.metric == "gain_over_nine"]
    assert gain.method.tolist() == ["one", "rough", "npu_full"]
    for method, value in zip(gain.method, gain.value, strict=True):
        assert value == pytest.approx(losses.value["nine"] - losses.value[method])


def test_an_estimate_without_a_key_offset_of_its_own_takes_the_runs(run):
    few = "study.estimates={runs: {}, mean: {key_offset: mean}, none: {key_offset: none}, dynamic: {dynamic: true}, "
    few += "int8: {output: target_requant, quality: true}}"
    how = ["experiment=recall", "graphs.chunk_tokens=32", "evaluation.windows=1", "study.quality_windows=1", "key_offset=mean"]
    rows = rows_of(run("recall", RECALL, few, *how))
    first = rows.drop_duplicates("method").set_index("method").key_offset
    assert first.to_dict() == {
        "runs": "mean",
        "mean": "mean",
        "none": "none",
        "dynamic": "mean",
        "int8": "mean",
        "npu_full": "none",
    }
    heads = rows[(rows.metric == "head_recall") & (rows.granularity == "row")].groupby("method").value.apply(list)
    assert heads["runs"] == heads["mean"] != heads["none"]
    assert set(rows[rows.metric == "loss_increase"].method) == {"int8", "npu_full"}


def test_losses_are_compared_with_an_estimate_that_has_one(run, capsys):
    few = "study.estimates={one: {quality: true}, nine: {}}"
    with pytest.raises(SystemExit):
        run("recall", RECALL, "experiment=recall", few, "study.reference=nine")
    assert "study.reference: expected one of the estimates with quality=true (one), got 'nine'" in capsys.readouterr().err


def test_an_estimates_divergence_is_that_of_a_method_with_it(run):
    few = "study.estimates={plain: {quality: true}, mean: {key_offset: mean, quality: true}}"
    how = ["graphs.chunk_tokens=32", "retention=0.1", "evaluation.fidelity_windows=1"]
    asked = [RECALL, few, *how, "evaluation.windows=1", "study.quality_windows=2"]  # fewer windows rank keys
    rows = rows_of(run("recall", *asked, "evaluation.divergence_windows=2", "experiment=recall"))
    rows = rows[rows.granularity == ""].set_index(["method", "metric"])
    for method, offset in (("plain", "none"), ("mean", "mean")):
        same = [
            "estimator=int8_graph",
            "allocator=uniform",
            f"key_offset={offset}",
            "evaluation.divergence_windows=2",
            "evaluation.windows=2",
        ]
        plain = rows_of(run(offset, *how, *same, f"experiment={offset}"))
        plain = plain[plain.method == "shadowattn"].set_index("metric")
        for metric in ("loss_increase", "kl_divergence", "kl_divergence_error", "worst_head_mass", "mass_recall", "output_error"):
            assert rows.value[method, metric] == pytest.approx(plain.value[metric], rel=1e-4), metric
            assert rows.unit[method, metric] == plain.unit[metric]
            assert rows.n[method, metric] == plain.n[metric] or metric == "loss_increase"
    closer = rows.value["mean", "closer_than_plain"]
    assert closer == pytest.approx(rows.value["plain", "kl_divergence"] - rows.value["mean", "kl_divergence"])
    assert rows.n["mean", "closer_than_plain"] == 2
    assert rows.value["npu_full", "kl_divergence"] > 0
    assert not rows_of(run("alone", *asked, "experiment=alone")).metric.str.startswith(("kl_", "closer_")).any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            ["study.estimates={plain: {quality: true}}", "evaluation.generated_tokens=4"],
            "recall generates nothing, got 4; leave it",
        ),
        (["study.estimates={plain: {}}"], "got 1, and no estimate is put into the model; set quality=true of one of"),
        (
            ["study.estimates={plain: {quality: true}}", "study.quality_windows=1", "evaluation.divergence_windows=2"],
            "evaluation.divergence_windows: expected at most study.quality_windows=1, got 2",
        ),
    ],
)
def test_divergences_of_estimates_that_are_not_measured_are_refused(run, capsys, settings, message):
    with pytest.raises(SystemExit):
        run("recall", RECALL, "experiment=recall", "evaluation.windows=2", "evaluation.divergence_windows=1", *settings)
    assert message in capsys.readouterr().err


def compared(name: str, estimator: str, allocator: str) -> list[str]:
    """Arguments that add a method to a study."""
    return [f"+estimator@compare.{name}.estimator={estimator}", f"+allocator@compare.{name}.allocator={allocator}"]


def test_allocators_are_compared_with_those_that_measure_no_head(run):
    folder = run(
        *(
            "allocators",
            "study._target_=experiments.studies.allocators.Allocators",
            "experiment=allocators",
            "method=waterfill",
            "allocator=waterfill",
        ),
        "retentions=[0.6,1.0]",
        *compared("uniform", "int8", "uniform"),
        *compared("artifact", "int8", "artifact"),
        *compared("first_layer_dense", "int8", "first_layers_dense"),
        *compared("random", "random", "uniform"),
        "++compare.first_layer_dense.allocator.layers=1",
    )
    rows = rows_of(folder)
    pairs = {(row.method, row.metric) for row in rows[rows.metric.str.endswith("_p")].itertuples()}
    heads = ("waterfill", "artifact")
    expected = {(name, f"gain_over_{rival}_p") for name in heads for rival in ("uniform", "first_layer_dense")}
    assert pairs == expected | {("first_layer_dense", "gain_over_uniform_p")}  # once, and not random keys
    assert set(rows[rows.metric.str.endswith("_p")].retention) == {0.6}  # at 1 nothing can differ
    assert (rows[(rows.method == "random") & (rows.metric == "perplexity")].retention == [0.6, 1.0]).all()


def test_blocks_are_compared_where_their_densities_are_equal(run, capsys):
    few = ["study.query_blocks=[8]", "study.block_scores=[leading_query,max]", "study.rounds=2"]
    how = ["experiment=blocks", "method=per_row", "estimator=int8_fused", "retention=0.3", "evaluation.windows=2"]
    folder = run("blocks", "study._target_=experiments.studies.query_block.QueryBlock", *how, *few)
    rows = rows_of(folder)
    densities = rows[rows.metric == "sparse_density"].set_index("method").value
    corrected = rows[rows.metric.str.endswith("_p")]
    pairs = [(row.method, row.metric.removeprefix("gain_over_").removesuffix("_p")) for row in corrected.itertuples()]
    assert pairs == [("leading_query_8", "per_row"), ("max_8", "per_row"), ("max_8", "leading_query_8")]
    for (own, rival), flag in zip(pairs, corrected.flag, strict=True):
        excess = densities[own] / densities[rival] - 1
        assert flag == (f"density {excess:+.1%}" if abs(excess) > 0.01 else "")
    assert "density" in capsys.readouterr().out
    assert (folder / "query_block.png").is_file()


def test_blocks_at_several_retentions_say_which_stay_within_the_tolerance(run, capsys):
    few = ["study.query_blocks=[2,8]", "study.block_scores=[probability]", "study.rounds=2", "study.tolerance=0.5"]
    few += ["study.without_own=[probability]"]
    how = ["experiment=blocks", "method=per_row", "estimator=int8_fused", "retentions=[0.3,0.6,1.0]", "evaluation.windows=2"]
    folder = run("blocks", "study._target_=experiments.studies.query_block.QueryBlock", *how, *few)
    rows = rows_of(folder)
    compared = rows[rows.metric == "gain_over_per_row_p"]
    assert set(compared.retention) == {0.3, 0.6}
    alone = {"probability_2_without_own", "probability_8_without_own"}
    assert set(compared.method) == {"probability_2", "probability_8"} | alone
    assert set(rows[rows.method.isin(alone)].estimator) == {"without_own_keys"}
    assert {f"gain_over_{name}_p" for name in alone} <= set(rows.metric)
    assert rows[rows.metric == "chunk_time"].groupby("retention").size().to_dict() == {0.3: 4, 0.6: 4, 1.0: 4}
    assert {path.stem for path in folder.glob("*.png")} == {"sharing_loss", "query_block_0.3", "query_block_0.6"}
    assert "largest block within 0.5 nat of per-row lists" in capsys.readouterr().out


def test_densities_are_flagged_beyond_one_percent():
    cells = {("even", 0.2): 0.2, ("near", 0.2): 0.2019, ("more", 0.2): 0.225, ("less", 0.2): 0.185}
    measured = [SimpleNamespace(method=m, retention=r, metric="density", value=v) for (m, r), v in cells.items()]
    pairs = [(cell, ("even", 0.2)) for cell in list(cells)[1:]]
    flags = query_block.density_flags(measured, pairs)
    assert {own[0]: flag for (own, _), flag in flags.items()} == {"more": "density +12.5%", "less": "density -7.5%"}


@pytest.mark.parametrize(
    ("estimate", "message"),
    [
        ("{bad: {output: int4}}", "output: expected one of float, target_requant"),
        ("{bad: {lookup: cosine}}", "lookup: expected one of raw, log"),
        ("{bad: {bits: 1}}", "bits: expected an integer of 2 … 8"),
        ("{bad: {sigma: 1}}", "sigma above 0 and not 1"),
        ("{bad: {dynamic: true, output: target_requant}}", "output: target_requant needs 8 bits, a grid and no smoothing"),
        ("{bad: {smooth: true, output: fixed_output}}", "output: fixed_output needs 8 bits"),
        ("{bad: {key_offset: median}}", "key_offset: expected one of null, none, mean, midrange, got 'median'"),
        ("{bad: {nncf: true, key_offset: mean}}", "key_offset: NNCF's graph takes keys as they are, got mean"),
    ],
)
def test_estimates_that_make_no_sense_are_refused(run, capsys, estimate, message):
    with pytest.raises(SystemExit):
        run("recall", RECALL, "experiment=recall", f"study.estimates={estimate}", "graphs.chunk_tokens=32")
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("retentions", ["[]", "[0]", "[0.2,1.5]"])
def test_recall_at_impossible_retentions_is_refused(run, capsys, retentions):
    with pytest.raises(SystemExit):
        run("recall", RECALL, "experiment=recall", "study.estimates={one: {}}", f"study.retentions={retentions}")
    assert "study.retentions: expected at least one, above 0 and at most 1" in capsys.readouterr().err


def test_estimates_of_similar_names_are_not_mistaken_for_one_another(run):
    estimates = "study.estimates={two a: {dynamic: true}, two_a: {dynamic: true, bits: 2}}"
    rows = rows_of(run("recall", RECALL, "experiment=recall", estimates, "graphs.chunk_tokens=32"))
    first, second = rows[rows.metric == "recall"].groupby("method").value.mean()
    assert first > second + 0.05


def test_losses_of_octaves_add_up_to_the_loss(run):
    rows = rows_of(run("default", "estimator=oracle", "allocator=uniform", "retention=0.1", "evaluation.windows=2"))
    for method in ("oracle", "npu_full"):
        own = rows[rows.method == method]
        octaves = own[own.metric == "octave_loss_increase"].set_index("octave").value
        whole = own[own.metric == "loss_increase"]
        ends = [*octaves.index[1:], whole.context_tokens.item()]
        counts = [end - first for first, end in zip(octaves.index, ends, strict=True)]
        assert sum(counts) == whole.context_tokens.item() - 1
        assert sum(octaves * counts) / sum(counts) == pytest.approx(whole.value.item(), abs=1e-9)
        assert (own[own.metric == "octave_loss_increase_error"].octave.tolist()) == octaves.index.tolist()


# The fewest and the most keys of a row that sees more: three blocks of 16 keys, of which one may end at the row, hold 33 to 48.
@pytest.mark.parametrize(("selection", "least", "most"), [("per_row", 20, 20), ("device", 20, 20), ("device_blocks", 33, 48)])
def test_a_least_budget_is_kept_wherever_the_selection_is_made(run, selection, least, most):
    how = [f"selection={selection}", "selection.min_budget=20", "allocator=uniform", "retention=0.01", "estimator=int8_graph"]
    rows = rows_of(run("default", *how, "evaluation.windows=2"))
    own = rows[(rows.metric == "density") & (rows.method == "shadowattn")]
    tokens = own.context_tokens.item()
    low, high = (sum(min(kept, seen) for seen in range(1, tokens + 1)) / (tokens * (tokens + 1) / 2) for kept in (least, most))
    assert own.min_budget.item() == 20
    assert low - 1e-9 <= own.value.item() <= high + 1e-9


def test_graphs_that_select_serve_a_profile_without_sparse_heads(run):
    rows = rows_of(run("default", "experiment=default", "selection=device", "retention=1", "allocator=uniform"))
    own = rows[(rows.metric == "loss_increase") & (rows.method == "shadowattn")]
    assert abs(own.value.item()) < 1e-6


@pytest.mark.parametrize(
    ("part", "has_bank"),
    [
        ("estimator=int8", False),
        ("estimator=int8_graph", True),
        ("estimator=int8_fused", False),
        ("estimator._target_=shadowattn.online.estimators.quantised.Quantised", False),
        ("selection=device", True),
        ("graphs.output=target_requant", True),
    ],
)
def test_a_run_with_a_key_offset(run, tmp_path, part, has_bank):
    """Every stage that it changes is another one, and what is built carries it."""
    how = ["allocator=uniform", "retention=0.5", "full.npu_full.key_offset=midrange", part]
    folder = run("default", "experiment=default", "key_offset=mean", *how)
    rows = rows_of(folder)
    assert rows[rows.metric == "loss_increase"].value.abs().max() < 1
    stages = sorted(path.name.split("-")[0] for path in (tmp_path / "artifacts").glob("*-*") if path.is_dir())
    assert stages.count("key_offset") == 2
    assert stages.count("scales") == stages.count("attention_ranges") == 1
    saved = [GraphBank.load(folder) for folder in (tmp_path / "artifacts").glob("bank-????????????")]
    assert bool(saved) == has_bank
    assert all(bank.key_offset.how == "mean" for bank in saved)


def test_the_bank_is_measured(run, monkeypatch):
    """In this process, and a small one: a process for each phase of each model takes a minute."""
    recipes = []
    monkeypatch.setattr(graph_banks, "in_own_process", lambda phase, recipe, *of: recipes.append(recipe) or phase(recipe, *of))
    few = ["study.bank_shapes=[qwen2_0_5b]", "study.bank_keys=[32,64,128]", "study.calls=20", "study.times=1"]
    few += ["study.form_shapes=[qwen2_0_5b]", "study.form_keys=256", "study.form_rounds=2", "study.rows=32"]
    folder = run("graphs", "+exp=graphs", *few)
    rows = rows_of(folder)
    values = rows[rows.method == "qwen2_0_5b"].set_index("metric").value
    assert values["graphs"] == 54
    assert min(values["load_s"], values["build_and_compile_s"], values["openvino_cache_s"]) > 0
    assert values["infer_us"] < values["call_us"]
    own = rows[rows.method == "this run"].set_index("metric").value
    described = recipes[0].bank()
    assert len(described) == own["graphs"] == len(described.pairs) * len(described.shapes)
    waste = rows[rows.metric == "waste"].pivot(index="shapes", columns="method", values="value")
    assert (waste["planned"] <= waste.min(axis=1) + 1e-12).all()
    assert (folder / "graphs.png").is_file()


def test_a_self_check_without_an_npu_says_so(run, monkeypatch):
    monkeypatch.setattr("experiments.studies.self_check.CASES", {"smallest": device_check.CASES["smallest"]})
    folder = run("npu_selfcheck", "+exp=npu_selfcheck")
    report = (folder / "report.md").read_text()
    assert "no NPU was checked" in report
    assert "Not verified" in report
    assert set(rows_of(folder).estimate_device) == {"CPU"}


class StandInCompiler(StandIn):
    def __enter__(self):
        return self

    def __exit__(self, *_):
        assert self.platforms == ["4000"]


def test_a_self_check_without_the_compiler_says_what_sets_it_up(monkeypatch, tmp_path):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    (outcome,) = _check_import("NPU")
    assert "set it up with: make npu-compile" in outcome.error
    assert _check_import("GPU") == []


def test_an_import_that_cannot_be_tried_is_one_line_of_the_report(monkeypatch):
    study = "experiments.studies.self_check"
    monkeypatch.setattr(f"{study}.device_architecture", lambda name: "6000")

    class Refuses(StandInCompiler):
        def __exit__(self, *_):
            pass

        def compile(self, model, platform, blob):
            raise InputError(f"expected another platform than {platform}")

    monkeypatch.setattr(f"{study}.NpuCompiler", Refuses)
    (outcome,) = _check_import("NPU")
    assert outcome.error == "expected another platform than 6000"


def test_the_verdict_is_of_every_form_and_graph():
    """Not of the small graph that a device was first tried with."""
    npu = Capability("NPU", "a stand-in", "1.0", ("INT8",), "")
    right = device_check.Outcome("smallest", compile_s=1.0, median_ms=1.0, p95_ms=1.0, steps_off=0, exact=1.0, recall=1.0)
    forms = [right, device_check.Outcome("int8", error="no"), replace(right, case="static", recall=0.3)]
    whole = [graph_check.GraphOutcome("block", "", 1.0, 1.0, 1.0, 0.01), graph_check.GraphOutcome("attention", "", 1, 1, 1, 0.5)]
    text = report([npu], {"NPU": Checked(forms, whole, "4000")})
    assert "Verdict: on NPU 2 of 5 graphs ran and were right; **failed**: int8; **wrong**: static, attention." in text


def test_a_self_check_of_an_npu_holds_its_times_against_the_predictions(run, monkeypatch):
    """The CPU stands in for an NPU 4000, with a few of the graphs."""
    study = "experiments.studies.self_check"
    npu = Capability("NPU", "a stand-in", "1.0", ("INT8",), "")
    few = {name: device_check.CASES[name] for name in ("static", "int8, float16 scores", "int8, group folded")}
    sizes = [case for case in whole_cases() if case.part in ("rows", "layout") and case.shape.rows <= 128]
    monkeypatch.setattr(f"{study}.CASES", few)
    monkeypatch.setattr(f"{study}.survey", lambda: [npu])
    monkeypatch.setattr(f"{study}.whole_cases", lambda: sizes)
    monkeypatch.setattr(f"{study}.device_architecture", lambda name: "4000")
    monkeypatch.setattr(f"{study}.check_device", lambda name, cases, progress: device_check.check_device("CPU", cases))
    monkeypatch.setattr(f"{study}.check_graphs", lambda name, graphs, progress=iter: graph_check.check_graphs("CPU", graphs))
    monkeypatch.setattr(f"{study}.NpuCompiler", StandInCompiler)
    folder = run("npu_selfcheck", "+exp=npu_selfcheck")
    text = (folder / "report.md").read_text()
    assert f"Verdict: on NPU {len(few) + len(sizes) + 1} of {len(few) + len(sizes) + 1} graphs ran and were right." in text
    assert "## NPU: whole graphs" in text
    assert "| layout: int8 in, float16 out, 4 heads × 128 × 1024, D 64 |" in text.split("## NPU: measured against predicted")[1]
    assert "| compiled ahead and imported: int8 in, float16 out | 0." in text
    differences = rows_of(folder).query("metric == 'difference'")
    assert len(differences) == len(sizes) + 1
    assert differences.value.max() < 0.01


def test_schedulers_are_held_to_the_optimum(run):
    few = ["study.works=2", "study.limit_s=0.5", "study.heads=[4,16]", *LITTLE]
    folder = run("study_schedulers", "+exp=study_schedulers", *few)
    rows = rows_of(folder)
    gaps = rows[rows.metric == "gap_median"]
    assert (gaps.value >= -1e-9).all()
    assert set(gaps.method) == {"sequential", "fifo", "greedy", "greedy_guarded", "johnson", "local_search", "optimal"}
    assert set(rows[rows.metric == "planning_time"].measured) == {"measured"}
    assert set(gaps.measured) == {"simulated"}


BACKWARDS = """from dataclasses import dataclass

from shadowattn.online.plan import Plan, Work


@dataclass(frozen=True)
class Backwards:
    machines: int = 3

    def plan(self, work: Work) -> Plan:
        return Plan(tuple(range(len(work.launches)))[::-1], tuple(range(len(work.select_us)))[::-1])
"""


def test_a_scheduler_of_ones_own_is_held_to_the_optimum(run, tmp_path, monkeypatch):
    (tmp_path / "backwards.py").write_text(BACKWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    few = ["study.works=2", "study.limit_s=0.5", "study.heads=[16]", *LITTLE]
    folder = run("study_schedulers", "+exp=study_schedulers", "scheduler._target_=backwards.Backwards", *few)
    rows = rows_of(folder)
    assert {"backwards.Backwards", "fifo", "optimal"} < set(rows.method)
    worst = rows[(rows.metric == "gap_worst") & (rows.costs == "random")].groupby("method").value.max()
    assert worst["backwards.Backwards"] > worst["local_search"]


def test_the_chosen_scheduler_has_its_settings_and_the_machines_of_the_works():
    chosen = OmegaConf.create({"_target_": "shadowattn.online.schedulers.local_search.LocalSearch", "machines": 3, "limit_us": 9})
    candidates = schedulers(chosen, 2)
    assert list(candidates) == ["fifo", "greedy", "greedy_guarded", "johnson", "local_search", "sequential"]
    assert (candidates["local_search"].machines, candidates["local_search"].limit_us) == (2, 9)
    assert candidates["greedy_guarded"].machines == 2


def slow_down_later_passes(monkeypatch) -> None:
    """Every pass after the first: the same times as in the first, three times as long, of the profile and of the calls."""
    study, first = validate_simulator.ValidateSimulator, {}
    points, times = study._points, study._call_times

    def slower_points(self, profiler, lengths, name):
        if name not in first:
            first[name] = points(self, profiler, lengths, name)
            return first[name]
        return [point | {key: 3 * point[key] for key in ("mean_us", "median_us", "p95_us")} for point in first[name]]

    def slower_times(self, *of):
        if "calls" not in first:
            first["calls"] = times(self, *of)
            return first["calls"]
        return {key: [3 * time for time in took] for key, took in first["calls"].items()}

    monkeypatch.setattr(study, "_points", slower_points)
    monkeypatch.setattr(study, "_call_times", slower_times)


def test_the_simulator_is_held_to_the_products_own_pipeline(run, monkeypatch, capsys):
    pipelines, profilers = set(), []
    call, make = validate_simulator._call, validate_simulator.make_profiler
    monkeypatch.setattr(validate_simulator, "_call", lambda p, *of: (pipelines.add((p.mode, p.threads)), call(p, *of)))
    monkeypatch.setattr(validate_simulator, "make_profiler", lambda *of: profilers.append(make(*of)) or profilers[-1])
    slow_down_later_passes(monkeypatch)
    small = ["graphs.chunk_tokens=16", "graphs.limit=27", "study.retentions=[0.1,0.6]", "study.passes=2", "study.rounds=2"]
    small += ["study.repeats=1", "study.fit_chunks=2", "study.held_out_chunks=4"]
    folder = run("validate_simulator", "+exp=validate_simulator", *small)
    rows = rows_of(folder)
    assert pipelines == {(mode, Threads()) for mode in MODES}
    assert [one.threads for one in profilers] == [Threads(), Threads(1, 1, 1)]
    assert [one.pool is None for one in profilers] == [True, False]
    errors = rows[rows.metric == "error"]
    assert set(errors["mode"]) == {"serial", "overlap", "grouped", "planned"}
    assert set(errors.by) == {"profile", "device"}  # nothing is held to a sum of its own spans
    assert set(errors.measured) == {"simulated"}
    turns = rows[rows.metric == "turn_error"]
    assert set(turns.turn) == {0, 1}
    for (mode, by), of in turns.groupby(["mode", "by"]):  # the same mean, over passes of chunks and over chunks of passes
        chunks = errors[(errors["mode"] == mode) & (errors.by == by) & (errors.flag == "")]
        assert of.value.mean() == pytest.approx(chunks.value.mean())
        if mode == "serial":  # which no contention enters: the machine's speed cancels, pass by pass
            assert of.value.iloc[1] == pytest.approx(of.value.iloc[0], rel=1e-6)
    assert (rows[(rows.metric == "makespan")].value > 0).all()
    assert set(rows[rows.metric == "uncertainty"]["mode"]) == set(MODES)
    assert (rows[(rows.metric == "ratio_to_batched") & (rows["mode"] == "batched")].value == 1).all()
    assert rows[(rows.metric == "error") & (rows.flag == "")].case.nunique() == 4
    assert (rows[rows.metric == "bucket_switches"].value > 0.3).all()
    assert (folder / "validate_simulator.png").is_file()
    fitted = load_device(str(folder / "device.yaml"))
    assert (fitted.cores.kind, fitted.wakeup_latency_us.kind) == ("fitted", "fitted")
    here = f"study.device={folder / 'device.yaml'}"
    assert here in capsys.readouterr().err
    scale = rows_of(run("study_scale", "+exp=study_scale", here))
    assert set(scale.method) == {"NPU-Full", "ours", "ours, 32-row blocks"}  # nothing is known of dense attention there
    with pytest.raises(SystemExit):
        run("fig10", "+exp=fig10", here)
    assert "expected a description with dense_ns" in capsys.readouterr().err


def test_held_out_chunks_are_none_that_the_profile_was_measured_on():
    profile = RetentionProfile(((0.2,) * 4,), ScaleGrid((0.01, 0.02, 0.04), (0.01, 0.02, 0.04)), 16, "", "", "")
    bank = GraphBank.build(profile, (GraphShape(1, 16, 16, 2048),))
    probe = LatencyProfiler(4, 2, 16, 16, torch.float32, Int8Graph(bank), Rule(), TorchKernels(), Threads(1, 1, 1))
    lengths = probe.key_lengths(2048)
    study = ValidateSimulator(retentions=[0.1, 0.6])
    cases = study.draw_cases(probe, lengths, seed=0)
    assert sum(case.held_out for case in cases) == 12
    assert not {case.keys for case in cases} & set(lengths)
    assert len({case.keys for case in cases}) == len(cases) == 18
    assert sum(len(set(case.pairs)) > 1 for case in cases) > 12
    with pytest.raises(
        InputError, match=r"expected 18 lengths that the profile has no point at, got 3; .* larger evaluation.context_tokens"
    ):
        study.draw_cases(probe, [16, 32], seed=0)


def test_an_interval_is_of_the_mean_over_passes():
    assert validate_simulator._half_width([5.0] * 4) == 0
    assert validate_simulator._half_width([1.0, 2.0, 3.0]) == pytest.approx(4.303 / 3**0.5, rel=1e-3)


@pytest.mark.parametrize("name", ["fig10", "fig15", "table8"])
def test_simulated_figures_are_marked_as_such(run, name):
    folder = run(name, f"+exp={name}")
    rows = rows_of(folder)
    assert set(rows.measured) == {"simulated"}
    assert (rows.value > 0).all()
    assert (folder / f"{name}.png").is_file()
    if name != "fig15":
        known = rows[rows.published.notna()]
        assert len(known) == (20 if name == "table8" else 3)


@pytest.mark.parametrize("other", ["retention=0.1", "study.chunk_tokens=64", "study.device=intel_core_ultra_7_155h"])
@pytest.mark.parametrize("name", ["fig10", "table8"])
def test_published_values_stand_beside_what_was_published_only(run, capsys, name, other):
    folder = run(name, f"+exp={name}", other)
    rows = rows_of(folder)
    assert rows.published.isna().all()
    assert "fitted to this value" not in set(rows.flag)
    borrowed = name == "table8" and "device" in other
    assert (rows.flag == "at the powers of Snapdragon 8 Gen 2").all() == borrowed
    assert ("simulated J at the powers of Snapdragon 8 Gen 2" in " ".join(capsys.readouterr().out.split())) == borrowed
    assert (folder / f"{name}.png").is_file()


def test_an_edited_description_is_simulated_anew(run, tmp_path):
    path = save_device(load_device("snapdragon_8_gen_3"), tmp_path / "mine.yaml")
    command = ("fig15", "+exp=fig15", f"study.device={path}")
    before = run(*command)
    moved = before.rename(tmp_path / "before")
    save_device(replace(load_device(str(path)), launch_us=Number(5e4, "assumed", "test")), path)
    after = run(*command)
    assert after.name != before.name
    ours = [of[of.method == "ours"].value.to_numpy() for of in map(rows_of, (moved, after))]
    assert (ours[1] > ours[0]).all()


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("study.device=iphone", "expected one of intel_core_ultra_7_155h, intel_npu_3720"),
        ("study.device=snapdragon_8_gen_2", "knows one kind of core"),
    ],
)
def test_simulations_that_cannot_be_are_refused(run, capsys, argument, message):
    with pytest.raises(SystemExit):
        run("fig15", "+exp=fig15", argument)
    assert message in capsys.readouterr().err


def test_numbers_that_are_missing_stay_numbers(tmp_path):
    (tmp_path / "rows.csv").write_text("value,sigma,flag\n1.5,,\n")
    rows = read_reference(tmp_path / "rows.csv")
    assert rows.sigma.isna().all()
    assert rows.flag.tolist() == [""]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["graphs.inputs=dynamic"], "graphs.inputs: expected one of auto, static, unit, runtime, int8"),
        (["graphs.output=int4"], "graphs.output: expected one of float, target_requant, fixed_output"),
        (["graphs.inputs=int8", "graphs.output=target_requant"], "needs a key offset, without which 256 steps do not tell"),
        (["graphs.shapes=best"], "graphs.shapes: expected one of planned, powers"),
        (["graphs.lookup=cosine"], "graphs.lookup: expected one of raw, log"),
        (["key_offset=median"], "key_offset: expected one of none, mean, midrange, got 'median'"),
        (["full.npu_full.key_offset=given"], "full.npu_full.key_offset: expected one of none, mean, midrange, got 'given'"),
        (["graphs.compile_threads=0"], "graphs.compile_threads: expected at least 1"),
        (
            ["estimator=int8_graph", "graphs.limit=5"],
            "graphs.limit: a single shape takes 1 × 9 graphs, launch sizes × buckets, got a limit of 5",
        ),
        (["selection=device", "estimator=oracle"], "expected estimator=int8_graph, whose graphs select, got oracle"),
        (["selection=device", "selection.query_block=32"], "use block_score=max, or selection=per_row"),
        (["selection=device", "decode=shared"], "graphs that select return none; use decode=dense"),
        (["selection.key_block=16"], "needs selection.place=device"),
        (["grid.pattern=cross", "estimator=int8_fused"], "needs grid.pattern=product, got cross"),
        (["device=gpu"], "no GPU among OpenVINO's devices"),
    ],
)
def test_wrong_options_of_graphs_are_refused(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run("default", "experiment=default", *arguments)
    assert message in capsys.readouterr().err


def test_every_figure_of_a_model_counts_what_it_is_a_mean_of(run):
    few = {"repeat_rows": 2, "block_tokens": 16, "text_rows": 2, "text_tokens": 128, "key_value_documents": 3}
    few |= {"key_value_pairs": 4, "needle_documents": 4, "needle_tokens": 160}
    settings = [f"study.samples.{name}={value}" for name, value in few.items()]
    folder = run("model_checks", "+exp=model_checks", "evaluation.windows=3", "importance.windows=2", *settings)
    rows = rows_of(folder).drop_duplicates("metric").set_index("metric")
    assert rows.n["key_value_accuracy"] == rows.n["key_value_accuracy_low"] == 3
    assert rows.n["needle_accuracy"] == 4
    assert rows.n["copy_gain"] == 2
    assert rows.n["context_gain"] == rows.n["loss_at_0"] == 2
    assert rows.n["random_loss_increase"] == rows.n["oracle_loss_increase"] == 3  # windows
    assert rows.value["random_loss_increase_low"] <= rows.value["random_loss_increase"]
    assert {path.name for path in folder.glob("*.png")} == {"importance.png", "loss_by_position.png"}


def test_modes_of_the_pipeline_are_timed_side_by_side(run):
    few = ["study.shapes=[qwen2-0.5b]", "study.keys=[256]", "study.rows=32", "study.rounds=2", "study.repeats=1"]
    folder = run("pipeline_speed", "+exp=pipeline_speed", *few)
    rows = rows_of(folder)
    times = rows[rows.metric == "time"].set_index("method")
    modes = {"batched", "serial", "overlap", "overlap, all cores each", "grouped", "planned"}
    assert set(times.index) == {f"int8_graph {mode}" for mode in modes} | {
        f"int8_fused {mode}" for mode in ("batched", "serial", "overlap")
    }
    assert set(times.scheduler) == {"", "local_search"}
    assert times.scheduler["int8_graph planned"] == "local_search"
    assert (times.low <= times.value).all()
    assert (times.value <= times.high).all()
    faster = rows[rows.metric == "times_faster_than_batched"].set_index("method").value
    assert faster["int8_graph batched"] == faster["int8_fused batched"] == 1
    assert (folder / "pipeline_speed.png").is_file()
    assert set(rows.energy_source) == {energy_source()}
    assert ("energy" in set(rows.metric)) == (energy_source() == "rapl")


def test_energy_of_a_mode_is_a_row_where_the_machine_counts_it(run, monkeypatch):
    monkeypatch.setattr(pipeline_speed, "energy_source", lambda: "rapl")
    monkeypatch.setattr(pipeline_speed, "joules", lambda call, seconds: call() or seconds / 4)
    few = ["study.shapes=[qwen2-0.5b]", "study.keys=[256]", "study.rows=32", "study.rounds=2", "study.repeats=1"]
    rows = rows_of(run("pipeline_speed", "+exp=pipeline_speed", *few))
    energy = rows[rows.metric == "energy"]
    assert len(energy) == len(rows[rows.metric == "time"])
    assert set(zip(energy.value, energy.unit, energy.energy_source, strict=True)) == {(0.5, "J", "rapl")}


def test_attention_in_int8_stands_in_every_quality_table(run, capsys):
    further = "+full_attention@full.qkv=npu_full", "full.qkv.scores=false", "full.qkv.probabilities=float"
    folder = run("whole", "experiment=whole", "retentions=[0.3,0.6,1.0]", "evaluation.windows=2", *further)
    rows = rows_of(folder)
    whole = rows[rows.allocator == "all"]
    assert set(whole[whole.metric == "loss"].method) == {"npu_full", "qkv"}
    assert set(whole.retention) == {1.0}
    errors = whole[whole.metric == "output_error"].set_index("method").value
    assert 0 < errors["qkv"] < errors["npu_full"]
    divergences = rows[rows.metric == "kl_divergence"].set_index(["method", "retention"])
    assert set(divergences.unit) == {"nat"}
    assert (divergences.value > 0)[[("npu_full", 1.0), ("qkv", 1.0), ("shadowattn", 0.3)]].all()
    assert divergences.value["shadowattn", 1.0] == pytest.approx(0, abs=1e-6)
    gains = rows[rows.metric == "gain_over_npu_full"]
    assert gains[["method", "retention"]].to_numpy().tolist() == [["shadowattn", 0.3], ["shadowattn", 0.6]]
    losses = rows[rows.metric == "loss"].set_index(["method", "retention"]).value
    assert gains.value.iloc[0] == pytest.approx(losses["npu_full", 1.0] - losses["shadowattn", 0.3])
    assert "npu_full" in capsys.readouterr().out
    assert run("whole", "experiment=whole", "retentions=[0.3,0.6,1.0]", "evaluation.windows=2", *further) == folder


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("+full_attention@full.dense=npu_full",), "full: 'dense' is another method's name"),
        (("full.npu_full.probabilities=int4",), "probabilities: expected one of linear, log2, float"),
        (("full.npu_full.probability=log2",), "full.npu_full.probability: there is no such setting; did you mean"),
    ],
)
def test_whole_attention_that_makes_no_sense_is_refused(run, capsys, given, message):
    with pytest.raises(SystemExit):
        run("whole", "experiment=whole", *given)
    assert message in capsys.readouterr().err


def test_outliers_of_every_head(run):
    few = ["evaluation.windows=1", "study.calibration_windows=1", "study.calibration_tokens=[16,64]", "study.loss_windows=2"]
    folder = run("study_outliers", "+exp=study_outliers", *few)
    rows = rows_of(folder)
    heads = rows[(rows.metric == "output_error") & (rows.layer >= 0)].groupby("method").size()
    assert set(heads) == {2 * 4}
    shorter = {f"npu_full, calibrated at {tokens} tokens" for tokens in (16, 64)}
    assert {"npu_full", "npu_full, both", "qkv, offset", "npu_full_log2", "npu_full_per_head", *shorter} <= set(heads.index)
    assert (folder / "study_outliers.png").is_file()
    increases = rows[rows.metric == "loss_increase"].set_index("method").value
    assert set(increases.index) == {"qkv", "npu_full", "qkv, equalised", "npu_full, equalised"}
    assert increases["npu_full"] != increases["npu_full, equalised"]
    found = gains(rows)
    assert dict(zip(found.method, found.rival, strict=True)) == {"qkv, equalised": "qkv", "npu_full, equalised": "npu_full"}
    for one in found.itertuples():
        assert one.gain == pytest.approx(increases[one.rival] - increases[one.method], abs=1e-6)
    shares = rows[rows.metric == "small_share"]
    assert len(shares) == 2 * 4
    assert shares.value.between(0, 1).all()


@pytest.mark.parametrize(
    ("lengths", "message"), [("[16,16]", "expected every length once"), ("[4096]", "expected prompts shorter than")]
)
def test_calibration_lengths_that_make_no_sense_are_refused(run, capsys, lengths, message):
    with pytest.raises(SystemExit):
        run("study_outliers", "+exp=study_outliers", f"study.calibration_tokens={lengths}", "evaluation.windows=1")
    assert f"study.calibration_tokens: {message}" in capsys.readouterr().err


SHORT_TASKS = [
    "study.lengths=[96]",
    "study.tasks.needle.wording=note",
    "study.tasks.records.pairs=1",
    "study.tasks.records.documents=2",
]
SHORT_TASKS += ["study.tasks.copy.words=2", "study.tasks.copy.lead=1", "study.tasks.copy.shots=0", "study.tasks.copy.documents=2"]
SHORT_TASKS += ["study.tasks.needle.documents=2", "allocator=uniform"]


def test_retrieval_is_measured_with_dense_attention_and_then_with_every_method(run):
    folder = run("study_retrieval", "+exp=study_retrieval", *SHORT_TASKS, "study.least=0", "retentions=[0.1,0.2]")
    legend = draw_retrieval(means(rows_of(folder))).legends[0]
    assert {"dense", "npu_full"} < {text.get_text() for text in legend.get_texts()}
    assert (folder / "needle_depths.png").is_file()
    rows = rows_of(folder)
    assert set(rows.metric) == {"accuracy", "accuracy_change", "accuracy_change_p", "accuracy_at_depth", "density"}
    densities = rows[rows.metric == "density"].set_index("method").value.sort_index()
    assert (densities["npu_full"] == 1).all()
    assert densities["shadowattn"].between(0.1, 0.35).all()
    assert set(rows[rows.metric == "accuracy_change"].method) == set(rows.method) - {"dense"}
    depths = rows[rows.metric == "accuracy_at_depth"]
    assert (set(depths.task), set(depths.depth), set(depths.n)) == ({"needle"}, {0.0, 0.25}, {1})
    rows = rows[rows.metric == "accuracy"]
    tasks = {("needle", 96), ("records", 96), ("copy", 96)}
    for (method, _), of in rows.groupby(["method", "retention"]):
        assert set(zip(of.task, of.tokens, strict=True)) == tasks, method
    assert set(rows.method) == {"dense", "npu_full", "shadowattn", "int8_uniform", "oracle", "streaming"}
    assert ((rows.low <= rows.value) & (rows.value <= rows.high) & (rows.low < rows.high)).all()
    assert (rows.n == 2).all()


def test_retrieval_asks_the_tasks_that_are_named(run):
    tasks = ["+task@study.tasks.chains=multihop", "study.tasks.chains.hops=1", "study.tasks.chains.documents=2"]
    less = ["~study.tasks.copy", "~study.tasks.records", "study.lengths=[480]", "study.least=1"]
    settings = [one for one in SHORT_TASKS if not one.startswith(("study.tasks.copy", "study.tasks.records", "study.lengths"))]
    rows = rows_of(run("study_retrieval", "+exp=study_retrieval", *settings, *tasks, *less))
    assert set(rows.task) == {"needle", "chains"}


def test_retrieval_measures_methods_only_on_what_dense_attention_answers(run):
    folder = run("study_retrieval", "+exp=study_retrieval", *SHORT_TASKS, "study.least=1")
    rows = rows_of(folder)
    able = rows[(rows.method == "dense") & (rows.value == 1)]
    assert set(rows[rows.method != "dense"].task) == set(able.task) < {"needle", "records", "copy"}
    assert (folder / "study_retrieval.png").is_file()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("study.lengths=[]", "expected at least one of each"),
        ("study.lengths=[100000]", "study.lengths: expected at most the model's context"),
        ("study.lengths=[20]", "task.tokens: expected"),
        ("study.chats=[true]", "study.chats: expected a model with a chat template"),
        ("study.least=2", "study.least: expected a share from 0 to 1, got 2"),
        ("+task@study.tasks.plain=text", "study.tasks.plain: expected a task whose settings include tokens and chat, got Text"),
        ("~study.tasks", "study.tasks: expected at least one task, got none; add one with"),
    ],
)
def test_retrieval_refuses_what_it_cannot_ask(run, capsys, setting, message):
    short = [] if setting == "~study.tasks" else SHORT_TASKS
    with pytest.raises(SystemExit):
        run("study_retrieval", "+exp=study_retrieval", *short, setting)
    assert message in capsys.readouterr().err


ACCURACY = ["+exp=study_accuracy", "study.tasks.needle.wording=note", "study.tasks.needle.tokens=96", "allocator=uniform"]
ACCURACY += [
    "graphs.chunk_tokens=64",
    "study.tasks.needle.documents=2",
    "~study.tasks.records",
    "~study.tasks.copy",
    "study.least=0",
]


def test_accuracy_of_the_papers_methods_on_a_models_exact_heads(run, tmp_path):
    """PhoneLM-1.5B's 16 heads of 160 dimensions, with tasks of files: papers, requests for functions, questions."""
    papers = [{"article": f"Of {at}. " * 40, "abstract": f"It is of {at}."} for at in range(4)]
    functions = [{"name": f"do_{at}", "description": f"Does {at}."} for at in range(6)]
    queries = [{"query": f"please do {at}", "function": f"do_{at}"} for at in range(4)]
    paths = {}
    for name, records in (("papers", papers), ("functions", functions), ("queries", queries)):
        paths[name] = tmp_path / f"{name}.jsonl"
        paths[name].write_text("\n".join(json.dumps(record) for record in records))
    model = ["model=random", "~model.path", "model.shape=phonelm_1_5b", "model.layers=2", "model.vocabulary=2560"]
    arxivsum = {"path": paths["papers"], "documents": 2, "shots": 1, "tokens": 160, "new_tokens": 4}
    octopus = {"path": paths["queries"], "functions": paths["functions"], "documents": 2, "shots": 1, "top": 2}
    tasks = ["+task@study.tasks.arxivsum=arxivsum", *(f"study.tasks.arxivsum.{name}={value}" for name, value in arxivsum.items())]
    tasks += ["+task@study.tasks.octopus=octopus", *(f"study.tasks.octopus.{name}={value}" for name, value in octopus.items())]
    less = [one for one in ACCURACY if "needle" not in one]
    rows = rows_of(folder := run("study_accuracy", *less, *model, *tasks, "~study.tasks.needle"))
    assert set(rows.method) == {"dense", "npu_full", "shadowattn", "cg_sparse", "cg_block_sparse"}
    assert set(rows.metric) == {"accuracy", "rouge_l", "rouge_l_change", "rouge_l_change_p", "density"}
    assert set(rows[rows.task == "arxivsum"].cut) == {"papers, at their ends"}
    assert set(rows[rows.task == "octopus"].cut) == {"none"}
    assert set(rows.source.str.split().str[0]) == {"papers.jsonl", "queries.jsonl"}
    guessed = rows[rows.task == "octopus"]
    assert (guessed.method.tolist(), guessed.flag.tolist()) == (
        ["dense"],
        ["dense cannot be told from chance (0.33): no method is asked"],
    )
    assert set(rows[rows.metric.str.startswith("rouge_l")].task) == {"arxivsum"}
    assert (rows[rows.metric == "rouge_l_change_p"].value == 1).all()  # of two questions nothing can be shown
    changes = rows[rows.metric.str.endswith("_change")]
    assert set(changes.method) == set(rows.method) - {"dense"}
    dense = rows[rows.method == "dense"].set_index("task").value
    values = means(rows).set_index(["method", "retention", "task"]).value
    for row in changes.itertuples():
        assert row.value == pytest.approx(values[row.method, row.retention, row.task] - dense[row.task])
        assert row.low <= row.value <= row.high
        assert row.flag == "dense may score below 0.05: no difference is claimed"  # though study.least=0 lets methods be asked
    assert (folder / "accuracy.png").is_file()


def test_a_change_that_is_one_of_many_needs_more_than_an_interval_of_its_own():
    """6 of 20 questions lost: alone p = 2 · 2⁻⁶, of 28 changes of which all others are none nothing can be shown."""
    row = AnswerRow(**vars(some_rows()[0]))
    task = Asked("copy", 96, False, [ExactMatch(torch.tensor([1]), torch.tensor([2]))], "generated, seed 0", "none")
    dense, fewer = [1.0] * 20, [0.0] * 6 + [1.0] * 14
    for others, p, flag in ((0, 2**-5, ""), (27, 28 * 2**-5, "no difference can be shown")):
        made = _change_rows([(row, task, fewer, dense), *[(row, task, dense, dense)] * others])
        assert [one.metric for one in made[:2]] == ["accuracy_change", "accuracy_change_p"]
        assert (made[0].value, made[0].high < 0, made[0].flag) == (-0.3, True, flag)
        assert made[1].value == min(1, p)
        assert {one.value for one in made[3::2]} <= {1}


def test_a_sparse_method_whose_heads_all_go_dense_says_so(run):
    rows = rows_of(run("default", "retention=0.1", "dense_above=0.05", "estimator=oracle", "allocator=uniform"))
    flags = rows[rows.metric == "loss"].set_index("method").flag
    assert "the sparse path was not used: every head went dense" in flags["oracle"]
    assert "not used" not in flags["dense"]


def test_a_task_that_sparse_attention_never_ran_on_says_so(run, capsys):
    rows = rows_of(run("study_accuracy", *ACCURACY, "study.least=0", "retentions=[0.1]", "dense_above=0.05"))
    flagged = rows.flag.str.contains("the sparse path was not used: every head went dense")
    sparse = (rows.retention < 1) & ~rows.metric.str.endswith("_p")
    assert sparse.any()
    assert flagged.equals(sparse)
    assert "the sparse path was not used: every head went dense: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["retentions=[0.1,0.2,0.1]"], "retentions: expected each once, got [0.1, 0.2, 0.1]"),
        (["study.lengths=[384,384]"], "study.lengths: expected each once, got [384, 384]"),
    ],
)
def test_what_stands_twice_is_refused(run, capsys, settings, message):
    with pytest.raises(SystemExit):
        run("study_retrieval", "+exp=study_retrieval", *settings)
    assert message in capsys.readouterr().err


def test_what_dense_attention_cannot_do_is_asked_of_no_method(run):
    rows = rows_of(run("study_accuracy", *ACCURACY, "study.least=1"))
    assert set(rows.method) == {"dense"}
    assert set(rows.flag) == {"dense may score below 1: no method is asked"}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("+task@study.tasks.plain=text", "study.tasks.plain: expected a task with questions, got plain text"),
        ("study.tasks.needle.tokens=100000", "study.tasks.needle"),
        ("study.tasks.needle=3", "study.tasks"),
    ],
)
def test_accuracy_refuses_what_it_cannot_ask(run, capsys, setting, message):
    with pytest.raises(SystemExit):
        run("study_accuracy", *ACCURACY, setting)
    assert message in capsys.readouterr().err


def test_a_bank_serves_the_prompts_of_tasks_longer_than_the_windows(run):
    longer = [one.replace("needle.tokens=96", "needle.tokens=200") for one in ACCURACY]
    rows = rows_of(run("study_accuracy", *longer, "estimator=int8_graph"))
    ours = rows[rows.method == "shadowattn"]
    assert (ours.tokens > 96).all()
    assert set(ours.estimate_device) != {"none"}
