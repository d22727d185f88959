"""Time to the first token, on a tiny model."""

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import openvino as ov
import pandas as pd
import pytest
import torch

from experiments.engines import build_engine
from experiments.own_process import in_own_process
from experiments.studies import prefill_runners, ttft
from experiments.studies.prefill_runners import GenAI, LlamaCpp, Stateful, _pulled, exported
from experiments.studies.ttft import reading_bytes
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.whole import llm_graph
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.tiny import tiny_model

__all__ = ["run", "tiny_folder"]

SHORT = ["+exp=ttft", "study.prompts=[24,48]", "study.rounds=2", "study.new_tokens=3", "engine.calibration_tokens=64"]
SHORT += ["engine.calibration_windows=1", "evaluation.context_tokens=256"]


@pytest.fixture(autouse=True)
def here(monkeypatch):
    """A process of its own runs the same functions."""
    monkeypatch.setattr(ttft, "in_own_process", lambda measure, *of: measure(*of))


def test_every_runner_reads_every_prompt(run):
    folder = run("ttft", *SHORT)
    rows = pd.read_parquet(folder / "rows.parquet")
    names = {"transformers", "transformers_bfloat16", "engine_float32", "engine_w8a8"}
    names |= {"engine_w8a8_20", "engine_w8a8_10", "engine_w8a8_5"}
    for metric in ("time_to_first_token", "times_faster", "cpu_seconds", "tokens_per_second"):
        of = rows[rows.metric == metric]
        assert set(zip(of.method, of.context_tokens, strict=True)) == {(name, tokens) for name in names for tokens in (24, 48)}
        assert (of.path_kind == "timing").all()
        assert (of.low <= of.value).all()
        assert (of.value <= of.high).all()
    first = rows[rows.metric == "time_to_first_token"]
    assert (first.value > 0).all()
    assert (rows[(rows.metric == "times_faster") & (rows.method == "transformers")].value == 1).all()
    for metric in ("reading_bytes", "process_peak_bytes"):
        peaks = rows[rows.metric == metric]
        assert set(zip(peaks.method, peaks.context_tokens, strict=True)) == {(name, 48) for name in names}
    assert set(rows[rows.method == "engine_w8a8_5"].output_layer) == {"int8"}
    loss = rows[rows.metric == "loss_increase"].set_index("method").value
    assert set(loss.index) == names
    assert loss["transformers"] == 0
    assert abs(loss["engine_float32"]) < 1e-4 < abs(loss["engine_w8a8"])
    assert (rows[rows.metric == "loss_increase"].path_kind == "quality").all()
    assert rows.set_index("method").retention["engine_w8a8_10"].unique().tolist() == [0.1]
    density = rows[rows.metric == "density"].set_index("method").value
    assert (density[["transformers", "engine_float32", "engine_w8a8"]] == 1).all()
    assert 0.1 <= density["engine_w8a8_10"] < density["engine_w8a8_20"] < 0.3
    assert (folder / "ttft.png").is_file()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("study.baseline=nobody", "study.baseline: expected one of transformers, transformers_bfloat16"),
        ("study.prompts=[511]", "study.prompts: the model's context is 512 tokens, got 511 and study.new_tokens=3"),
        ("study.prompts=[]", "study.prompts: expected at least one length"),
        ("study.rounds=0", "study.rounds: expected at least 1"),
        ("study.rounds=3000", "held-out tokens"),
        ("study.runners.transformers.dtype=int8", "dtype: expected one of float32, bfloat16"),
        ("study.runners.engine_w8a8_5.keep=2", "retention"),
        ("study.runners.engine_w8a8_5.estimator=nobody", "estimator: expected one of"),
        ("study.runners.engine_w8a8_5.estimator=int8_fused", "flat_share: expected estimator=hierarchical beside it, got int8"),
        ("study.runners.engine_w8a8_5.keep=1", "flat_share: expected a share of the keys below 1"),
        ("study.runners.engine_w8a8_5.query_block=8", "Hierarchical: makes lists for single rows, got query_block=8"),
        ("evaluation.context_tokens=128", "flat_share: expected windows of 256 tokens or more"),
        ("study.runners.engine_w8a8_5.flat_share=2", "flat_share: expected a number of 0 … 1"),
        ("study.runners.engine_w8a8_5.candidates=0.5", "candidates: expected 1 or more times the budget"),
        (
            "engine.head=int8",
            "engine.head: expected its default, since this study does not take it from there; use study.runners",
        ),
    ],
)
def test_what_cannot_be_timed_is_refused(run, capsys, setting, message):
    with pytest.raises(SystemExit):
        run("ttft", *SHORT, setting)
    assert message in capsys.readouterr().err


