"""The command line, as a user meets it: on the bundled model and on a model made here."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import experiments.run
from shadowattn.reporting.flags import SAME
from tests.commands import ROOT, run_module, run_python
from tests.tiny import tiny_model

SMALL = [
    *("evaluation.windows=1", "evaluation.fidelity_windows=1", "evaluation.context_tokens=96", "graphs.chunk_tokens=32"),
    *("importance.windows=2", "importance.window_tokens=32", "graphs.calibration_windows=1", "graphs.launch_heads=[1]"),
]
OURS = "shadowattn.online.estimators"
# Of methods of +exp=compare_estimators; the bundled model has 2 key heads of 64 dimensions.
OF_ESTIMATORS = [
    ("sparq", "channels=65", "channels: expected an integer of 1 … 64, the head dimension, got 65"),
    ("loki", "dims=0", "dims: expected an integer of 1 … 64, the head dimension, got 0"),
    ("loki", "dims=65", "dims: expected an integer of 1 … 64, the head dimension, got 65"),
    ("double_sparsity", "kept=-3", "kept: expected an integer of 1 … 64, the head dimension, got -3"),
    ("double_sparsity", "kept=65", "kept: expected an integer of 1 … 64, the head dimension, got 65"),
    ("lightning_indexer", "heads=0", "heads: expected an integer of 1"),
    ("lightning_indexer", "dims=129", "dims: expected an integer of 1 … 128, the dimensions of a layer's keys together, got 129"),
    ("spargeattn", "likeness=5", "likeness: expected a number of -1 … 1, got 5"),
    ("sign_lsh", "bits=1000000000", "bits: expected an integer of 1 … 4096, got 1000000000"),
    ("quest", "page=1000000000", "page: expected an integer of 1 … 65536, got 1000000000"),
]


def run(*arguments: str) -> subprocess.CompletedProcess:
    return run_module("experiments.run", *arguments)


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory) -> Path:
    """A random MQA Llama with a tokenizer of single bytes, as a user's local folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_model(family="llama", kv_heads=1, head_dim=80).save_pretrained(folder)
    vocabulary = {chr(i): i for i in range(127)} | {"?": 127}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog, again and again.\n" * 20)
    return folder


@pytest.fixture(scope="module")
def finished(tiny_folder, tmp_path_factory):
    """One small sweep, its results folder, and its arguments."""
    results = tmp_path_factory.mktemp("results")
    arguments = [
        *("+exp=sweep_retention", "retentions=[0.1,0.5,1.0]", "model=local", f"model.path={tiny_folder}"),
        *("data=text", f"data.path={tiny_folder / 'text.txt'}", f"paths.results={results}", *SMALL),
    ]
    return run_python("-m", "experiments.run", *arguments), results, arguments


def test_a_run_leaves_rows_meta_and_figures(finished):
    done, results, _ = finished
    assert done.returncode == 0, done.stderr
    (folder,) = (results / "runs" / "sweep_retention").iterdir()
    assert {p.name for p in folder.glob("*.png")} == {"layers.png", "octaves.png", "quality.png", "retention.png"}
    meta = json.loads((folder / "meta.json").read_text())
    assert meta["config_hash"] == folder.name
    assert meta["estimate_device"]["name"] in ("CPU", "NPU")
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.method) == {"dense", "npu_full", "shadowattn", "waterfill", "int8_uniform", "oracle", "streaming", "random"}
    assert rows.corpus_sha256.nunique() == 1
    assert (rows.measured == "measured").all()
    used = rows[(rows.metric == "sparse_rows") & (rows.retention < 1)]
    assert (used.value > 0).all()
    losses = rows[rows.metric == "loss"].set_index(["method", "retention"]).value
    for method in ("shadowattn", "waterfill", "int8_uniform", "oracle", "streaming", "random"):
        assert losses[method, 1.0] == pytest.approx(losses["dense", 1.0], abs=1e-5)
    compared = {(row.method, row.metric) for row in rows[rows.metric.str.endswith("_p")].itertuples()}
    rivals = {"int8_uniform": "oracle", "streaming": "int8_uniform", "random": "streaming", "shadowattn": "npu_full"}
    assert {(name, f"gain_over_{rival}_p") for name, rival in rivals.items()} < compared
    better = rows[(rows.metric == "loss") & (rows.value < losses["dense", 1.0] - 1e-5)]
    assert better.flag.str.contains(SAME).all()  # of one window there is no interval, so that none is said to beat dense
    assert not rows.flag.str.contains("beats dense").any()
    # A random model knows nothing of the text, and its rows say so.
    assert rows[rows.metric == "loss"].flag.str.contains("dense near the floor").all()


