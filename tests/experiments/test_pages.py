"""Every table of README and docs is what the committed rows say."""

import numpy as np
import pandas as pd
import pytest
import torch

from experiments.page_tables.attention_common import COMMON_ROWS, KEEPERS, keys_of_blocks, read_alone, read_together
from experiments.page_tables.harness import _harness_table
from experiments.pages import TABLES, figures, filled, old_figures, pages
from experiments.publish import ROOT
from experiments.random_layers import Case, Tensors
from experiments.studies import attention_candidates as candidates
from shadowattn.online.selection import Rule
from shadowattn.reporting.style import save


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_says_what_its_rows_say(page):
    assert filled(page.read_text()) == page.read_text(), "fill it with: python -m experiments.pages"


def test_every_table_has_a_place():
    text = "".join(page.read_text() for page in pages())
    assert {name for name in TABLES if f"<!-- table {name} -->" in text} == set(TABLES)


def test_figures_of_several_runs_say_which_rows_they_were_drawn_from():
    assert not old_figures(figures(ROOT / "docs")), "draw them with: python -m experiments.pages"


def test_a_figure_of_other_rows_is_noticed(tmp_path):
    drawn = figures(tmp_path)
    path, (figure, below) = next(iter(drawn.items()))
    save(figure, path, below=f"{below}, of another commit")
    assert old_figures(drawn) == list(drawn)
    save(figure, path, below=below)
    assert old_figures(drawn) == [other for other in drawn if other != path]


def test_an_edited_number_is_noticed():
    page = next(page for page in pages() if "<!-- table " in page.read_text())
    table = page.read_text().split("<!-- table ")[1].split("<!-- end -->")[0]
    assert filled(page.read_text().replace(table, table.replace("1", "2"))) == page.read_text()


def test_a_table_that_nobody_defines_is_an_error():
    with pytest.raises(KeyError, match="no_such"):
        filled("<!-- table no_such -->\n<!-- end -->")


def test_pages_are_those_of_the_repository():
    assert ROOT / "README.md" in pages()


def test_a_table_of_the_harness_has_its_task_versions_and_what_methods_change():
    row = {"task": "records_choice", "metric": "acc", "filter": "none", "version": "1.0", "n": 100, "value": 0.5, "error": 0.05}
    row["flag"] = ""
    rows = pd.DataFrame(
        [
            {"method": "dense", "retention": 1.0, **row},
            {"method": "shadowattn", "retention": 0.2, **row, "value": 0.75},
            {
                "method": "shadowattn",
                "retention": 0.2,
                **row,
                "metric": "acc_change",
                "value": 0.25,
                "low": 0.1,
                "high": 0.4,
                "flag": "above",
            },
        ]
    )
    lines = _harness_table("quickstart", rows).splitlines()
    assert lines[0] == "|  | records_choice v1.0, acc, n = 100 |"
    assert lines[2:4] == [
        "| `dense` | 0.5 ± 0.05 |",
        "| `shadowattn`, 20% of the keys | 0.75 ± 0.05, change +0.10 to +0.40 † |",
    ]
    assert "; † above; " in lines[-1]


@pytest.mark.parametrize("at", [0.05, 0.2])
def test_keys_that_blocks_read_are_counted_as_a_first_look_lets_them_through(at):
    """Of the mean over random choices, to a hundredth."""
    keys, rows, block = 4096, 512, candidates.LOOKED["block_rows"]
    t = Tensors(Case("smollm2-135m", torch.float32, keys, rows, at))
    lists = Rule().lists(t.retention, t.positions)
    through = candidates.fused(t, "hierarchical")._through(t.chunk(), lists)[-1].tolist()  # of a head that is not spared
    random, read = np.random.default_rng(0), 0
    for first, count in zip(range(keys - rows, keys, block), through, strict=True):
        nearest = set(range(first + 1 - block, first + 1))
        read += len(nearest | set(random.choice(first + 1, count, replace=False).tolist())) + block - 1
    assert keys_of_blocks(keys, rows, at) == pytest.approx(read, rel=0.01)


def test_keys_that_rows_read_together_and_alone_are_counted_as_of_independent_rows():
    keys, at = 4096, 0.2
    kept = np.random.default_rng(0).random((COMMON_ROWS, keys)) < at
    together = kept.sum(0) >= KEEPERS
    assert read_together(at) == pytest.approx(together.mean(), abs=0.03)
    assert read_alone(at) == pytest.approx(kept[:, ~together].sum() / kept.size, abs=0.01)
    kernels = ROOT / "shadowattn" / "kernels" / "csrc"
    assert f"sizeof(T) == 2 ? {KEEPERS} :" in (kernels / "fused_rows.h").read_text()
    assert f"kCommonRows = {COMMON_ROWS};" in (kernels / "common_keys.h").read_text()