def test_a_first_look_is_measured_before_any_reader_is_and_spares_heads(run, monkeypatch):
    """What is measured on calibration text would otherwise count as memory of the first reader that asks for it."""
    known = []

    def watched(measure, lab, *of):
        known.append((measure.__name__, any(lab.artifacts.glob("first_look-*/result.json"))))
        return measure(lab, *of)

    built = []

    def build(lab, method, form, **options):
        built.append(method)
        return build_engine(lab, method, form, **options)

    monkeypatch.setattr(ttft, "in_own_process", watched)
    monkeypatch.setattr(prefill_runners, "build_engine", build)
    others = ("transformers_bfloat16", "engine_float32", "engine_w8a8_20", "engine_w8a8_10")
    rows = pd.read_parquet(run("ttft", *SHORT, *(f"~study.runners.{name}" for name in others)) / "rows.parquet")
    assert known == [("reading_bytes", True)] * 3 + [("taken_seconds", True)] * 2
    sparse = [method.estimator for method in built if method.retention < 1]
    assert sparse
    assert all(one.flat_share == 0.1 and one.candidates == 1.25 and one.first_look is not None for one in sparse)
    assert rows[rows.method == "engine_w8a8_5"].setting.unique().tolist() == [
        "a first look lets 1.25 times through, 10% of the heads spared"
    ]


def test_memory_is_what_reading_a_prompt_takes():
    """Beside what the runner made once, when it read a short one."""
    made = []

    def read(prompt, new_tokens):
        made.append(np.ones((4 if len(prompt) <= 16 else 8) << 20))  # 32 and 64 MiB
        return [1]

    held = reading_bytes(None, SimpleNamespace(reader=lambda lab, most_tokens: read), list(range(48)))
    assert 60 << 20 < held["reading_bytes"] < 90 << 20
    assert held["process_peak_bytes"] > held["reading_bytes"] + (100 << 20)  # torch alone takes more


def test_a_process_of_its_own_reads_with_the_runs_own_model(run, monkeypatch):
    monkeypatch.setattr(ttft, "in_own_process", in_own_process)
    others = ("transformers_bfloat16", "engine_float32", "engine_w8a8", "engine_w8a8_20", "engine_w8a8_10")
    rows = pd.read_parquet(run("ttft", *SHORT, *(f"~study.runners.{name}" for name in others)) / "rows.parquet")
    assert set(rows[rows.metric == "reading_bytes"].method) == {"transformers", "engine_w8a8_5"}


GENAI = ["+study.runners.genai._target_=experiments.studies.prefill_runners.GenAI"]


def test_openvino_genai_is_asked_for_by_name(run, capsys, tiny_folder, monkeypatch):
    with pytest.raises(SystemExit):
        run("ttft", *SHORT, *GENAI, "+study.runners.genai.path=nowhere.gguf")
    assert "path: expected a GGUF file or an OpenVINO folder, got 'nowhere.gguf'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "openvino_genai", None)
    with pytest.raises(SystemExit):
        run("ttft", *SHORT, *GENAI, f"+study.runners.genai.path={tiny_folder / 'text.txt'}")
    assert "install it with: pip install openvino-genai==2" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    llama = ["+study.runners.llama._target_=experiments.studies.prefill_runners.LlamaCpp"]
    with pytest.raises(SystemExit):
        run("ttft", *SHORT, *llama, f"+study.runners.llama.path={tiny_folder / 'text.txt'}")
    assert "install it with: pip install llama-cpp-python" in capsys.readouterr().err


