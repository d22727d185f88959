"""The study of reuse: lists and overlaps by definition, and its rows from the command line."""

import itertools

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from experiments.studies.overlap_maps import OverlapMaps, layer_overlaps, row_overlaps, row_reuse
from shadowattn.evaluation.recall import top_keys
from shadowattn.reference import select
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures


@given(seed=st.integers(0, 10_000), rows=st.integers(2, 6), before=st.integers(0, 9), retention=st.floats(0.05, 1))
def test_lists_and_their_reuse_are_those_of_the_definition(seed, rows, before, retention):
    keys = before + rows
    positions = torch.arange(before, keys)
    scores = torch.randint(-3, 4, (2, rows, keys), generator=torch.Generator().manual_seed(seed)).float()  # ties too
    kept = top_keys(scores, positions, retention)
    expected = select(scores, torch.full((2,), retention, dtype=torch.float64), positions + 1, 1, "leading_query")
    assert kept.equal(expected)
    found = row_reuse(kept, positions)
    for head in range(2):
        for distance in range(1, rows):
            shares = []
            for row in range(distance, rows):
                own = set(kept[head, row].nonzero()[:, 0].tolist())
                source = set(kept[head, row - distance].nonzero()[:, 0].tolist())
                new = set(range(before + row - distance + 1, keys))
                shares.append(len(own & (source | new)) / len(own))
            assert found[head, distance - 1].item() == pytest.approx(sum(shares) / len(shares))
    between = row_overlaps(kept, positions)
    for head, row, source in itertools.product(range(2), range(rows), range(rows)):
        own, other = (set(kept[head, one].nonzero()[:, 0].tolist()) for one in (row, source))
        share = len(own & (other | set(range(before + source + 1, keys)))) / len(own)
        assert between[head, row, source].item() == pytest.approx(share)


def test_a_layer_has_all_of_its_own_list_and_the_mass_on_another():
    probabilities = [torch.tensor([[[0.7, 0.2, 0.1]]]), torch.tensor([[[0.1, 0.3, 0.6]]])]
    overlap, mass = layer_overlaps(probabilities, torch.tensor([2]), 0.5)  # two of three keys
    assert overlap.tolist() == [[1.0, 0.5], [0.5, 1.0]]
    torch.testing.assert_close(mass, torch.tensor([[0.9, 0.3], [0.4, 0.9]], dtype=torch.float64))


def test_rows_from_the_command_line(run, capsys):
    where = ("+exp=study_overlap_maps", "evaluation.windows=2", "evaluation.context_tokens=64", "study.rows=16")
    where += ("study.map_rows=4",)
    folder = run("study_overlap_maps", *where)
    rows = pd.read_parquet(folder / "rows.parquet")
    overlap = rows[rows.metric == "layer_overlap"]
    assert set(overlap.value[overlap.layer == overlap.source_layer]) == {1.0}
    assert set(overlap.n) == {2 * 16}
    mass = rows[rows.metric == "layer_mass"]
    assert len(mass) == len(overlap) == 3  # two layers
    assert mass.value.between(0, 1).all()
    reuse = rows[rows.metric == "row_reuse"]
    assert len(reuse) == 2 * 15
    assert (reuse[reuse.distance == 3].n == 2 * 4 * 13).all()
    between = rows[rows.metric == "row_overlap"]
    assert len(between) == 4 * 5 / 2
    assert set(between.position) == {15, 31, 47, 63}
    assert set(between.value[between.position == between.source_position]) == {1.0}
    assert set(between.n) == {2 * 2 * 4}  # windows, layers, heads
    assert (between.distance == between.position - between.source_position).all()
    assert (folder / "overlap_maps.png").is_file()
    table = OverlapMaps().table(rows, "tiny")
    assert table.row_count == 5  # 0, 1, 2, 4 and 8
    with pytest.raises(SystemExit):
        run("study_overlap_maps", *where, "study.rows=24")
    assert "study.rows: expected a divisor of the 64 tokens of a window, got 24" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run("study_overlap_maps", *where[:-1], "study.map_rows=65")
    assert "study.map_rows: expected at most the 64 tokens of a window, got 65" in capsys.readouterr().err
