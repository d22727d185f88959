"""The study of compiled graphs, by a program that stands in for the compiler: its cases, rows and figure; and its refusal."""

import math
import sys

import pandas as pd
import pytest

from experiments.studies import npu_cases
from experiments.studies.npu_cases import BANK_FORMS, bank_shapes, cases
from shadowattn.graphs.npu import compiler
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder
from tests.graphs.npu.test_compiler import STAND_IN

__all__ = ["run", "tiny_folder"]  # fixtures

SMALL = [
    "study.models=[smollm2]",
    "study.whole=[smollm2]",
    "study.keys=[64]",
    "study.attention_keys=[64]",
    "study.rows=32",
    'study.platforms=["3720","5010"]',
]

ONE = {"rows": 32, "keys": [64], "launch_heads": [1], "models": ["smollm2"], "whole": ["smollm2"], "attention_keys": [64]}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A folder as the setup leaves it; the program dies of every graph for 5010."""
    wine = tmp_path / "npu_compiler" / "wine" / "usr" / "lib" / "wine" / "wine64"
    wine.parent.mkdir(parents=True)
    wine.write_text(STAND_IN.format(python=sys.executable))
    wine.chmod(0o755)
    (tmp_path / "npu_compiler" / "app").mkdir()
    (tmp_path / "npu_compiler" / compiler.MANIFEST).write_text('{"openvino": "1"}')
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))


def few(**options):
    """One graph of each part."""
    shown = {}
    for case in cases(**options):
        shown.setdefault((case.part, case.model), case)
    return list(shown.values())


def test_rows_are_marked_as_compiled_and_failures_have_their_reason(run, stand_in, monkeypatch):
    monkeypatch.setattr("experiments.studies.npu_compile.cases", few)
    folder = run("npu_compile", "+exp=npu_compile", *SMALL)
    rows = pd.read_parquet(folder / "rows.parquet")
    assert (folder / "npu_compile.png").is_file()
    assert set(rows.measured) == {"compiled"}
    assert set(rows.compiler) == {"1.2 (build)"}
    compiled, failed = (rows[rows.platform == platform] for platform in ("3720", "5010"))
    assert compiled.value.notna().all()
    assert (compiled.flag == "").all()
    assert failed.value.isna().all()
    assert set(failed.flag) == {"the compiler's process ended"}
    assert set(rows.part) >= {"form", "layout", "bank", "attention", "block before", "block behind"}
    share = compiled.iloc[0]
    assert math.isclose(share.peak_share, 2e-6 * share.macs / (share.value * 11.5))


def test_without_the_compiler_the_study_names_the_command(run, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SHADOWATTN_CACHE", str(tmp_path))
    with pytest.raises(SystemExit):
        run("npu_compile", "+exp=npu_compile")
    assert "set it up with: make npu-compile" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "expected"),
    [("qwen2_0_5b", {(1, 1), (2, 2), (4, 4), (14, 7)}), ("phonelm_0_5b", {(1, 1), (2, 1), (4, 1), (16, 1)})],
)
def test_bank_shapes_fold_heads_of_one_key_head(model, expected):
    shapes = bank_shapes(model, rows=32, keys=[64, 128], launch_heads=[1, 2, 4])
    assert {(shape.heads, shape.group) for shape in shapes} == expected
    assert len(shapes) == 2 * len(expected)


def test_every_part_builds_and_counts_its_products():
    for case in few(**ONE):
        model = case.build()
        assert case.macs > 0
        assert model.inputs
    names = {case.name for case in cases(**ONE)}
    assert set(BANK_FORMS) | set(npu_cases.BLOCK_FORMS) <= names
