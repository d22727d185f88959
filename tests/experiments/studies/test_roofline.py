import pandas as pd
import pytest
import torch

from experiments.machine_peaks import Peak, int8_product
from experiments.studies.roofline import bound_by, prefill_seconds
from shadowattn.graphs.cpu import multiplies_in_bfloat16
from shadowattn.interleave import Timing
from shadowattn.kernels import native
from shadowattn.models.linear import has_bfloat16_products
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
    tiles = ["peak bfloat16 tiles", "peak int8 tiles"] if native.level() == "amx" else []
    bfloat16 = ["peak bfloat16"] if has_bfloat16_products() else []
    assert set(peaks.index) == {"bandwidth", "peak float32", "peak int8", *bfloat16, *tiles}
    cells = rows[rows.stage != ""].set_index(["metric", "phase", "batch", "stage"]).sort_index()
    stages = {
        *(f"blocks {precision}" for precision in PRECISIONS),
        "attend dense",
        "estimate",
        "estimate + select",
        "select",
        "attend sparse",
        "one task",
        "output layer",
        *(("attend dense bfloat16", "one task bfloat16") if "bfloat16" in PRECISIONS else ()),
    }
    looked = {"one task after a first look", *(("one task after a first look bfloat16",) if "bfloat16" in PRECISIONS else ())}
    assert set(cells.loc["time", "prefill", 1].index) == stages | looked
    for batch in (1, 3):
        assert set(cells.loc["time", "decode", batch].index) == stages
    dense, sparse, estimate = (
        cells.loc["rate", "prefill", 1, stage] for stage in ("attend dense", "attend sparse", "estimate + select")
    )
    assert sparse.operations == pytest.approx(0.2 * dense.operations, rel=0.05)  # budgets are rounded up
    assert estimate.operations == dense.operations / 2  # scores alone
    assert cells.loc["rate", "prefill", 1, "one task"].operations == pytest.approx(estimate.operations + sparse.operations)
    assert cells.loc["rate", "prefill", 1, "estimate"].operations == estimate.operations
    # A block's mean query ranks the 33 keys up to its first of 32 rows. All of them are near, and each row ranks what it sees.
    products = cells.loc["rate", "prefill", 1, "one task after a first look"].operations - sparse.operations
    seen = sum(range(33, 65))
    assert products == pytest.approx(estimate.operations * (seen + 33) / seen)
    assert (cells.loc["rate", "decode", 3].operations == 3 * cells.loc["rate", "decode", 1].operations).all()
    one, three = (cells.loc["rate", "decode", batch, "blocks float32"] for batch in (1, 3))
    assert one.bytes < three.bytes < 1.5 * one.bytes  # weights are read once for all sequences
    assert cells.loc["rate", "decode", 3, "attend dense"].bytes == 3 * cells.loc["rate", "decode", 1, "attend dense"].bytes
    of = {metric: cells.loc[metric, "decode", 1, "attend dense"].value for metric in ("time", "rate", "of the roof")}
    operations, moved = (cells.loc["time", "decode", 1, "attend dense"][name] for name in ("operations", "bytes"))
    assert of["rate"] == pytest.approx(operations / of["time"] / 1e6)
    roof = min(peaks["peak float32"], operations / moved * peaks["bandwidth"])
    assert of["of the roof"] == pytest.approx(of["rate"] / roof)
    task = cells.loc["rate", "prefill", 1, "one task"]
    counted = estimate.operations / peaks["peak int8"] + sparse.operations / peaks["peak float32"]
    least = max(counted, task.bytes / peaks["bandwidth"]) / 1e6
    found = {metric: cells.loc[metric, "prefill", 1, "one task"].value for metric in ("time", "of the roof")}
    assert found["of the roof"] == pytest.approx(least / found["time"])
    for name in ("attend dense", "one task") if "bfloat16" in PRECISIONS else ():
        half, whole = (cells.loc["rate", "prefill", 1, stage] for stage in (f"{name} bfloat16", name))
        assert half.operations == whole.operations
        assert whole.bytes / 2 <= half.bytes < whole.bytes
    assert (folder / "roofline.png").is_file()
    said = capsys.readouterr().out
    assert "bandwidth" in said
    assert "a whole prompt, by its last chunk" in said


def test_the_peak_of_int8_without_vnni_is_of_a_product():
    a, b = torch.randint(-20, 21, (2, 64, 64), dtype=torch.int8)  # sums of pairs stay below 16 bits
    assert torch.from_numpy(int8_product(a, b)()[0, 0].copy()).equal(a.float() @ b.float())


def test_a_prompt_takes_its_blocks_as_often_as_it_has_chunks_and_attention_by_the_keys_that_rows_see():
    """Of 64 tokens in chunks of 32 the last chunk's rows see 33 to 64 keys, all rows 1 to 64; 70 tokens take three chunks."""
    made = [
        {"phase": "prefill", "context_tokens": keys, "chunk_rows": 32, "stage": stage, "metric": metric, "value": value}
        for keys in (64, 70)
        for stage in ("blocks w8a8", "attend dense", "select")
        for metric, value in (("time in all layers", 2000.0), ("of the roof", 0.5), ("rate", 7.0))
    ]
    seconds = prefill_seconds(pd.DataFrame(made))
    assert set(seconds.index) == {(stage, keys) for stage in ("blocks w8a8", "attend dense") for keys in (64, 70)}
    assert seconds.taken["blocks w8a8", 70] == pytest.approx(3 * 2)
    assert seconds.taken["attend dense", 70] == pytest.approx(2 * sum(range(1, 71)) / sum(range(39, 71)))
    assert seconds.taken["blocks w8a8", 64] == pytest.approx(2 * 2)
    assert seconds.taken["attend dense", 64] == pytest.approx(2 * sum(range(1, 65)) / sum(range(33, 65)))
    assert (seconds.least == seconds.taken / 2).all()


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


def test_a_peak_is_the_fastest_rounds():
    rates = Peak("bandwidth", 12 * 10**9, "GB/s").rates(Timing((4.0, 1.0, 2.0)))
    assert rates == pytest.approx((12, 4, 12))
