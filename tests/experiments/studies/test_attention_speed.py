"""The study of attention's speed: that it runs on small cases, that what it times agrees, its arithmetic, and that its committed
rows are whole. Never how fast."""

import io
import json
from functools import partial
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from rich.console import Console

from experiments.publish import ROOT, read_reference
from experiments.random_layers import SHAPES, Case, Tensors
from experiments.studies import attention_candidates as candidates
from experiments.studies import attention_speed
from experiments.studies.attention_memory import every_path, peak_beyond_output
from experiments.studies.attention_speed import PARTS, AttentionRow, AttentionSpeed, rows_of
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import native
from shadowattn.online.selection import BLOCK_SCORES
from shadowattn.reporting.attention_targets import targets_table
from shadowattn.reporting.figures.attention_speed import break_even, draw
from shadowattn.reporting.style import save
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures

REFERENCE = ROOT / "results" / "reference"

needs_kernels = pytest.mark.skipif(native.library() is None, reason="the native kernels were not built: no C++ compiler")
FEW = ["study.shapes=[qwen2-0.5b]", "study.dtypes=[float32]", "study.rounds=2", "study.rows=64", "study.keys=512"]
FEW += ["study.lengths=[256]", "study.retentions=[0.2,1.0]", "study.gather_rows=32", "study.gather_keys=128"]
FEW += ["study.decode_keys=[256]", "study.memory_keys=512"]


def test_interleaves_and_drops_the_warm_up():
    names, logs = "abcd", []
    for _ in range(2):
        log = []
        timings = interleave({name: partial(log.append, name) for name in names}, rounds=8, warmup=2)
        assert list(timings) == list(names)
        assert all(len(timing.seconds) == 8 for timing in timings.values())
        assert all(sorted(log[start : start + 4]) == list(names) for start in range(0, 40, 4))
        assert all(one != following for one, following in pairwise(log))  # none finds what it left in the caches itself
        logs.append(log)
    assert logs[0] != logs[1]  # drawn anew in every call: a layer's predecessors are not the next layer's


@pytest.mark.parametrize(("names", "turns"), [("", 0), ("a", 3), ("ab", 6)])
def test_one_or_two_candidates_take_turns_too(names, turns):
    log = []
    timings = interleave({name: partial(log.append, name) for name in names}, rounds=2, warmup=1)
    assert len(log) == turns
    assert all(len(timing.seconds) == 2 for timing in timings.values())
    if names == "ab":
        assert "".join(log) in ("ababab", "bababa")


def test_a_ratio_is_the_median_of_the_rounds_ratios():
    assert ratio(Timing((4.0, 9.0, 2.0)), Timing((2.0, 3.0, 2.0))) == 2.0


def test_break_even_lies_between_its_neighbours():
    assert break_even(np.array([0.1, 0.2, 0.4]), np.array([3.0, 1.5, 0.5])) == pytest.approx(0.3)
    assert break_even(np.array([0.1, 0.2]), np.array([3.0, 1.5])) is None
    assert break_even(np.array([0.1, 0.2]), np.array([0.3, 0.5])) is None


@needs_kernels
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_timed_computes_the_same(shape, dtype):
    t = Tensors(Case(shape, dtype, 200, 64, 1.0))  # retention 1: every way is dense attention
    dense = candidates.baselines(t)
    expected = dense["sdpa"]()[0].float()
    calls = {"own dense": dense["own dense"]} | candidates.attend_only(t, 1, 32) | candidates.gather(t, 32)
    for name, call in calls.items():
        torch.testing.assert_close(call().float(), expected, atol=2e-2, rtol=2e-2, msg=name)
    (sums,) = candidates.value_sums(t).values()
    visible = torch.arange(200) <= t.positions[:, None]
    for head, found in enumerate(sums()):  # in float64, since sums of 200 numbers cancel
        expected_sums = visible.double() @ t.v[t.heads.kv[head]].double()
        torch.testing.assert_close(found.double(), expected_sums, atol=0.3 if dtype == torch.bfloat16 else 1e-4, rtol=2e-2)
    for call in (candidates.stages(t) | candidates.totals(t, 1) | candidates.totals(t, 32, "sum")).values():
        call()
    step = candidates.decode(Tensors(Case(shape, dtype, 200, 1, 1.0)))
    expected = step["sdpa"]().float().flatten()
    for name in ("torch grouped bmm", "own dense", "attend, shared list", "total (int8_fused), shared list"):
        torch.testing.assert_close(step[name]().float().flatten(), expected, atol=2e-2, rtol=2e-2, msg=name)


