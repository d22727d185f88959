import json
import shutil

import pandas as pd
import pytest

from experiments.lm_eval_tasks.questions import pieces, records
from experiments.studies.lm_eval import LmEval
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError
from shadowattn.models import load_bundled
from tests.evaluation.test_harness import write_tasks
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "tasks").mkdir()
    return write_tasks(tmp_path / "tasks", questions=3)


@pytest.fixture
def ending_folder(tiny_folder, tmp_path):
    """The tiny model, whose tokenizer has an EOS token."""
    from transformers import AutoTokenizer

    copy = shutil.copytree(tiny_folder, tmp_path / "ending")
    tokenizer = AutoTokenizer.from_pretrained(copy)
    tokenizer.eos_token = tokenizer.unk_token
    tokenizer.save_pretrained(copy)
    return copy


@pytest.mark.filterwarnings("ignore")  # of the harness and what it imports
def test_dense_and_sparse_in_one_table(run, folder, ending_folder, capsys):
    asked = [
        f"model.path={ending_folder}",
        "tasks=[choice,answer,text]",
        f"study.include_path={folder}",
        "study.limit=2",
        "retentions=[0.3]",
    ]
    rows = pd.read_parquet(run("lm_eval", "+exp=lm_eval", *asked) / "rows.parquet")
    assert set(rows.method) == {"dense", "npu_full", "shadowattn", "int8_uniform"}
    assert set(rows.n) == {2}
    assert dict(zip(rows.task, rows.version, strict=True)) == {"choice": "1.5", "answer": "2.0", "text": "1.0"}
    values = rows.set_index(["method", "task", "metric"]).value
    assert 0 <= values["dense", "choice", "acc"] <= 1
    for method in ("npu_full", "shadowattn", "int8_uniform"):
        change = values[method, "choice", "acc"] - values["dense", "choice", "acc"]
        assert values[method, "choice", "acc_change"] == pytest.approx(change)
    assert not any(metric.endswith("_stderr") for metric in rows.metric)
    assert values["shadowattn", "text", "word_perplexity"] != values["dense", "text", "word_perplexity"]
    shown = capsys.readouterr().out
    assert "choice v1.5" in shown
    assert "change against dense" in shown
    changes = rows[rows.metric == "acc_change"]
    assert changes.flag.str.contains("no difference can be shown").tolist() == ((changes.low <= 0) & (changes.high >= 0)).tolist()
    flagged = changes[changes.value > 0]
    assert all("above dense attention" in flag for flag in flagged.flag)
    assert ("above dense attention:" in shown) == any("above dense attention" in flag for flag in rows.flag)
    told = rows[rows.metric.str.startswith("acc")]
    assert told.flag.str.contains("dense cannot be told from chance (0.5): no difference is claimed", regex=False).all()
    assert "dense cannot be told from chance (0.5): no difference is claimed: choice dense at 1" in shown
    assert rows[rows.task == "text"].low.isna().all()
    assert not rows.flag.str.contains("cut to the context").any()
    assert set(rows.source) == {f"questions.jsonl {sha256(folder / 'questions.jsonl')[:12]}"}
    assert set(zip(rows.task, rows.cut, strict=True)) == {
        *(("choice", "prompts, from the left"), ("answer", "prompts, from the left"), ("text", "none"))
    }
    assert not rows.chat.any()
    assert (rows.tokens > 50).all()
    assert (rows.tokens == rows.context_tokens).all()


@pytest.mark.filterwarnings("ignore")
def test_cut_prompts_are_told_or_refused(run, folder, ending_folder, capsys):
    """The model's context is made shorter than every prompt."""
    config = json.loads((ending_folder / "config.json").read_text())
    (ending_folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 128}))
    asked = [f"model.path={ending_folder}", "tasks=[choice,answer]", f"study.include_path={folder}", "study.limit=3"]
    with pytest.raises(SystemExit):
        run("lm_eval", "+exp=lm_eval", *asked, "study.allow_cut=false")
    assert "choice: expected prompts of at most the context of 128 tokens, got " in capsys.readouterr().err
    rows = pd.read_parquet(run("lm_eval", "+exp=lm_eval", *asked, "retentions=[0.3]") / "rows.parquet")
    assert len(set(rows.method)) > 2
    for task in ("choice", "answer"):
        flags = rows[rows.task == task].flag
        assert flags.str.contains("prompts cut to the context of 128 tokens, from the left").all()
        assert set(rows[rows.task == task].context_tokens) == {128}
        assert (rows[rows.task == task].tokens > 128).all()
    assert "prompts cut to the context of 128 tokens, from the left: choice dense at 1" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_what_the_harness_does_not_have_is_refused_before_any_work(run, folder, capsys):
    with pytest.raises(SystemExit):
        run("lm_eval", "+exp=lm_eval", "tasks=[choice,psychic]", f"study.include_path={folder}")
    assert "psychic: the harness has no such task" in capsys.readouterr().err
    (folder / "questions.jsonl").unlink()
    with pytest.raises(SystemExit):
        run("lm_eval", "+exp=lm_eval", "tasks=[choice]", f"study.include_path={folder}", "seed=1")
    assert "tasks: their data could not be read" in capsys.readouterr().err