@pytest.mark.parametrize("prompt", [1, 37])
def test_the_stateful_graph_reads_and_loses_as_the_model_does(prompt):
    model = tiny_model()
    lab, runner = SimpleNamespace(loaded=SimpleNamespace(model=model)), Stateful({"KV_CACHE_PRECISION": "f32"})
    ids = torch.randint(0, 128, (prompt,), generator=torch.Generator().manual_seed(prompt))
    expected = model.generate(
        ids[None], attention_mask=torch.ones(1, prompt, dtype=torch.int64), max_new_tokens=6, min_new_tokens=6, do_sample=False,
        pad_token_id=0,
    )[0, prompt:].tolist()  # fmt: skip
    read = runner.reader(lab, prompt + 6)
    assert [list(read(ids.tolist(), 6)) for _ in range(2)] == [expected, expected]
    windows = torch.randint(0, 128, (2, 30), generator=torch.Generator().manual_seed(9))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill_runners, "_LOGITS_AT_ONCE", 8)
        losses = runner.quality(lab, windows).losses
    torch.testing.assert_close(torch.tensor(losses), window_losses(model, windows, chunk_tokens=30).float(), atol=1e-4, rtol=0)


def test_a_model_in_bfloat16_is_converted_in_float32(monkeypatch):
    """A graph of SmolLM2 that is converted in bfloat16 loses over a nat in prompts of 3000 tokens."""
    model, windows = tiny_model().to(torch.bfloat16), torch.randint(0, 128, (2, 60), generator=torch.Generator().manual_seed(8))
    converted = []
    monkeypatch.setattr(prefill_runners, "llm_graph", lambda model: converted.append(model.dtype) or llm_graph(model))
    found = Stateful({"KV_CACHE_PRECISION": "f32"}).quality(SimpleNamespace(loaded=SimpleNamespace(model=model)), windows).losses
    assert converted == [torch.float32]
    assert model.dtype == torch.bfloat16  # a copy's
    expected = window_losses(model.to(torch.float32), windows, chunk_tokens=60).float()
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-4, rtol=0)


def test_int8_weights_of_a_peer_are_compressed_and_cost_little():
    model, ids = tiny_model(), torch.randint(0, 128, (1, 40), generator=torch.Generator().manual_seed(7))
    expected = model(ids).logits[0].detach()
    found = {}
    for weights in ("float32", "int8"):
        graph = exported(model, weights)
        constants = [node for node in graph.get_ops() if node.get_type_name() == "Constant"]
        assert any(node.get_element_type() == ov.Type.u8 for node in constants) == (weights == "int8")
        request = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
        found[weights] = torch.from_numpy(prefill_runners._step(request, ids[0].tolist(), 40)[0].copy())
    torch.testing.assert_close(found["float32"], expected, atol=1e-4, rtol=0)
    assert 0 < (found["int8"] - expected).norm() < 0.05 * expected.norm()


def test_weights_are_those_of_an_exported_model(tiny_folder):
    with pytest.raises(InputError, match="weights: expected one of float32, int8, got 'int4'"):
        GenAI(weights="int4")
    with pytest.raises(InputError, match="weights: expected path=null beside it"):
        GenAI(str(tiny_folder), weights="int8")


def test_llama_cpp_without_a_file_reads_one_that_is_written(monkeypatch):
    given = []

    def llama(path, **options):
        given.append((Path(path).read_bytes()[:4], options["n_ctx"]))
        return SimpleNamespace(generate=lambda prompt, **_: iter(prompt))

    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=llama))
    lab = SimpleNamespace(loaded=SimpleNamespace(model=tiny_model()))
    LlamaCpp().check(lab)
    assert list(LlamaCpp().reader(lab, 5)([5, 6, 7], 2)) == [5, 6]
    assert given == [(b"GGUF", 5)]  # a context of 131072 tokens would take the memory of one


