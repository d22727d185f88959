import math

import pandas as pd
import pytest

from experiments.studies.estimator_speed import break_even_keys, said_break_even
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures

SHORT = ["graphs.chunk_tokens=32", "retentions=[0.2]", "evaluation.context_tokens=64", "study.rounds=2"]


def test_every_method_is_timed_beside_dense_at_every_length(run, capsys):
    folder = run("study_estimator_speed", "+exp=study_estimator_speed", *SHORT, "study.lengths=[32,64]")
    rows = pd.read_parquet(folder / "rows.parquet")
    ratios = rows[rows.metric == "times_faster_than_dense"].set_index(["method", "context_tokens"])
    assert {method for method, _ in ratios.index} == set(rows.method) - {"dense"} >= {"int8", "oracle", "h2o", "flexprefill"}
    assert {keys for _, keys in ratios.index} == {32, 64}
    assert (ratios.low <= ratios.value).all()
    assert (ratios.value <= ratios.high).all()
    even = rows[rows.metric == "break_even_keys"].set_index("method").value
    assert all(even[method] == break_even_keys(ratios.value[method].to_dict()) for method in even.index)
    assert len(rows[(rows.method == "dense") & (rows.metric == "chunk_time")]) == 2
    assert (folder / "estimator_speed.png").is_file()
    assert "break-even" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratios", "keys", "said"),
    [
        ({64: 0.5, 128: 1.2, 256: 2.0}, 128, "128"),
        ({64: 1.5, 128: 0.9, 256: 2.0}, 256, "256"),  # not 64, after which a longer one is slower
        ({64: 1.5, 128: 2.0, 256: 0.9}, math.inf, "above 256"),
    ],
)
def test_the_break_even_is_where_all_longer_ones_are_faster(ratios, keys, said):
    assert break_even_keys(ratios) == keys
    assert said_break_even(keys, 256) == said
