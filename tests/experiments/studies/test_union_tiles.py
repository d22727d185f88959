"""The study of union tiles from the command line, on a tiny model; never how fast."""

import pandas as pd
import pytest
import torch

from experiments.studies.union_tiles import UnionTiles, candidates
from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.reporting.style import save
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.tensors import qkv

__all__ = ["run", "tiny_folder"]  # fixtures

FEW = ["study.rows=32", "study.tiles=[2,16]", "study.timed_tiles=[16]", "study.retentions=[0.1,0.5]", "study.rounds=2"]


@pytest.fixture
def folder(run):
    return run("study_union_tiles", "+exp=study_union_tiles", "evaluation.windows=2", *FEW)


def test_rows_are_of_every_head_and_of_every_way_to_attend(folder, tmp_path):
    rows = pd.read_parquet(folder / "rows.parquet")
    sizes = rows[rows.metric == "union_ratio"]
    assert len(sizes) == 2 * 2 * 2  # estimates, retentions, tiles
    assert sizes.value.between(1, sizes.tile).all()
    assert set(sizes.n[sizes.tile == 16]) == {2 * 2 * 8}  # windows, tiles, heads of both layers
    heads = rows[(rows.metric == "head_union_ratio") & (rows.tile == 16) & (rows.retention == 0.1)]
    assert len(heads) == 8
    assert set(heads.n) == {4}
    of = rows[(rows.tile == 16) & (rows.retention == 0.1) & (rows.estimator == "oracle")].set_index("metric").value
    assert of["union_ratio"] == pytest.approx(heads.value.mean())
    assert of["best_head_union_ratio"] == heads.value.min()
    assert of["worst_head_union_ratio"] == heads.value.max()
    layers = rows[
        (rows.metric == "layer_union_ratio") & (rows.tile == 16) & (rows.retention == 0.1) & (rows.estimator == "oracle")
    ]
    assert layers.value.mean() == pytest.approx(heads.value.mean())
    shares = rows[rows.metric == "union_share"]
    assert (shares.value >= 0.99 * shares.retention).all()
    assert (shares.value <= 1).all()
    times = rows[rows.metric == "time"]
    assert set(times.method) == {"own_dense", "sdpa", "per_row", "shared_lists", "union_tiles_read", "union_tiles"}
    assert (times.low <= times.value).all()
    assert set(times.path_kind) == {"timing"}
    assert set(rows.path_kind[rows.metric != "time"]) == {"quality", "timing"}
    assert set(times.n) == {2}
    assert (folder / "union_tiles.png").is_file()
    table = UnionTiles().table(rows, "tiny")
    assert table.row_count == len(sizes)
    assert f"{of['union_ratio']:.2f}" in list(table.columns[3].cells)
    untimed = rows[(rows.path_kind == "quality") & (rows.retention == 0.5)]  # of one retention, without times
    (figure,) = UnionTiles().figures(untimed).values()
    assert save(figure, tmp_path / "sizes.png").stat().st_size > 10_000


def test_an_interrupted_run_goes_on(run, folder, monkeypatch):
    """Windows and retentions that were measured are not measured again."""
    (folder / "rows.parquet").unlink()
    (folder / "meta.json").unlink()
    (folder / "times" / "0.5.json").unlink()
    measured = []
    monkeypatch.setattr(UnionTiles, "_sizes", lambda *_: measured.append("sizes"))
    times = UnionTiles._times
    monkeypatch.setattr(UnionTiles, "_times", lambda self, *of: measured.append(of[-1]) or times(self, *of))
    again = run("study_union_tiles", "+exp=study_union_tiles", "evaluation.windows=2", *FEW)
    assert again == folder
    assert measured == [0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_union_tiles_compute_what_per_row_lists_do(dtype):
    q, k, v = (x.to(dtype) for x in qkv(4, 2, 32, 128, 64))
    chunk = Chunk.of(q, k, v)
    scores = q.float() @ k.float().repeat_interleave(2, 0).mT
    calls = candidates(chunk, scores, 0.2, [8, 32], choose("auto", head_dim=64, dtype=dtype))
    expected = calls["per_row"]().float()
    for tile in (8, 32):
        for name in ("union_tiles", "union_tiles_read"):
            torch.testing.assert_close(calls[f"{name} {tile}"]().float(), expected, atol=2e-2, rtol=2e-2)
    dense = calls["sdpa"]()[0].float()
    torch.testing.assert_close(calls["own_dense"]().float(), dense, atol=2e-2, rtol=2e-2)
    assert (calls["shared_lists 8"]().float() - dense).abs().max() > 0.1  # it is sparse


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.tiles=[]"], "study.tiles: expected at least one and none twice, got []"),
        (["study.retentions=[0.2,0.2]"], "study.retentions: expected at least one and none twice, got [0.2, 0.2]"),
        (["study.retentions=[0]"], "study.retentions: expected shares of the visible keys, in (0, 1], got [0"),
        (["study.estimates=[exact]"], "study.estimates: expected one of oracle, int8, got 'exact'"),
        (["study.tiles=[1,8]"], "study.tiles: expected 2 to 64 rows, and study.rows=256 a multiple of them, got 1"),
        (["study.tiles=[128]"], "study.tiles: expected 2 to 64 rows, and study.rows=256 a multiple of them, got 128"),
        (["study.timed_tiles=[24]"], "study.timed_tiles: expected 2 to 64 rows, and study.rows=256 a multiple of them, got 24"),
        (["study.tiles=[2,4]"], "study.timed_tiles: expected tiles of study.tiles=[2, 4], got [8, 16, 32, 64] beside them"),
        (["study.rounds=0"], "study.rounds: expected at least 1, got 0"),
        (["study.rows=0"], "study.rows: expected at least 1, got 0"),
        ([], "study.rows: expected a divisor of the 96 tokens of a window, got 256"),
        (["retention=0.2"], "retention: study_union_tiles does not use it"),
    ],
)
def test_the_command_refuses_what_it_cannot_measure(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run("study_union_tiles", "+exp=study_union_tiles", *arguments)
    assert message in capsys.readouterr().err