def test_graphs_of_fixed_lengths_are_refused(run, folder, capsys):
    with pytest.raises(SystemExit):
        run("lm_eval", "+exp=lm_eval", "tasks=[choice]", f"study.include_path={folder}", "estimator=int8_graph")
    assert "shadowattn: int8_graph runs graphs of fixed lengths (bank)" in capsys.readouterr().err


def test_settings_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"^tasks: expected the names"):
        LmEval()
    for wrong in ({"limit": 0}, {"shots": -1}, {"include_path": str(tmp_path / "nowhere")}):
        with pytest.raises(InputError, match=f"study.{next(iter(wrong))}"):
            LmEval(tasks=["arc_easy"], **wrong)


def test_a_changed_task_is_measured_again(folder):
    study = LmEval(tasks=["choice"], include_path=str(folder))
    before = study.inputs()
    (folder / "choice.yaml").write_text((folder / "choice.yaml").read_text() + "# another\n")
    assert study.inputs() != before


@pytest.mark.filterwarnings("ignore")
def test_changed_questions_in_another_folder_are_measured_again(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere.jsonl"
    shutil.move(folder / "questions.jsonl", elsewhere)
    for task in folder.glob("*.yaml"):
        task.write_text(task.read_text().replace(str(folder / "questions.jsonl"), str(elsewhere)))
    before = LmEval(tasks=["choice"], include_path=str(folder)).inputs()
    assert LmEval(tasks=["choice"], include_path=str(folder)).inputs() == before
    elsewhere.write_text(elsewhere.read_text().replace('"answer": 0', '"answer": 1'))
    assert LmEval(tasks=["choice"], include_path=str(folder)).inputs() != before


@pytest.mark.filterwarnings("ignore")
def test_the_bundled_tasks_need_a_text_file_at_most(tmp_path, monkeypatch):
    from lm_eval import simple_evaluate

    from shadowattn.evaluation.harness import ShadowAttnLM

    (tmp_path / "valid.txt").write_text("".join(f" Line {at} of a text that goes on and on. \n" for at in range(4000)))
    monkeypatch.chdir(tmp_path)
    study = LmEval(tasks=["records_choice", "wikitext_pieces"], include_path="bundled")
    read = study.inputs()
    assert read["data"] == {"records_choice": [], "wikitext_pieces": [sha256(tmp_path / "valid.txt")]}
    assert set(read["own_tasks"]) == {"__init__.py", "questions.py", "records_choice.yaml", "wikitext_pieces.yaml"}
    loaded = load_bundled()
    model = ShadowAttnLM(loaded.model, tokenizer=loaded.tokenizer, method=None)
    found = simple_evaluate(model, tasks=list(study.tasks), task_manager=study._manager, limit=1, bootstrap_iters=0)
    assert found["versions"] == {"records_choice": 1.0, "wikitext_pieces": 1.0}
    assert found["results"]["records_choice"]["acc,none"] in (0, 1)
    assert 0 < found["results"]["wikitext_pieces"]["bits_per_byte,none"] < 8


def test_bundled_questions_are_what_they_say(tmp_path):
    asked = records(documents=5, pairs=9, choices=4, seed=1)["test"]
    assert asked.to_list() == records(documents=5, pairs=9, choices=4, seed=1, version=1.0)["test"].to_list()
    for one in asked:
        *lines, question = one["prompt"].split("\n")
        key = question.removeprefix(": ").removesuffix(":")
        assert lines.count(f": {key}: {one['choices'][one['answer']]}") == 1
        values = [line.split(": ")[-1] for line in lines if line]
        assert len(values) == 9
        assert len(set(one["choices"])) == 4
        assert set(one["choices"]) <= set(values)
    (tmp_path / "text.txt").write_text("one two\n" * 10)
    made = pieces(path=str(tmp_path / "text.txt"), documents=3, characters=20)["test"]
    assert [one["text"] for one in made] == ["one two\none two\n"] * 3
    with pytest.raises(ValueError, match="expected text for 9 pieces of 20 characters, got 4"):
        pieces(path=str(tmp_path / "text.txt"), documents=9, characters=20)


@pytest.mark.filterwarnings("ignore")
def test_a_method_whose_heads_all_go_dense_says_so(run, folder, ending_folder, capsys):
    asked = [f"model.path={ending_folder}", "tasks=[choice]", f"study.include_path={folder}", "study.limit=2"]
    rows = pd.read_parquet(
        run("lm_eval", "+exp=lm_eval", *asked, "retentions=[0.3]", "allocator=uniform", "dense_above=0.1") / "rows.parquet"
    )
    flagged = rows.flag.str.contains("the sparse path was not used: every head went dense")
    assert flagged.tolist() == (rows.retention < 1).tolist()
    assert "the sparse path was not used: every head went dense: " in capsys.readouterr().out