def test_trishape_reads_a_prompt_in_pieces_and_others_in_one(tiny_folder):
    """Without pieces it leaves nothing out."""
    genai = SimpleNamespace(
        SchedulerConfig=lambda: SimpleNamespace(sparse_attention_config=SimpleNamespace()),
        SparseAttentionMode=SimpleNamespace(XATTENTION="x", TRISHAPE="t"),
    )
    pieces = {
        sparse: GenAI(str(tiny_folder), sparse)._scheduler(genai, 4096).max_num_batched_tokens
        for sparse in ("none", "xattention", "trishape")
    }
    assert pieces == {"none": 4096, "xattention": 4096, "trishape": 512}


def test_a_cache_holds_one_prompt_unless_its_size_is_asked(tiny_folder):
    """Pages are used in turn: a larger cache fills, for each runner beside others."""
    genai = SimpleNamespace(SchedulerConfig=lambda: SimpleNamespace(num_kv_blocks=0))
    own = GenAI(str(tiny_folder))._scheduler(genai, 4096)
    asked = GenAI(str(tiny_folder), cache_gb=2)._scheduler(genai, 4096)
    assert own.num_kv_blocks * 32 >= 4096
    assert own.cache_size == 0
    assert asked.cache_size == 2
    assert asked.num_kv_blocks == 0
    with pytest.raises(InputError, match="cache_gb"):
        GenAI(str(tiny_folder), cache_gb=0)


class Prophet:
    """Gives every token of a window the probability 1/2, by the interfaces of both packages; the first has none."""

    def __init__(self, *_, **options):
        self.options, self.window = options, None

    def add_request(self, number, ids, how):
        assert how.echo
        self.window = ids.data
        return self

    def has_non_finished_requests(self):
        return False

    def read_all(self):
        return [SimpleNamespace(generated_log_probs=[1.0, *[math.log(0.5)] * self.window.size])]

    def reset(self):
        self.scores = None

    def eval(self, tokens):
        self.scores = np.full((len(tokens) + 9, 10), -np.inf, np.float32)
        self.scores[: len(tokens), :2] = 0

    def generate(self, prompt, **_):
        return iter(range(99))


def test_losses_of_the_peers_are_those_of_the_tokens_after_the_first(tiny_folder, monkeypatch):
    settings = SimpleNamespace(SchedulerConfig=SimpleNamespace, GenerationConfig=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "openvino_genai", SimpleNamespace(ContinuousBatchingPipeline=Prophet, **vars(settings)))
    monkeypatch.setitem(sys.modules, "llama_cpp", SimpleNamespace(Llama=Prophet))
    lab, windows = None, torch.randint(0, 2, (3, 40))
    with_hint = GenAI(str(tiny_folder), properties={"INFERENCE_PRECISION_HINT": "f32"})
    assert with_hint._properties == {"INFERENCE_NUM_THREADS": torch.get_num_threads(), "INFERENCE_PRECISION_HINT": "f32"}
    monkeypatch.setattr(prefill_runners, "_LOGITS_AT_ONCE", 16)
    for runner in (with_hint, LlamaCpp(str(tiny_folder))):
        assert runner.quality(lab, windows).losses == pytest.approx([math.log(2)] * 3)
    assert list(LlamaCpp(str(tiny_folder)).reader(lab, 6)([1, 2], 4)) == [0, 1, 2, 3]


def test_tokens_are_pulled_from_a_streamer_as_they_come():
    genai = SimpleNamespace(StreamerBase=object, StreamingStatus=SimpleNamespace(RUNNING=1))

    def generate(streamer):
        assert streamer.write(3) == streamer.write([4, 5]) == 1
        streamer.end()

    assert list(_pulled(genai, generate)) == [3, 4, 5]

    def fails(streamer):
        streamer.write(3)
        raise ValueError("no memory")

    tokens = _pulled(genai, fails)
    assert next(tokens) == 3
    with pytest.raises(ValueError, match="no memory"):
        next(tokens)
