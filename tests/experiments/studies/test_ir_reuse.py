"""The study of how a decoder becomes graphs, tiny."""

from functools import cache

import pandas as pd
import pytest

from experiments.studies import ir_reuse
from experiments.studies.ir_reuse import FORMS
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]

SHORT = ["study.layers=[6]", "study.hidden=128", "study.past=16", "study.chunk_tokens=8", "study.rounds=2"]


def test_every_form_is_compiled_and_takes_its_turn(run, monkeypatch, capsys):
    """In this process, which converts the decoder once for all forms: a process of its own runs the same functions."""
    monkeypatch.setattr(ir_reuse, "in_own_process", lambda measure, *of: measure(*of))
    monkeypatch.setattr(ir_reuse.Parts, "of", cache(ir_reuse.Parts.of))
    folder = run("study_ir_reuse", "+exp=study_ir_reuse", *SHORT)
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(zip(rows.phase, rows.method, strict=True)) == {(phase, form) for phase in ("decode", "prefill") for form in FORMS}
    counts = rows[(rows.phase == "decode") & rows.metric.isin(["graphs", "calls"])]
    counts = counts.pivot_table(index="method", columns="metric", values="value").astype(int)
    assert counts.loc["whole"].tolist() == counts.loc["loop"].tolist() == [1, 1]
    assert counts.loc["a graph a layer"].to_dict() == {"graphs": 6, "calls": 6}
    assert counts.loc["one graph for all"].to_dict() == {"graphs": 1, "calls": 6}
    assert counts.graphs["NPUW REP"] < counts.calls["NPUW REP"] <= 12
    assert counts.loc["NPUW NONE"].tolist() == [1, 1]
    assert counts.loc["NPUW REG unfolded"].tolist() == [counts.calls["NPUW REG"]] * 2
    steps = rows[rows.phase == "decode"].pivot_table(index="method", columns="metric", values="value")
    assert steps.call_s.tolist() == pytest.approx((steps.step_s / steps.calls).tolist())
    plans = rows[rows.phase == "decode"].drop_duplicates("method").set_index("method").plan
    assert sum(int(run) for run in plans["NPUW REP"].split(" + ")) == counts.calls["NPUW REP"]
    assert counts.loc["stateful"].tolist() == [1, 1]
    assert counts.graphs["NPUW LLM"] < counts.calls["NPUW LLM"] <= 12
    prompts = rows[rows.phase == "prefill"].drop_duplicates("method").set_index("method").plan
    assert "5·(1 + 1)" in prompts["NPUW LLM chunked"]  # attention of every layer by itself
    assert prompts["NPUW LLM chunked STATIC"] == plans["NPUW LLM chunked STATIC"] == plans["NPUW LLM"]
    assert counts.loc["NPUW LLM BEST_PERF"].tolist() == [1, 1]
    times = rows[rows.metric.isin(["compile_s", "cached_s", "step_s", "step_times_whole"])]
    assert (times.value > 0).all()
    assert set(times[times.metric == "cached_s"].method) == set(FORMS)
    handed = rows[(rows.phase == "decode") & (rows.metric == "handed_bytes")].set_index("method").value
    cached = 4 * 6 * 2 * 17 * 2 * 64  # float32 keys and values of 6 layers: 17 tokens, 2 heads of 64
    assert handed["converted"] == cached + 4 * 4096
    assert handed["whole"] == handed["a graph a layer"] - 4 * 5 * 128 == handed["one graph for all"] - 4 * 5 * 128
    assert handed["NPUW REG"] > handed["converted"]
    assert "NPUW LLM" not in handed
    copied = rows[rows.metric == "copies_s"]
    assert set(copied[copied.phase == "decode"].method) == set(handed.index)
    assert (copied.value > 0).all()
    first = rows[rows.metric.isin(["first_step_s", "first_step_times_whole"])]
    assert set(zip(first.phase, first.method, strict=True)) == {("decode", form) for form in FORMS if "LLM" in form}
    assert (first.value > 0).all()
    assert (rows.path_kind == "timing").all()
    assert (folder / "ir_reuse.png").is_file()
    assert "one graph for all" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("study.forms=[folded]", "study.forms: expected one of whole"),
        ("study.layers=[]", "study.layers: expected one or more"),
        ("study.layers=[1]", "study.layers: expected at least 2"),
        (
            "study.layers=[6,4]",
            "study.layers: expected at least 6 for NPUW LLM, NPUW LLM BEST_PERF, NPUW LLM REP, NPUW LLM chunked,",
        ),
        ("study.chunk_tokens=100", "study.chunk_tokens: expected a power of two"),
        ("study.rounds=63", "study.rounds: expected at most 62"),
        ("study.shape=gpt5", "study.shape: expected one of smollm2"),
    ],
)
def test_what_makes_no_sense_is_refused(run, setting, message, capsys):
    with pytest.raises(SystemExit):
        run("study_ir_reuse", "+exp=study_ir_reuse", setting)
    said = capsys.readouterr()
    assert message in said.out + said.err
