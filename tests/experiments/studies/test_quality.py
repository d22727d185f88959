"""What the rows of a quality study say of its task's questions."""

import json
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from experiments.asked import Asked
from experiments.studies.quality import _score_rows
from shadowattn.artifacts import sha256
from shadowattn.evaluation.tasks import Choice, ExactMatch
from shadowattn.reporting.rows import QualityRow
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.reporting.test_reporting import rows as some_rows

__all__ = ["run", "tiny_folder"]  # fixtures

ROW = QualityRow(**vars(some_rows()[0]))
EXACT = ExactMatch(torch.zeros(90, dtype=torch.int64), torch.zeros(6, dtype=torch.int64))
GUESSED = Choice(torch.zeros(95, dtype=torch.int64), torch.arange(4), 0)


def rows_of(scores, dense, question=EXACT) -> dict[str, QualityRow]:
    asked = Asked("needle_note", 96, True, [question] * len(dense), "generated, seed 0", "held-out text, on both sides")
    cell, dense_cell = SimpleNamespace(scores=scores), SimpleNamespace(scores=dense)
    return {row.metric: row for row in _score_rows(asked, ROW, cell, dense_cell)}


def test_a_change_has_a_paired_interval_and_says_whether_it_can_be_shown():
    found = rows_of([1.0] * 14 + [0.0] * 6, [1.0] * 16 + [0.0] * 4)
    change = found["accuracy_change"]
    assert change.value == pytest.approx(-0.1)
    assert found["accuracy_change_low"].value < change.value < found["accuracy_change_high"].value
    assert change.flag == "no difference can be shown"
    assert rows_of([0.0] * 20, [1.0] * 20)["accuracy_change"].flag == ""
    assert found["accuracy_low"].value < found["accuracy"].value < found["accuracy_high"].value
    assert found["accuracy"].flag == ""


@pytest.mark.parametrize(
    ("dense", "question", "reason"),
    [
        ([0.0] * 20, EXACT, "dense may score below 0.05"),
        ([1.0, 0.0, 0.0, 0.0] * 5, GUESSED, "dense cannot be told from chance (0.25)"),
    ],
)
def test_every_row_says_where_dense_attention_cannot_do_the_task(dense, question, reason):
    found = rows_of([1.0] * 20, dense, question)
    assert len(found) == 6
    assert all(row.flag.startswith(f"{reason}: no difference is claimed") for row in found.values())
    cell = SimpleNamespace(scores=dense)
    asked = Asked("octopus", 96, False, [question] * 20, "generated, seed 0", "none")
    assert {row.flag for row in _score_rows(asked, ROW, cell, cell)} == {f"{reason}: no difference is claimed"}


def test_one_question_has_no_change():
    assert set(rows_of([1.0], [1.0])) == {"accuracy", "accuracy_low", "accuracy_high"}


def test_a_row_of_questions_can_be_read_alone():
    row = rows_of([1.0] * 20, [1.0] * 20)["accuracy"]
    assert (row.task, row.tokens, row.context_tokens, row.chat, row.n) == ("needle_note", 96, 96, True, 20)
    assert (row.source, row.cut) == ("generated, seed 0", "held-out text, on both sides")


def test_rows_on_a_file_of_questions_say_so_and_are_flagged(run, tmp_path, capsys):
    functions = [{"name": f"do_{at}", "description": f"Does {at}."} for at in range(6)]
    queries = [{"query": f"please do {at}", "function": f"do_{at}"} for at in range(4)]
    for name, records in (("functions", functions), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(json.dumps(record) for record in records))
    model = ["model=random", "~model.path", "model.shape=phonelm_1_5b", "model.layers=2", "model.vocabulary=2560"]
    task = ["task=octopus", f"task.path={tmp_path / 'queries.jsonl'}", f"task.functions={tmp_path / 'functions.jsonl'}"]
    task += ["task.documents=2", "task.shots=1", "task.top=2"]
    rows = pd.read_parquet(run("default", *model, *task, "graphs.chunk_tokens=64", "estimator=oracle") / "rows.parquet")
    about = rows[rows.metric.str.startswith("accuracy")]
    assert set(about.metric) == {"accuracy", "accuracy_low", "accuracy_high"} | {
        *("accuracy_change", "accuracy_change_low", "accuracy_change_high")
    }
    assert about.flag.str.startswith("dense ").all()
    assert about.flag.str.contains("no difference is claimed").all()
    assert "no difference is claimed: octopus dense at 1" in " ".join(capsys.readouterr().out.split())
    assert set(about.task) == {"octopus"}
    files = (f"{name}.jsonl {sha256(tmp_path / f'{name}.jsonl')[:12]}" for name in ("queries", "functions"))
    assert set(about.source) == {", ".join(files)}
    assert set(about.cut) == {"none"}
    assert (about.tokens == about.context_tokens).all()
    others = rows[~rows.metric.str.startswith("accuracy")]
    assert set(others.task) == set(others.source) == set(others.cut) == {""}
    assert not rows.drop(columns="value").isna().any(axis=None)