@needs_kernels
def test_the_command_writes_rows_figures_and_a_table(run, monkeypatch, capsys):
    """All parts but flex, whose compilation takes a minute; the peaks in this process."""
    monkeypatch.setattr(attention_speed, "in_own_process", lambda measure, *of: measure(*of))
    parts = [part for part in PARTS if part != "flex"]
    folder = run("attention_speed", "+exp=attention_speed", f"study.parts=[{','.join(parts)}]", *FEW)
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.part) == set(parts)
    assert set(rows.measured) == {"measured"}
    assert set(rows.path_kind) == {"timing"}
    assert set(rows.config_hash) == {folder.name}
    times = rows[(rows.metric == "time") & (rows.method != "select")]
    assert (times.value > 0).all()
    assert (times.low <= times.value).all()
    assert (times.value <= times.high).all()
    assert set(rows[(rows.part == "decode") & (rows.metric == "time")].n) == {8}
    assert (rows[rows.method == "machine"].value > 0).all()
    of = rows.drop_duplicates("method").set_index("method")
    assert of.estimator[["total (int8_graph), per row", "total (int8_fused), per row", "sdpa"]].tolist() == [
        "int8_graph",
        "int8_fused",
        "none",
    ]
    assert of.query_block["attend, 32-row blocks"] == 32
    assert of.block_score["total (int8_graph), 32-row blocks, max"] == "max"
    assert {path.name for path in folder.glob("*.png")} == {
        f"attention_{x}.png" for x in ("keys", "retention", "roofline", "stages")
    }
    printed = capsys.readouterr().out
    assert "own dense" in printed
    assert "GFLOP/s" in printed
    assert json.loads((folder / "meta.json").read_text())["config"]["study"]["rounds"] == 2


@needs_kernels
def test_stages_and_what_is_outside_of_them_make_up_a_paths_time():
    row, case = AttentionRow(*[""] * 22), Case("qwen2-0.5b", torch.float32, 600, 64, 0.2)
    figures = AttentionSpeed(parts=["stages"], rounds=3)._figures("stages", case)
    rows = pd.DataFrame(rows_of(row, "stages", case, figures)).set_index(["method", "metric"])
    assert {method for method, _ in rows.index} == {"own dense", *candidates.fused_paths(Tensors(case), 32)}
    assert "total (int8_fused), per row: first look" in figures  # all of them are 0
    assert not any(figures["total (int8_fused), per row: first look"])
    flat, looked = (
        {
            metric.removeprefix("stage: ")
            for metric in rows.value[f"total ({name}), per row"].index
            if metric.startswith("stage: ")
        }
        for name in ("int8_fused", "hierarchical")
    )
    assert flat == {"estimate", "select", "attend together", "attend alone", "outside of tasks"}
    assert looked == {"first look", "let through", "estimate", "select", "attend together", "spared heads", "outside of tasks"}
    for path in ("own dense", *candidates.fused_paths(Tensors(case), 32)):
        together = np.array(figures[f"{path}: attend together"])
        assert (sum(np.array(figures[f"{path}: {part}"]) for part in native.PARTS) <= together).all()
        timed = {metric.removeprefix("part: ") for metric in rows.value[path].index if metric.startswith("part: ")}
        assert timed == (set() if "(int8_fused), per row" in path else set(native.PARTS))  # these rows have no keys in common
        parts = {stage: np.array(figures[f"{path}: {stage}"]) for stage in candidates.STAGES}
        assert all((part >= 0).all() for part in parts.values()), "no more than the threads that there are"
        whole = np.median(sum(parts.values()) / np.array(figures[path]))
        assert rows.value[path, "time with stages timed"] == pytest.approx(whole)


