"""Rows of lm-evaluation-harness, of results that are written here."""

import math
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.harness_results import HarnessRow, _chance, _source, task_rows
from experiments.publish import read_reference
from shadowattn.reporting.rows import write_rows
from tests.reporting.test_reporting import rows as some_rows

ROW = HarnessRow(**vars(some_rows()[0]) | {"context_tokens": 64})


def results(answers, *, chance=0.0, tokens=60, cut=0, better=True):
    mean = sum(answers) / len(answers)
    return {
        "task": {
            "version": "1.0",
            "shots": 0,
            "n": len(answers),
            "source": "questions.jsonl 0123456789ab",
            "chance": chance,
            "tokens": tokens,
            "side": "prompts, from the left",
            "cut": cut,
            "higher_is_better": {"acc": better},
            "metrics": {"acc,none": mean, "acc_stderr,none": math.nan},
            "questions": {"acc,none": list(map(float, answers))},
        }
    }


def of_method(answers, dense, **options) -> dict[str, HarnessRow]:
    made = task_rows(HarnessRow(**vars(ROW) | {"method": "sparse"}), results(answers, **options), results(dense, **options))
    return {row.metric: row for row in made}


def test_a_single_question_shows_no_difference():
    found = of_method([1], [0], chance=0.25)
    assert math.isnan(found["acc_change"].low)
    assert found["acc_change"].flag.endswith("above dense attention; no difference can be shown")


def test_questions_that_all_improve_show_no_difference_where_they_are_two():
    """Their standard error is 0, and says nothing."""
    found = of_method([1, 1], [0, 0])
    assert found["acc_change"].error == 0
    assert "no difference can be shown" in found["acc_change"].flag


def test_a_difference_of_many_questions_is_shown():
    dense = [1] * 30 + [0] * 10
    assert of_method([0] * 40, dense, chance=0.25)["acc_change"].flag == ""
    assert of_method([1] * 40, dense, chance=0.25)["acc_change"].flag == "above dense attention"
    fewer = of_method([0.1] * 40, [0.2 + index / 1000 for index in range(40)], better=False)["acc_change"]
    assert fewer.flag == "above dense attention"
    assert fewer.low < fewer.value < fewer.high < 0


def test_a_metric_that_is_no_mean_of_questions_has_no_change_and_no_interval():
    """The harness keeps the log-likelihoods of a perplexity, of which more is better and the other way round."""
    made = []
    for value, loss in ((73.1, -4.29), (24.4, -3.19)):
        made.append(results([loss] * 8, better=False))
        made[-1]["task"]["metrics"] = {"perplexity,none": value}
        made[-1]["task"]["questions"] = {"perplexity,none": [loss] * 8}
    (row,) = task_rows(HarnessRow(**vars(ROW) | {"method": "sparse"}), *made)
    assert (row.metric, row.value) == ("perplexity", 73.1)
    assert math.isnan(row.low)


def test_a_mean_of_graded_questions_has_students_interval():
    rows = of_method([0.1, 0.4, 0.3, 0.2], [0.5] * 4)
    assert rows["acc"].value == pytest.approx(0.25)
    assert rows["acc"].low < 0.25 < rows["acc"].high


def test_what_dense_attention_cannot_do_is_said_of_every_row():
    guessed, nothing = "dense cannot be told from chance (0.25)", "dense may score below 0.05"
    for dense, chance, reason in (([1, 0, 0, 0] * 5, 0.25, guessed), ([0] * 20, 0.0, nothing)):
        for row in of_method([1] * 20, dense, chance=chance).values():
            assert row.flag.startswith(f"{reason}: no difference is claimed")
    dense_rows = task_rows(ROW, results([0] * 20), results([0] * 20))
    assert [row.flag for row in dense_rows] == ["dense may score below 0.05: no difference is claimed"]


def test_cut_prompts_are_counted_in_every_row():
    for row in of_method([1] * 20, [1] * 20, tokens=90, cut=3).values():
        assert row.flag.startswith("3 of 20 prompts cut to the context of 64 tokens, from the left")
        assert (row.tokens, row.context_tokens) == (90, 64)


def test_chance_is_that_of_the_choices_of_each_question():
    task = SimpleNamespace(OUTPUT_TYPE="multiple_choice", doc_to_choice=lambda doc: doc["choices"])
    samples = [{"doc": {"choices": "ab"}, "target": 0}, {"doc": {"choices": "abcd"}, "target": [1, 3, 3]}]
    assert _chance(task, samples) == 0.5
    assert _chance(task, [samples[0], {"doc": {"choices": "abcd"}, "target": 1}]) == 0.375
    assert _chance(SimpleNamespace(OUTPUT_TYPE="generate_until"), samples) == 0


def test_questions_of_the_hub_are_named_by_their_revision_and_content():
    config = SimpleNamespace(dataset_path="some/set", dataset_name="easy", dataset_kwargs={"revision": "abc"})
    samples = [{"doc_id": index, "doc_hash": str(index)} for index in range(3)]
    source = _source(config, samples)
    assert source.startswith("some/set easy abc questions ")
    assert _source(config, samples[::-1] * 2) == source
    assert _source(config, samples[1:]) != source
    assert _source(SimpleNamespace(dataset_path=None, dataset_name=None, dataset_kwargs=None), samples).startswith("questions ")


def test_published_rows_without_an_error_keep_their_numbers(tmp_path):
    frame = write_rows([HarnessRow(**vars(ROW) | {"error": 0.1}), ROW], tmp_path / "rows.parquet")
    frame.to_csv(tmp_path / "rows.csv", index=False)
    read = read_reference(tmp_path / "rows.csv")
    assert all(pd.api.types.is_float_dtype(read[name]) for name in ("error", "low", "high"))
    assert read.error[0] == pytest.approx(0.1)
