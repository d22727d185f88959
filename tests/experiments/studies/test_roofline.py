import pandas as pd
import pytest

from experiments.studies.roofline import bound_by
from shadowattn.graphs.cpu import multiplies_in_bfloat16
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures

SHORT = ["study.rounds=2", "study.lengths=[64]", "study.batches=[1,3]", "engine.chunk_tokens=32"]
PRECISIONS = ["float32", "bfloat16", "w8a8"] if multiplies_in_bfloat16() else ["float32", "w8a8"]
SHORT += [f"study.precisions=[{','.join(PRECISIONS)}]"]


def test_every_stage_has_its_operations_bytes_and_share_of_the_roof(run, capsys):
    folder = run("roofline", "+exp=roofline", *SHORT)
    rows = pd.read_parquet(folder / "rows.parquet")
    peaks = rows[rows.method == "machine"].set_index("metric").value
    assert set(peaks.index) == {"bandwidth", "peak float32", "peak bfloat16", "peak int8"}
    cells = rows[rows.stage != ""].set_index(["metric", "phase", "batch", "stage"]).sort_index()
    stages = {
        *(f"blocks {precision}" for precision in PRECISIONS),
        "attend dense",
        "estimate + select",
        "select",
        "attend sparse",
        "one task",
        "output layer",
    }
    for phase, batch in (("prefill", 1), ("decode", 1), ("decode", 3)):
        assert set(cells.loc["time", phase, batch].index) == stages
    dense, sparse, estimate = (
        cells.loc["rate", "prefill", 1, stage] for stage in ("attend dense", "attend sparse", "estimate + select")
    )
    assert sparse.operations == pytest.approx(0.2 * dense.operations, rel=0.05)  # budgets are rounded up
    assert estimate.operations == dense.operations / 2  # scores alone
    assert cells.loc["rate", "prefill", 1, "one task"].operations == pytest.approx(estimate.operations + sparse.operations)
    assert (cells.loc["rate", "decode", 3].operations == 3 * cells.loc["rate", "decode", 1].operations).all()
    one, three = (cells.loc["rate", "decode", batch, "blocks float32"] for batch in (1, 3))
    assert one.bytes < three.bytes < 1.5 * one.bytes  # weights are read once for all sequences
    assert cells.loc["rate", "decode", 3, "attend dense"].bytes == 3 * cells.loc["rate", "decode", 1, "attend dense"].bytes
    of = {metric: cells.loc[metric, "decode", 1, "attend dense"].value for metric in ("time", "rate", "of the roof")}
    operations, moved = (cells.loc["time", "decode", 1, "attend dense"][name] for name in ("operations", "bytes"))
    assert of["rate"] == pytest.approx(operations / of["time"] / 1e6)
    roof = min(peaks["peak float32"], operations / moved * peaks["bandwidth"])
    assert of["of the roof"] == pytest.approx(of["rate"] / roof)
    assert (folder / "roofline.png").is_file()
    assert "bandwidth" in capsys.readouterr().out


def test_what_binds_a_stage_is_the_lesser_roof():
    peaks = pd.DataFrame({"metric": ["bandwidth", "peak float32"], "value": [10.0, 100.0]})
    assert [bound_by(intensity, "float32", peaks) for intensity in (9.9, 10.0)] == ["bandwidth", "arithmetic"]


def test_bfloat16_is_refused_before_the_work_where_the_processor_has_no_such_products(run, monkeypatch, capsys):
    monkeypatch.setattr("experiments.studies.roofline.multiplies_in_bfloat16", lambda: False)
    with pytest.raises(SystemExit):
        run("roofline", "+exp=roofline", *SHORT[:-1])
    said = capsys.readouterr().err
    assert "study.precisions: bfloat16 needs a processor with such products" in said
    assert "use study.precisions=[float32,w8a8]" in said
    assert "roofline:" not in said