def test_the_same_command_again_measures_nothing(finished):
    done, results, arguments = finished
    files = {p: p.stat().st_mtime_ns for p in results.rglob("*") if p.is_file()}
    again = run(*arguments)
    assert again.returncode == 0, again.stderr
    assert "done before" in again.stderr
    assert again.stdout == done.stdout
    assert {p: p.stat().st_mtime_ns for p in results.rglob("*") if p.is_file()} == files


def test_an_interrupted_run_ends_in_the_same_rows(finished):
    """As if it had been killed in its last cell: one cell is missing, and neither rows nor meta.json are there yet."""
    _, results, arguments = finished
    (folder,) = (results / "runs" / "sweep_retention").iterdir()
    before = pd.read_parquet(folder / "rows.parquet")
    for name in ("meta.json", "rows.parquet", "cells/oracle@0.5.json"):
        (folder / name).unlink()
    again = run(*arguments)
    assert "1 cells to do" in again.stderr
    pd.testing.assert_frame_equal(pd.read_parquet(folder / "rows.parquet"), before)


def test_altered_rows_are_refused(finished, tmp_path):
    _, results, arguments = finished
    (folder,) = (results / "runs" / "sweep_retention").iterdir()
    rows = folder / "rows.parquet"
    content = rows.read_bytes()
    rows.write_bytes(content[:-7])
    refused = run(*arguments)
    rows.write_bytes(content)
    assert refused.returncode == 2
    assert "altered or cut short" in refused.stderr