@needs_kernels
def test_a_level_that_the_processor_lacks_is_refused(run, capsys):
    with pytest.raises(SystemExit):
        run("attention_speed", "+exp=attention_speed", "study.parts=[chunk]", "study.level=sse2")
    assert "study.level: expected one of portable" in capsys.readouterr().err


@needs_kernels
def test_a_lower_level_is_named_by_its_rows(run):
    folder = run("attention_speed", "+exp=attention_speed", "study.parts=[keys]", "study.level=portable", *FEW)
    assert set(pd.read_parquet(folder / "rows.parquet").kernel) == {"native (portable)"}


@needs_kernels
def test_the_peak_of_some_paths_alone(run, monkeypatch):
    monkeypatch.setattr(attention_speed, "in_own_process", lambda measure, *of: measure(*of))
    asked = ["study.parts=[memory]", "study.memory_paths=[sdpa,'(hierarchical), per row, pipeline']"]
    rows = pd.read_parquet(run("attention_speed", "+exp=attention_speed", *asked, *FEW) / "rows.parquet")
    looked = [f"total (hierarchical), per row, pipeline {mode}" for mode in ("serial", "overlap")]
    assert rows.method.tolist() == ["sdpa", *looked]


def test_a_number_of_keys_is_kept_at_every_length():
    study = AttentionSpeed(parts=["keys"], shapes=["smollm2-135m"], dtypes=["float32"], lengths=[128, 512], kept_keys=32)
    cases = [case for _, case in study.cases()]
    assert [(case.keys, case.retention * case.keys) for case in cases] == [(128, 32), (512, 32)]


def test_the_axis_says_what_is_kept():
    """A share of every number of keys, or as many of each."""
    shared = read_reference(REFERENCE / "first_look_speed_05.csv")
    counted = read_reference(REFERENCE / "first_look_kept.csv")
    assert draw(shared, "keys").get_supxlabel() == "keys (retention 0.05, chunk of 512 queries)"
    assert draw(counted, "keys").get_supxlabel() == "keys (1638 of them kept, chunk of 512 queries)"


@needs_kernels
def test_other_memory_is_read_before_every_decode_step_and_before_nothing_else(monkeypatch):
    assert float(candidates.other_layers()()) == candidates._OTHER_LAYERS_BYTES / 4, "ones, in pages of their own"
    read = []
    monkeypatch.setattr(candidates, "other_layers", lambda: lambda: read.append(True))
    study = AttentionSpeed(["chunk", "decode"], ["qwen2-0.5b"], ["float32"], rounds=1, keys=64, rows=32, decode_keys=[64])
    for part, case in study.cases():
        read.clear()
        seconds = study._figures(part, case)
        turns = sum(len(of) + 3 for of in seconds.values())  # with the three rounds that do not count
        assert len(read) == (turns if part == "decode" else 0)


