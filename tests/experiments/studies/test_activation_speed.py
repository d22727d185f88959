"""Speed on a model's own activations from the command line, on a tiny model; never how fast."""

import math

import pandas as pd
import pytest
import torch

from experiments.studies.activation_speed import ActivationSpeed, Calibrated, Captured
from experiments.studies.attention_candidates import LOOKED
from shadowattn.engine.observe import observe_prefill
from shadowattn.kernels import native
from shadowattn.kernels.torch_kernels import dense
from shadowattn.types import FirstLookLosses
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.tiny import tiny_model

__all__ = ["run", "tiny_folder"]  # fixtures

FEW = ["study.rows=32", "study.lengths=[32,96]", "study.retentions=[0.1,0.5]", "study.query_blocks=[8]", "study.rounds=2"]
FEW += ["evaluation.context_tokens=96", "evaluation.windows=2"]


@pytest.fixture
def folder(run):
    return run("study_activation_speed", "+exp=study_activation_speed", *FEW)


def test_rows_are_of_every_length_way_and_layer(folder):
    rows = pd.read_parquet(folder / "rows.parquet")
    times = rows[rows.metric == "time"]
    assert len(times) == 2 * 2 * (4 + 2 * 4)  # dtypes, lengths; dense twice and two parts, retentions by ways and what chooses
    assert set(times.path_kind) == {"timing"}
    assert (times.low <= times.value).all()
    assert set(times.method) == {"sdpa", "own_dense", "per_row", "hierarchical", "shared_8", "quantise", "estimate", "choose"}
    shared = times[times.method == "shared_8"]
    assert set(shared.block_score) == {"probability"}
    assert set(shared.query_block) == {8}
    for method in ("per_row", "hierarchical"):
        assert set(times.block_score[times.method == method]) == {"none"}
    assert set(times.estimator[times.method == "hierarchical"]) == {"hierarchical"}
    assert set(rows.metric[rows.method.isin(["quantise", "estimate", "choose"])]) == {"time"}  # a part is no way to attend
    layers = rows[rows.metric == "layer_times_faster_than_own_dense"]
    assert len(layers) == 2 * 2 * 6 * 2
    assert set(layers.layer) == {0, 1}
    even = rows[rows.metric == "break_even_keys"]
    assert len(even) == 2 * 6
    assert even.value.isin([32, 96, math.inf]).all()
    mass = rows[rows.metric == "mass_recall"].set_index(["dtype", "context_tokens", "method", "retention"]).value
    assert len(mass) == 2 * 2 * 2 * 2
    assert set(rows.path_kind[rows.metric == "mass_recall"]) == {"quality"}
    assert mass.between(0, 1).all()
    assert (mass.xs(0.5, level="retention") > mass.xs(0.1, level="retention")).all()
    stages = rows[rows.metric.str.startswith("stage: ")]
    assert set(stages.method) == {"per_row", "hierarchical", "shared_8"}
    assert set(stages.unit) == {"ms"}
    of = stages.groupby("method").metric.unique().map(set)
    assert "stage: spared heads" in of["hierarchical"]
    assert of["per_row"] - of["shared_8"] <= {"stage: attend alone"}
    whole = stages.groupby(["method", "retention", "dtype", "context_tokens"]).value.sum()
    assert len(whole) == 3 * 2 * 2 * 2
    assert (whole > 0).all()
    assert (folder / "activation_speed.png").is_file()
    assert (folder / "activation_stages.png").is_file()
    assert len(ActivationSpeed().table(rows, "tiny").renderables) == 2


def test_a_first_look_that_lets_every_key_through_leaves_the_flat_lists(run):
    few = [*FEW[:1], "study.lengths=[96]", "study.retentions=[0.2]", "study.query_blocks=[]", "study.rounds=1", *FEW[-2:]]
    rows = pd.read_parquet(run("study_activation_speed", "+exp=study_activation_speed", *few, "study.through=5") / "rows.parquet")
    mass = rows[rows.metric == "mass_recall"].set_index(["dtype", "method"]).value
    for dtype in ("float32", "bfloat16"):
        assert mass[dtype, "hierarchical"] == mass[dtype, "per_row"]


def test_a_lower_level_is_run_and_named_and_given_back(run, monkeypatch):
    levels, measured = set(), ActivationSpeed._measured
    monkeypatch.setattr(ActivationSpeed, "_measured", lambda *of: levels.add(native.level()) or measured(*of))
    few = [*FEW[:1], "study.lengths=[96]", "study.retentions=[0.2]", "study.query_blocks=[]", "study.rounds=1", *FEW[-2:]]
    folder = run("study_activation_speed", "+exp=study_activation_speed", *few, "study.level=portable")
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.kernel) == {"native (portable)"}
    assert levels == {"portable"}
    assert native.level() == native.levels()[-1]


def test_an_interrupted_run_goes_on(run, folder, monkeypatch):
    (folder / "rows.parquet").unlink()
    (folder / "meta.json").unlink()
    (folder / "times" / "96@1.json").unlink()
    lengths, measured = [], ActivationSpeed._measured
    monkeypatch.setattr(
        ActivationSpeed,
        "_measured",
        lambda self, lab, window, *rest: lengths.append(len(window)) or measured(self, lab, window, *rest),
    )
    assert run("study_activation_speed", "+exp=study_activation_speed", *FEW) == folder
    assert lengths == [96]


def test_every_candidate_at_full_retention_is_dense_attention_on_what_the_model_computed():
    chunks = []
    window = torch.arange(96)[None] % tiny_model().config.vocab_size
    observe_prefill(tiny_model(), window, chunks.append, chunk_tokens=32)
    chunk = chunks[-1]
    assert chunk.keys == 96
    t = Captured(chunk, torch.float32, 1.0)
    assert torch.equal(t.q, chunk.q)
    expected = dense(t.q[None], t.k[None], t.v[None], causal_offset=64, scale=t.scale)[0]
    losses = FirstLookLosses([[0.0] * len(chunk.heads)] * 2, LOOKED["candidates"], LOOKED["block_rows"])
    calls = ActivationSpeed(rows=32, lengths=[96], retentions=[0.999], query_blocks=[8]).calls(
        chunk, "float32", Calibrated(losses)
    )
    torch.testing.assert_close(calls["own_dense"](), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(calls["sdpa"]()[0], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.lengths=[]"], "study.lengths: expected at least one and none twice, got []"),
        (["study.lengths=[100]"], "study.lengths: expected multiples of study.rows=512, got 100"),
        (["study.rows=32"], "study.lengths: expected at most the 96 tokens of a window, got 4096; set study.lengths or"),
        (["study.retentions=[1]"], "study.retentions: expected shares of the visible keys, in (0, 1), got [1"),
        (["study.dtypes=[float16]"], "study.dtypes: expected one of float32, bfloat16, got 'float16'"),
        (["study.query_blocks=[1]"], "study.query_blocks: expected at least 2, got 1"),
        (["study.rounds=0"], "study.rounds: expected at least 1, got 0"),
        (["study.through=0.5"], "study.through: expected 1 or more times the budget, got 0.5"),
        (["study.level=sse2"], "study.level: expected one of portable"),
        (["retention=0.2"], "retention: study_activation_speed does not use it"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run("study_activation_speed", "+exp=study_activation_speed", "evaluation.context_tokens=96", *arguments)
    assert message in capsys.readouterr().err