def test_a_sweep_runs_a_job_for_each_value(tiny_folder, tmp_path):
    done = run(
        *("-m", "retention=0.2,0.4", "estimator=oracle,random", "model=local", f"model.path={tiny_folder}"),
        *("data=text", f"data.path={tiny_folder / 'text.txt'}", f"paths.results={tmp_path}", *SMALL),
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "runs" / "default").iterdir())) == 4
    assert len(list((tmp_path / "artifacts").glob("sensitivity-*"))) == 1  # shared by all four


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sedd=1"], "sedd"),
        (["seed=abc"], "abc"),
        (["+exp=unheard_of"], "unheard_of"),
        (["estimator=psychic"], "psychic"),
        (["retention=0"], "(0, 1]"),
        (["retentions=[0.1,1.5]"], "(0, 1]"),
        (["model=local", "model.path=no/such/folder"], "no/such/folder"),
        (["model=hub", "model.id=nobody/nothing"], "nobody/nothing"),
        (["data=text", "data.path=no/such/file"], "no/such/file"),
        (["data=text", "data.path={binary}"], "UTF-8"),
        (["data=text", "data.path={empty}"], "empty"),
        (["data=text", "data.path={short}"], "evaluation.context_tokens"),
        (["data=text", "data.path={line}", "evaluation.context_tokens=4"], "importance.window_tokens"),
        (["model=null"], "Config group override must be a string"),
        (["study._target_=3"], "study: expected a study by its class"),
        (["estimator._target_=null"], "estimator._target_: expected MODULE.NAME, got None"),
        (["+exp=fig10", "study.lengths=[]"], "study.lengths: expected at least one number of tokens"),
        (["retention=0.1,0.2"], "retention=0.1,0.2: expected one value, got several; a sweep over them begins with -m"),
        (
            ["+exp=headline", "task=[needle,copy]"],
            "task=[needle,copy]: expected one choice, got a list; a sweep over several is -m task=needle,copy; several tasks",
        ),
        (["estimator=[oracle,streaming]"], "estimator=[oracle,streaming]: expected one choice, got a list"),
        (["+exp=headline", "task=needle,copy"], "several tasks in one run are those of +exp=study_accuracy"),
        (
            ["+exp=compare_estimators", "selection=shared_32"],
            "selection: expected lists for single rows, whose costs and rankings",
        ),
        (
            ["+exp=headline", "estimator=hierarchical", "selection=shared_32"],
            "Hierarchical: makes lists for single rows, got query_block=32",
        ),
        (["+exp=sweep_retention", "+study.rivals.oracle=nobody"], "study.rivals: expected two different methods of shadowattn"),
        (["+exp=sweep_retention", "+study.rivals.oracle=shadowattn"], "oracle and shadowattn are compared in any case"),
        (["+exp=study_query_block", "method=max_8"], "is the name of a block's method"),
        (["+exp=study_query_block", "method=dense"], "'dense' is the baseline's name"),
        (["+exp=study_query_block", "study.query_blocks=[]"], "expected at least one of each"),
        (["-m", "--cfg", "job"], "-m: expected overrides and --config-dir beside --help and --cfg job"),
        (["reuse=all"], "reuse: expected one of same, any"),
        (["+exp=sweep_retension"], "did you mean sweep_retention?"),
        (["exp=quickstart"], "named with a plus: +exp=quickstart"),
        (["pipeline=off"], "pipeline=off: expected one of batched, grouped, overlap, planned, serial"),
        (["retention"], "'retention': expected KEY=VALUE"),
        (["retention=0.1,", "0.2"], "'retention=0.1,': expected KEY=VALUE"),
        (["retention=abc"], "retention=abc: Value 'abc' of type 'str' could not be converted to Float"),
        (["+retention=0.1"], "+retention: the setting is there already; leave out the plus"),
        (["retentions=0.1"], "retentions: expected a list, such as retentions=[0.1], got 0.1"),
        (["--foo"], "--foo: expected one of -m, --multirun"),
        (["estimator=oracle", "--config-dir"], "--config-dir: expected a folder after it, got paths.results="),
        (["block_score=max"], "did you mean selection.block_score?"),
        (["+exp=quickstart", "+exp=table4"], "exp: expected one choice, got several"),
        (["+exp=attention_speed", "study.parts=chunk"], "study.parts: expected a list, such as study.parts=[chunk], got chunk"),
        (["threads=0"], "threads: expected at least 1, or null for all cores, got 0"),
        (["~model"], "model: expected a choice, got none"),
        (["retenton=0.1"], "retenton: there is no such setting; did you mean retention?"),
        (["+retenton=0.1"], "retenton: there is no such setting; did you mean retention?"),
        (["context_tokens=64"], "did you mean evaluation.context_tokens?"),
        (["evaluation.window=2"], "did you mean evaluation.windows?"),
        (["pairs=3"], "did you mean task.pairs?"),
        (["+exp=fig10", "model=smollm2"], "model: fig10 does not use it; it uses retention"),
        (["+exp=study_query_block", "selection.query_block=8"], "set study.query_blocks instead"),
        (["+exp=table4", "study.reference=nine"], "study.reference: expected one of the estimates"),
        (
            ["method=uniform", "+estimator@compare.uniform.estimator=oracle", "+allocator@compare.uniform.allocator=uniform"],
            "call the method something else",
        ),
        (["estimater=oracle"], "did you mean estimator?"),
        (["qqqqqqq=2"], "print all settings with"),
        (["estimator._target_=nowhere.Mine"], "estimator._target_: expected MODULE.NAME that can be imported"),
        (["data=hub", "data.id=nobody/nothing"], "nobody/nothing"),
        (["evaluation.context_tokens=5000"], "context is 4096 tokens, got 5000"),
        (["selection.query_block=48"], "multiple of query_block=48"),
        (["pipeline.mode=sideways"], "error: pipeline.mode: expected one of batched, serial"),
        (["selection.sinks=-1"], "error: selection.sinks: "),
        (["selection.block_score=mean"], "selection.block_score: expected one of leading_query, pooled_query, max, sum, "),
        (["estimator=random", "selection=shared_32", "selection.block_score=probability"], "got Random; use block_score=max"),
        (["importance=racing"], "use allocator=waterfill, or importance.method=shared"),
        (["importance.ablation=half"], "zero, uniform"),
        (["kernel=cuda"], "kernel"),
        (["device=tpu"], "one of auto, npu, gpu, cpu"),
        (["task=retrieval_kv", "task.pairs=99"], "task.pairs: expected 1 to 57"),
        (["task=retrieval_kv", "task.pairs=0"], "task.pairs: expected 1 to 57, as many as there are keys kept for"),
        (["task=retrieval_kv", "task.fewer=40"], "task.fewer: expected 0 to task.pairs − 1 = 39 records less, got 40"),
        (["retentions=[]"], "retentions: expected one or more, got an empty list; for one, set retentions=[0.2]"),
        (["+exp=compare_estimators", "retentions=[]", "retention=0.1"], "got an empty list; for one, set retentions=[0.1]"),
        *(
            (["+exp=compare_estimators", f"compare.{name}.estimator.{setting}"], f"error: {name}: estimator: {message}")
            for name, setting, message in OF_ESTIMATORS
        ),
        (["estimator=quantised", "estimator.distance=foo"], "quantised: estimator: distance: expected one of raw, log, got 'f"),
        (["estimator=quantised", "estimator.bits=2.5"], "estimator.bits: Value '2.5' of type 'float' could not be converted to"),
        (["estimator=quantised", "estimator.smooth=perhaps"], "estimator.smooth: Value 'perhaps' is not a valid bool"),
        (["estimator=sign1", "estimator.rotate=perhaps"], "estimator.rotate: Value 'perhaps' is not a valid bool"),
        (["estimator=sign1", "estimator.scaled=3"], "estimator.scaled: expected true or false, got 3"),
        (["estimator=top_p", "estimator.loose=0.5"], "top_p: estimator: loose: expected 1 or more times the budget, got 0.5"),
        (
            ["estimator=top_p", f"estimator.estimator._target_={OURS}.int8_graph.Int8Graph"],
            "top_p: cannot prune the lists of Int8Graph",
        ),
        (
            ["estimator=top_p", f"estimator.estimator._target_={OURS}.loki.Loki", "+estimator.estimator.dims=65"],
            "top_p: estimator: dims: ",
        ),
        (
            ["estimator=top_p", f"estimator.estimator._target_={OURS}.sparq.SparQ", "+estimator.estimator.channels=0"],
            "top_p: estimator: channels: ",
        ),
        *(
            (["+exp=study_estimator_speed", "graphs.chunk_tokens=32", override], message)
            for override, message in (
                ("study.lengths=[64,32]", "study.lengths: expected two or more, ascending"),
                ("study.lengths=[16,64]", "study.lengths: expected"),
                ("retentions=[1.0]", "retentions: expected one below 1"),
                ("estimator=int8_graph", "int8_graph has graphs of the evaluation's lengths"),
                ("estimator=nncf", "nncf has graphs of the evaluation's lengths"),
            )
        ),
        *(
            (["+exp=roofline", "engine.chunk_tokens=32", override], message)
            for override, message in (
                ("study.batches=[0]", "study.batches: expected"),
                ("study.lengths=[16]", "study.lengths: expected"),
                ("study.precisions=[w2]", "study.precisions: expected"),
                ("study.precisions=[]", "study.precisions: expected at least one"),
                ("retention=1", "retention: expected a share below 1"),
            )
        ),
        (["study=none"], "study: expected a study by its class, got 'none'; choose one with +exp=NAME"),
        (["study._target_=shadowattn.types.Heads"], "expected a class derived from Study, got shadowattn.types.Heads"),
        (["shard.index=2", "shard.count=2"], "shard.index < shard.count"),
        (["importance.method=guess"], "shared, plain, racing"),
        (["importance.lines=all"], "document, artifact"),
        (["importance.dtype=int4"], "null, float32, bfloat16"),
        (["importance=racing", "allocator=waterfill", "importance.weighting=batches"], "method=racing"),
        (
            ["evaluation.generated_tokens=1024"],
            "expected fewer than the 1024 tokens of a window, got 1024",
        ),
        (
            ["evaluation.generated_tokens=9", "evaluation.fidelity_windows=0"],
            "evaluation.generated_tokens: 9 of each of no windows",
        ),
        (["evaluation.divergence_windows=-1"], "evaluation.divergence_windows: expected at least 0, got -1"),
        (
            ["evaluation.divergence_windows=9", "evaluation.windows=8"],
            "at most evaluation.windows=8, got 9",
        ),
        (["estimator=top_p", "selection=shared_32"], "top_p gives single rows budgets of their own, got query_block=32"),
        (["estimator=top_p", "estimator.estimator=3"], "estimator.estimator: expected a part with settings of its own, got 3"),
        (["importance.race.first=1"], "first ≥ 2"),
        (["importance.activation_scales=no/such.json"], "activation_scales=FILE"),
        (["allocator=file", "allocator.path=no/such.txt"], "no/such.txt cannot be read"),
        (["allocator=file"], "allocator.path=FILE"),
        (["allocator=file", "allocator.path={table}"], "the model has 8 × 4"),
        (["allocator=paper", "allocator.metric=taste"], "loss or perplexity"),
        (["allocator=error_greedy", "allocator.measure=taste"], "expected one of error, divergence, loss"),
        (["sensitivity.retentions=[0.5,0.1]"], "ascending"),
        (["grid.sigma=1"], "sigma above 0 and not 1"),
        (["calibration=percentile", "calibration.share=0"], "(0, 1]"),
        (["model=random", "model.shape=gpt5"], "qwen2_0_5b, qwen2_1_5b"),
        (["evaluation.windows=0"], "evaluation.windows: expected at least 1, got 0"),
        (["pipeline=sideways"], "sideways"),
        (["pipeline=planned"], "experiments.run +exp=latency_profile"),
        (["pipeline=planned", "pipeline.profile=no/such.json"], "no/such.json: cannot be read"),
        (["pipeline=grouped", "estimator=int8_fused"], "no scores to launch for"),
        (["pipeline.queue_heads=0"], "queue_heads: expected an integer of 1"),
        (["pipeline.threads.select=0"], "select_threads: expected an integer of 1"),
        (["+exp=latency_profile", "study.repeats=0"], "study.repeats: expected at least 1, got 0"),
        (["+exp=latency_profile", "study.retentions=[0.2,2]"], "(0, 1]"),
        (["+exp=latency_profile", "study.retentions=[]"], "study.retentions: expected at least one value"),
        (["+exp=latency_profile", "pipeline=serial"], "stages that overlap"),
        (["+exp=latency_profile", "pipeline=planned"], "stages that overlap, got planned; use pipeline=grouped"),
        (["+exp=latency_profile", "scheduler=johnson"], "scheduler: latency_profile does not use it"),
        (["+exp=study_schedulers", "scheduler=optimal"], "got the optimum itself; leave scheduler out"),
        (["+exp=validate_simulator", "pipeline=serial"], "ValidateSimulator measures stages that overlap, got serial"),
        (["+exp=validate_simulator", "estimator=oracle"], "expected estimator=int8_graph with selection.place=host"),
        (["+exp=validate_simulator", "selection=device"], "got int8_graph with selection.place=device"),
        (["+exp=study_schedulers", "study.works=0"], "study.works: expected at least 1, got 0"),
        (["+exp=study_schedulers", "study.limit_s=0"], "study.limit_s: expected a time above 0 s, got 0"),
        (["+exp=fig10", "study.chunk_tokens=0"], "study.chunk_tokens: expected at least 1, got 0"),
        (["+exp=fig10", "study.device=iphone"], "expected one of intel_core_ultra_7_155h, intel_npu_3720"),
    ],
)
def test_wrong_input_ends_in_one_line_and_leaves_nothing(arguments, message, tmp_path, monkeypatch, capsys):
    files = {
        "binary": b"\xff\xfe\x00",
        "empty": b"",
        "short": b"import os\n",
        "line": b"one two three four five six\n" * 4,
        "table": b"0.2 0.2 \n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    arguments = [argument.format(**{name: tmp_path / name for name in files}) for argument in arguments]
    monkeypatch.setattr(sys, "argv", ["run", *arguments, f"paths.results={tmp_path / 'results'}"])
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(SystemExit) as stopped:
        experiments.run.main()
    GlobalHydra.instance().clear()
    printed = capsys.readouterr()
    _is_one_line_of_error(stopped.value.code, printed.out, printed.err, message)
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("results", ["file", "file/below", "/proc/nowhere"])
@pytest.mark.parametrize("sweep", [[], ["-m", "seed=0,1"]])
def test_results_that_cannot_be_written_are_refused_before_anything_is_loaded(results, sweep, tmp_path):
    (tmp_path / "file").write_text("in the way")
    done = run(*sweep, "model=local", "model.path=no/such/folder", f"paths.results={tmp_path / results}")
    _is_one_line_of_error(done.returncode, done.stdout, done.stderr, "paths.results: expected a folder to write to")


def test_a_failing_job_of_a_sweep_is_named_and_the_others_run(tiny_folder, tmp_path):
    done = run(
        *("-m", "retention=2,0.4", "estimator=oracle", "model=local", f"model.path={tiny_folder}"),
        *("data=text", f"data.path={tiny_folder / 'text.txt'}", f"paths.results={tmp_path}", *SMALL),
    )
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors[0].startswith("error: job 0 (retention=2 estimator=oracle")
    assert "(0, 1]" in errors[0]
    assert errors[1].startswith("error: 1 jobs of the sweep failed, the others are done: job 0 (retention=2)")
    assert "Traceback" not in done.stderr
    (folder,) = (tmp_path / "runs" / "default").iterdir()
    assert (folder / "meta.json").is_file()


ANSWERED = """
import sys
from experiments.run import main
sys.argv = ["run", *sys.argv[1:]]
try:
    main()
finally:
    print([name for name in ("torch", "transformers", "openvino", "pandas") if name in sys.modules], file=sys.stderr)
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["retenton=1"],
        ["retention=2"],
        ["retentions=[0.1,nan]"],
        ["estimator=psychic"],
        ["study=none"],
        ["estimator._target_=nowhere.Mine"],
        ["estimator._target_=shadowattn.online.estimators.oracle.Orcale"],
    ],
)
def test_what_needs_no_model_is_answered_without_the_heavy_imports(arguments, tmp_path):
    command = [sys.executable, "-c", ANSWERED, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stderr.splitlines()[-1] == "[]"
    assert done.returncode == (0 if arguments == ["--help"] else 2)


def test_the_package_imports_what_is_used_when_it_is_used():
    code = """
import sys, shadowattn
assert "torch" not in sys.modules
assert set(shadowattn.__all__) <= set(dir(shadowattn))
assert all(callable(getattr(shadowattn, name)) for name in shadowattn.__all__ if name != "__version__")
from shadowattn import attach
try:
    shadowattn.nothing
except AttributeError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "module 'shadowattn' has no attribute 'nothing'"


def test_the_command_is_kept(finished):
    _, results, arguments = finished
    (folder,) = (results / "runs" / "sweep_retention").iterdir()
    command = json.loads((folder / "meta.json").read_text())["command"]
    assert shlex.split(command) == ["python", "-m", "experiments.run", *arguments]


@pytest.mark.parametrize(("argument", "message"), [("sedd=1", "sedd"), ("retention=0", "(0, 1]")])
def test_the_shell_sees_one_line_and_a_status(argument, message, tmp_path):
    """Once through a process of its own: nothing but that line reaches the terminal."""
    done = run(argument, f"paths.results={tmp_path / 'results'}")
    _is_one_line_of_error(done.returncode, done.stdout, done.stderr, message)


def _is_one_line_of_error(status, out, err, message):
    assert status == 2
    lines = err.strip().splitlines()
    assert len(lines) == 1, err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert out == ""


def test_help_and_configuration_print():
    assert "+exp=quickstart" in run("--help").stdout
    printed = run("+exp=sweep_retention", "--cfg", "job").stdout
    assert "experiment: sweep_retention" in printed


def test_help_names_the_parts_of_the_users_folder_too(tmp_path):
    (tmp_path / "estimator").mkdir()
    (tmp_path / "estimator" / "quarters.yaml").write_text("_target_: shadowattn.online.estimators.oracle.Oracle\n")
    printed = run("--config-dir", str(tmp_path), "--help").stdout
    assert {"oracle,", "quarters,"} < set(printed.split())