@needs_kernels
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
def test_flex_is_held_against_our_kernel_on_the_same_blocks():
    t = Tensors(Case("qwen2-0.5b", torch.float32, 512, 64, 0.5))
    calls = candidates.flex(t)
    assert list(calls) == ["flex_attention, 64 × 64 blocks", "attend, 64 × 64 blocks"]
    assert calls["attend, 64 × 64 blocks"]().isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.rounds=0"], "study.rounds: expected at least 1, got 0"),
        (["study.parts=[chunk,speed]"], "study.parts: expected one of chunk, stages, reads, machine, gather"),
        (
            ["study.shapes=[llama]"],
            "expected one of phonelm-0.5b, phonelm-1.5b, qwen2-0.5b, qwen2-1.5b, smollm2-135m, got 'llama'",
        ),
        (["study.dtypes=[int8]"], "study.dtypes: expected one of float32, bfloat16"),
        (["study.lengths=[]"], "study.lengths: expected at least one, got none"),
        (["study.retentions=[0.2,1.5]"], "study.retentions: expected shares of the visible keys, in (0, 1], got [0.2, 1.5]"),
        (["study.gather_keys=8"], "study.gather_keys: expected at least 256"),
        (["study.rows=100"], "flex takes multiples of 64"),
        (["study.kept_keys=2000"], "study.kept_keys: expected at most 1024, the shortest of study.lengths, got 2000"),
        (
            ["study.kept_keys=64", "study.parts=[keys]", "study.retention=0.1"],
            "study.retention: study.kept_keys=64 stands in its",
        ),
        (["study.kept_keys=64", "study.parts=[chunk]"], "study.kept_keys: only the part keys uses it"),
        (["study.keys=512"], "leave flex out of study.parts"),
        (["study.parts=[chunk]", "study.memory_paths=[sdpa]"], "study.memory_paths: only the part memory uses it"),
        (["study.memory_paths=[int4]"], "study.memory_paths: expected words of sdpa; own dense; total (int8_graph)"),
        (["study.memory_paths=['']"], "fused), shared list, got ''"),
        (["study.level=portable"], "study.level: machine and memory are measured at the processor's own level"),
        (["model=bundled"], "model: attention_speed does not use it"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run("attention_speed", "+exp=attention_speed", *arguments)
    assert message in capsys.readouterr().err


@needs_kernels
def test_totals_say_by_which_estimator():
    t = Tensors(Case("qwen2-0.5b", torch.float32, 200, 64, 0.5))
    assert list(candidates.totals(t, 32)) == [
        "total (int8_graph), 32-row blocks, leading_query",
        "total (int8_fused), 32-row blocks, leading_query",
    ]
    built = {name: call.__qualname__.split(".")[0] for name, call in candidates.totals(t, 1).items()}
    assert built == {"total (int8_graph), per row": "_graph_total", "total (int8_fused), per row": "_fused_total"}


@needs_kernels
def test_the_peak_of_every_whole_path_is_measured():
    case = Case("qwen2-0.5b", torch.float32, 4096, 256, 0.5)
    known = every_path(32)
    t = Tensors(case)
    paths = candidates.baselines(t) | candidates.totals(t, 1) | candidates.totals(t, 1, estimators=("hierarchical",))
    for block_score in BLOCK_SCORES:
        paths |= candidates.totals(t, 32, block_score)
    torch_kernels = [f"total ({estimator}), per row, torch kernels" for estimator in ("int8_graph", "int8_fused", "hierarchical")]
    pipelines = [f"total (int8_graph), per row, pipeline {mode}" for mode in ("serial", "overlap", "grouped", "planned")]
    pipelines += [
        f"total ({estimator}), per row, pipeline {mode}"
        for estimator in ("int8_fused", "hierarchical")
        for mode in ("serial", "overlap")
    ]
    others = ["total (int8_fused), 32-row blocks, probability, torch kernels", "total (int8_graph), per row, a bank's graphs"]
    others += [f"{others[1]}, pipeline {mode}" for mode in ("serial", "overlap", "grouped", "planned")]
    others += [f"{others[1]}, a third of their rows, pipeline overlap"]
    others += ["decode step (int8_fused), shared list"]
    assert set(known) == {*paths, *torch_kernels, *pipelines, *others}
    peaks = {name: peak_beyond_output(name, case, 32) for name in known}
    scores = 4 * 256 * 4096  # of one head, in float32
    assert all(peaks[name] > scores for name in (*pipelines[:4], torch_kernels[0], *others[1:6])), peaks


def test_rows_say_what_follows_from_seconds():
    row = AttentionRow(*[""] * 22)
    case = Case("qwen2-0.5b", torch.float32, 128, 32, 0.5)
    seconds = {"sdpa": [4.0, 8.0], "own dense": [2.0, 4.0], "estimate": [1.0, 1.0], "estimate + select": [1.5, 2.0]}
    rows = pd.DataFrame(rows_of(row, "chunk", case, seconds)).set_index(["method", "metric"])
    assert rows.value["sdpa", "time"] == 6000
    assert rows.value["own dense", "times faster than sdpa"] == 2
    assert rows.value["select", "time"] == 750
    assert rows.value["select", "share of sdpa"] == pytest.approx(0.125)
    assert rows.flag["select", "time"] == ""
    shorter = pd.DataFrame(rows_of(row, "chunk", case, seconds | {"estimate + select": [0.5, 0.75]})).set_index(
        ["method", "metric"]
    )
    assert shorter.flag.loc["select"].str.contains("says nothing").all()
    assert set(rows.n) == {2}
    (peak,) = rows_of(row, "memory", case, {"total (int8_graph), per row": [3e6]})
    assert (peak.value, peak.unit, peak.estimator, peak.estimate_device, peak.context_tokens) == (
        3,
        "MB",
        "int8_graph",
        "CPU",
        128,
    )


def test_cases_are_the_parts_own():
    study = AttentionSpeed(parts=["machine", "keys", "decode"], lengths=[256, 8192], decode_keys=[64])
    cases = study.cases()
    assert [part for part, _ in cases] == ["machine"] + ["keys"] * 16 + ["decode"] * 8
    assert {case.rows for part, case in cases if part == "keys"} == {256, 512}  # no more rows than keys
    assert {(case.keys, case.rows) for part, case in cases if part == "decode"} == {(64, 1)}


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    timed, memory = (read_reference(REFERENCE / f"{name}.csv") for name in ("attention_speed", "memory_32k"))
    return pd.concat([timed[timed.part != "memory"], memory])


def test_every_figure_is_drawn_from_the_committed_rows(rows, tmp_path):
    drawn = AttentionSpeed().figures(rows)
    assert list(drawn) == ["attention_retention", "attention_keys", "attention_roofline"]
    assert all(save(figure, tmp_path / f"{name}.png").stat().st_size > 10_000 for name, figure in drawn.items())
    assert (ROOT / "docs" / "attention_speed.png").is_file()


def test_rows_are_measured_and_complete(rows):
    assert set(rows.measured) == {"measured"}
    assert set(rows.part) == {"chunk", "machine", "gather", "keys", "retention", "decode", "memory"}
    keyed = rows[["experiment", "config_hash", "metric", "value", "unit", "method", "model", "seed", "path_kind"]]
    assert keyed.notna().all().all()


def test_the_study_prints_its_committed_rows(rows):
    console = Console(width=300, file=io.StringIO())
    console.print(AttentionSpeed().table(rows, "committed"))
    printed = console.file.getvalue()
    assert all(f"committed · {part}" in printed for part in set(rows.part))
    assert "peak bfloat16" in printed


def test_the_table_of_bars_lists_every_shape_and_what_is_missed(rows):
    console = Console(width=300, file=io.StringIO())
    console.print(targets_table(rows))
    (line,) = (x for x in console.file.getvalue().splitlines() if "total (int8_graph), 32-row blocks" in x)
    cells = [cell.strip() for cell in line.split("│")[3:-1]]
    peaks = rows[(rows.part == "memory") & (rows.method == "total (int8_graph), 32-row blocks, leading_query")].value
    assert len(peaks) == 8
    assert cells == ["≤ 256", *(f"{peak:.3g}" + (" missed" if peak > 256 else "") for peak in peaks)]


def test_a_bar_is_missed_on_the_wrong_side_of_it_alone(rows):
    frame = rows[(rows.model == "qwen2-0.5b") & (rows.dtype == "float32")].copy()
    at = {"attend, per row": ("times faster than sdpa", 2.4), "select": ("share of sdpa", 0.07)}
    for method, (metric, value) in at.items():
        frame.loc[(frame.method == method) & (frame.metric == metric) & (frame.part == "chunk"), "value"] = value
    console = Console(width=300, file=io.StringIO())
    console.print(targets_table(frame))
    printed = console.file.getvalue()
    assert "2.4 missed" in printed
    assert "0.07 missed" in printed
    frame.loc[(frame.method == "select") & (frame.metric == "share of sdpa"), "value"] = 0.03
    console.print(targets_table(frame))
    assert "0.03 missed" not in console.file.getvalue()
