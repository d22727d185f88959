"""The study of compiled graphs, by a program that stands in for the compiler: its cases, rows and figure; and its refusal."""

import json
import math
import re
import sys
from importlib.metadata import version

import pandas as pd
import pytest

from experiments.part_building import build
from experiments.publish import ROOT, read_reference
from experiments.studies import npu_cases
from experiments.studies.npu_cases import BANK_FORMS, bank_shapes, cases
from shadowattn.graphs.npu import compiler
from shadowattn.models.known import KNOWN_MODELS
from shadowattn.reporting.figures.npu_compile import draw
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
    (tmp_path / "npu_compiler" / compiler.MANIFEST).write_text(json.dumps({"openvino": version("openvino")}))
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


@pytest.mark.parametrize("part", ["form", "block before", None])
def test_a_figure_says_where_nothing_compiled(part):
    rows = read_reference(ROOT / "results" / "reference" / "npu_compile.csv")
    failed = rows.part.str.startswith(part[:5]) if part else rows.part.notna()
    figure = draw(rows.assign(value=rows.value.mask(failed), peak_share=rows.peak_share.mask(failed)))
    figure.canvas.draw()
    said = [[text.get_text() for text in axis.texts] == ["none of these graphs compiled"] for axis in figure.axes]
    assert sum(said) == (1 if part else 4)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("study.platforms=4000", "expected a list, got 4000; write platforms=\\[4000\\]"),
        ("study.platforms=[4001]", "study.platforms: expected one of 3720, 4000, 5010, 5020, got '4001'"),
        ("study.peak_tops.4000=0", "study.peak_tops: expected more than 0 operations a second of NPU 4000, got 0"),
    ],
)
def test_wrong_settings_are_refused(run, stand_in, override, message, capsys):
    with pytest.raises(SystemExit):
        run("npu_compile", "+exp=npu_compile", override)
    assert re.search(message, capsys.readouterr().err)


def test_platforms_may_be_numbers():
    """As YAML reads their digits."""
    settings = {"_target_": "experiments.studies.npu_compile.NpuCompile", "platforms": [4000]}
    assert build(settings).platforms == ["4000"]


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
    known = KNOWN_MODELS["smollm2"].shape
    macs = {case.part: case.macs for case in few(**ONE) if case.model == "smollm2"}
    wide = (known.heads + 2 * known.kv_heads) * known.head_dim
    assert macs["block before"] == 32 * known.hidden * wide
    assert macs["block behind"] == 32 * known.hidden * (known.heads * known.head_dim + 3 * known.intermediate)
    assert macs["attention"] == 2 * known.heads * 32 * 64 * known.head_dim
    chosen = next(case.shape for case in cases(**ONE) if case.part == "bank" and case.shape.top_k)
    assert chosen.top_k == 13  # a fifth of 64 keys
    blocks = [case.build() for case in few(**ONE) if case.part.startswith("block")]
    assert {port.get_element_type().get_type_name() for block in blocks for port in block.outputs} == {"f16"}
    names = {case.name for case in cases(**ONE)}
    assert set(BANK_FORMS) | set(npu_cases.BLOCK_FORMS) <= names
