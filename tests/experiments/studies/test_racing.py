"""The race is held to its claim over many orders of the windows, on two models."""

import pandas as pd
import pytest
import torch

from experiments.publish import ROOT
from experiments.studies.racing import FIGURES, RANK_TARGET, RETENTION_TARGET, WORK_TARGET, Racing, over_orders
from shadowattn.offline import Race, allocate
from shadowattn.types import AblationLosses, Importance
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures


def _allot(importance: Importance) -> list[list[float]]:
    measured = (importance.head_ppl, importance.layer_ppl)
    return allocate(*measured, base_ppl=importance.base_ppl, retention=0.2, method="waterfill")


def _losses(windows: int = 64) -> AblationLosses:
    """Made up: 4 layers of 4 heads, from unimportant to important, with noise from window to window."""
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(windows, generator=generator) + 2
    effects = torch.logspace(-2, 0, 20)[:, None] * (1 + 0.5 * torch.randn(20, windows, generator=generator))
    units = [tuple(row) for row in (base + effects).double().tolist()]
    heads = tuple(tuple(units[4 + 4 * layer : 8 + 4 * layer]) for layer in range(4))
    return AblationLosses(tuple(base.double().tolist()), tuple(units[:4]), heads, "zero", 128)


def test_each_order_is_compared_with_the_exact_profile():
    compared = Racing(orders=2, first_order=3).compare(_losses(), _allot, Race())
    assert list(compared) == [3, 4]
    for methods in compared.values():
        assert set(methods) == {"racing", "racing, loose", "exact on fewer windows"}
        assert methods["racing"].keys() == FIGURES.keys()
        assert methods["racing, loose"]["window_forwards"] < methods["racing"]["window_forwards"] <= 21 * 64
        # The subset costs what the race costs, to a window.
        assert 0 <= methods["exact on fewer windows"]["window_forwards"] - methods["racing"]["window_forwards"] <= 21
    assert compared[3]["racing"] != compared[4]["racing"]


def test_the_summary_tells_the_worst_order():
    compared = {
        order: {"racing": dict.fromkeys(FIGURES, 1.0) | {"rank_correlation": rank}} for order, rank in enumerate((0.9, 0.99, 0.5))
    }
    found = over_orders(compared)["racing"]
    assert found["rank_correlation_smallest"] == 0.5
    assert found["rank_correlation_median"] == 0.9
    assert found["rank_correlation_largest"] == 0.99


@pytest.mark.parametrize("name", ["racing", "racing_stories260k"])
def test_the_committed_races_meet_the_claim_in_their_worst_order(name):
    rows = pd.read_csv(ROOT / "results" / "reference" / f"{name}.csv", keep_default_na=False)
    orders = rows[(rows.method == "racing") & (rows.seed > 0)]
    assert orders.seed.nunique() >= 12
    by_metric = orders.groupby("metric").value
    assert by_metric.min()["rank_correlation"] >= RANK_TARGET
    assert by_metric.max()["retention_largest_difference"] <= RETENTION_TARGET
    assert by_metric.median()["times_fewer_forwards"] >= WORK_TARGET
    summary = rows[(rows.method == "racing") & (rows.seed == 0)].set_index("metric")
    assert summary.value["rank_correlation_smallest"] == by_metric.min()["rank_correlation"]
    assert summary.n["rank_correlation_smallest"] == orders.seed.nunique()
    assert min(orders.seed) >= 200  # the defaults were chosen on orders below


def test_races_are_run_in_many_orders(run, tiny_folder, capsys):
    where = ["model=local", f"model.path={tiny_folder}", "data=text", f"data.path={tiny_folder / 'text.txt'}"]
    few = ["importance.windows=8", "importance.window_tokens=32", "importance.race.first=3", "importance.race.z=0.01"]
    more = ["importance.race.overlap=1", "study.orders=3", "study.first_order=7", "allocator=waterfill"]
    folder = run("racing", "+exp=racing", *where, *few, *more, "study.loose={first: 2, z: 0.001, overlap: 1}")
    rows = pd.read_parquet(folder / "rows.parquet")
    assert set(rows.path_kind) == {"quality"}
    assert set(rows.allocator) == {"waterfill"}
    assert set(rows.retention) == {0.2}
    assert set(rows.seed) == {0, 7, 8, 9}
    assert set(rows.method) == {"racing", "racing, loose", "exact on fewer windows"}
    orders = rows[(rows.method == "racing") & (rows.seed > 0)]
    work = orders[orders.metric == "window_forwards"].value
    assert (work < 8 * 11).all()  # of 8 heads, 2 layers and the whole model: some stopped early
    summary = rows[(rows.method == "racing") & (rows.seed == 0)].set_index("metric")
    assert summary.value["window_forwards_largest"] == work.max()
    assert set(summary.n) == {3}
    assert "rank correlation at least 0.98 in every order" in capsys.readouterr().out
    assert (folder / "racing.png").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["study.orders=0"], "study.orders: expected at least 1, got 0"),
        (["study.first_order=0"], "study.first_order: expected at least 1, got 0"),
        (["study.loose={seed: 3}"], "study.loose.seed: there is no such setting"),
        (["study.loose={z: -1.0}"], "expected first ≥ 2, z > 0"),
        (["importance.windows=1"], "importance.windows: expected at least 2"),
        (["allocator=uniform"], "allocator: expected one that goes by importance alone, such as waterfill, got uniform"),
        (["allocator=error_greedy"], "got error_greedy"),
        (["importance.race.z=0"], "expected first ≥ 2, z > 0"),
    ],
)
def test_wrong_settings_are_refused(run, capsys, arguments, message):
    with pytest.raises(SystemExit):
        run("racing", "+exp=racing", "importance.windows=4", "allocator=waterfill", *arguments)
    assert message in capsys.readouterr().err
