"""An answer from the command line, on a tiny model and on the bundled one."""

import io
import sys
from types import SimpleNamespace

import pandas as pd
import pytest

from experiments.studies import generate
from experiments.studies.generate import Generate
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]

FIRST = ["+exp=generate", "study.new_tokens=12"]


def test_an_answer_and_where_its_time_goes(run, capsys):
    folder = run("generate", *FIRST, "prompt=The fox, it's quick: {x}", "retention=0.3")
    rows = pd.read_parquet(folder / "rows.parquet")
    text = rows[rows.metric == "new_tokens"].text.item()
    assert text in capsys.readouterr().out.replace("\n", "")
    assert set(rows[rows.metric == "time"].phase) == {"prefill", "decode"}
    assert set(rows[rows.metric == "time"].stage) == {"blocks", "rotary embedding", "attention", "head"}
    whole = rows[rows.stage == ""].set_index("metric").value
    times = rows[rows.metric == "time"].groupby("phase").value.sum()
    assert times["prefill"] <= whole["time_to_first_token"]
    assert whole["compile_seconds"] > 0
    assert 0.3 < whole["density"] < 0.5
    made = whole["new_tokens"]
    assert whole["reader_tokens_per_second"] == pytest.approx(5 * made / len(text.split()))  # five words a second
    seconds = whole["time_to_first_token"] + (made - 1) / whole["tokens_per_second"]
    assert whole["cpu_share"] == pytest.approx(whole["cpu_seconds"] / seconds)
    assert whole["cpu_seconds"] > 0
    prompt = len("The fox, it's quick: {x}")
    assert whole["prefill_tokens_per_second"] == pytest.approx(prompt / whole["time_to_first_token"])
    assert whole["kv_cache"] < whole["peak_memory"]
    assert set(rows.prompt_tokens) == {len("The fox, it's quick: {x}")}
    assert set(rows.path_kind) == {"timing"}
    assert (folder / "generation.png").is_file()


INT8 = ["engine.precision=w8a8", "engine.smooth=0.5", "engine.calibration_tokens=64", "engine.calibration_windows=1"]


@pytest.mark.parametrize("engine", [INT8, ["engine.attention_dtype=bfloat16"], ["engine.head=int8"]])
def test_other_engines_answer_too(run, engine):
    rows = pd.read_parquet(run("generate", *FIRST, "prompt=The fox", "engine.chunk_tokens=8", *engine) / "rows.parquet")
    assert rows[rows.metric == "new_tokens"].value.item() <= 12


def test_on_a_terminal_a_token_is_shown_before_the_next_is_made(monkeypatch):
    shown, seen, closed = io.StringIO(), [], []
    shown.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", shown)

    def tokens():
        for token in "abc":
            seen.append(shown.getvalue())
            yield token

    stream = SimpleNamespace(text="a b c ", add=lambda token: f"{token} ", rest=lambda: "")
    assert generate._streamed(tokens(), stream, SimpleNamespace(close=lambda: closed.append(shown.getvalue()))) == "a b c "
    assert seen == ["", "a ", "a b "]
    assert closed[0] == ""
    assert shown.getvalue() == "a b c \n"


@pytest.mark.parametrize(("estimator", "chunk"), [("int8_fused", 8), ("int8_graph", 16)])
def test_attention_takes_the_engines_chunks_unless_graphs_estimate(run, monkeypatch, estimator, chunk):
    made, build = [], generate.build_engine
    monkeypatch.setattr(generate, "build_engine", lambda *asked: made.append(build(*asked)) or made[-1])
    sizes = ["engine.chunk_tokens=8", "graphs.chunk_tokens=16", f"estimator={estimator}"]
    run("generate", *FIRST, "prompt=The quick brown fox", "retention=0.3", *sizes)
    assert [engine.attention.chunk_tokens for engine in made] == [chunk]


def test_memory_that_the_system_does_not_tell_is_left_out(run, monkeypatch):
    monkeypatch.setattr(generate, "begin_peak", lambda: False)
    rows = pd.read_parquet(run("generate", *FIRST, "prompt=The fox") / "rows.parquet")
    assert "time_to_first_token" in set(rows.metric)
    assert "peak_memory" not in set(rows.metric)


def test_keys_are_selected_in_decoding_too(run):
    texts = {}
    for decode in ("dense", "shared"):
        options = [f"experiment={decode}", f"decode={decode}", "prompt=The fox", "retention=0.1"]
        rows = pd.read_parquet(run(decode, *FIRST, *options) / "rows.parquet")
        texts[decode] = rows[rows.metric == "new_tokens"].text.item()
    assert texts["dense"] != texts["shared"]


def test_drafts_change_no_token(run):
    texts = []
    for name, more in (("plain", []), ("drafted", ["study.drafts=3"])):
        rows = pd.read_parquet(run(name, *FIRST, f"experiment={name}", "prompt=again and again and", *more) / "rows.parquet")
        texts.append(rows[rows.metric == "new_tokens"].text.item())
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([], "prompt: expected a text or a file, got neither; set prompt='TEXT' or study.path=FILE"),
        (["prompt=a", "study.path=b"], "expected a text or a file, got both"),
        (["study.path=missing.txt"], "study.path: expected a text file, got 'missing.txt'"),
        (["prompt=a", "study.new_tokens=600"], "the model's context is 512 tokens, got a prompt of 1"),
        (["prompt=a", "study.new_tokens=0"], "study.new_tokens: expected at least 1"),
        (["prompt=a", "study.chat=true"], "study.chat: expected a tokenizer with a chat template"),
        (["prompt=a", "study.temperature=-1"], "temperature: expected a number of at least 0"),
        (["prompt=a", "engine.precision=int3"], "engine.precision: expected one of float32"),
        (["prompt=a", "engine.precision=w4"], "set engine.weights=constants"),
        (
            ["prompt=a", "engine.precision=w4", "engine.weights=constants", "engine.group=40"],
            "engine.group: expected a divisor of",
        ),
        (["prompt=a", "engine.chunk_tokens=0"], "engine.chunk_tokens: expected an integer of 1"),
        (["prompt=a", "engine.attention_dtype=float16"], "engine.attention_dtype: expected one of float32, bfloat16"),
        (["prompt=a", "study.drafts=8", "engine.chunk_tokens=8"], "study.drafts: expected fewer than engine.chunk_tokens=8"),
        (
            ["prompt=a", "study.drafts=2", "estimator=h2o", "decode=shared"],
            "study.drafts: expected an estimator that ranks by present",
        ),
    ],
)
def test_what_cannot_be_answered_is_refused_before_any_work(run, capsys, monkeypatch, settings, message):
    monkeypatch.setattr(Generate, "measure", None)
    with pytest.raises(SystemExit):
        run("generate", *FIRST, *settings)
    assert message in capsys.readouterr().err
