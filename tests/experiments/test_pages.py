"""Every table of README and docs is what the committed rows say."""

import pytest

from experiments.pages import TABLES, filled, pages
from experiments.publish import ROOT


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.name)
def test_a_page_says_what_its_rows_say(page):
    assert filled(page.read_text()) == page.read_text(), "fill it with: python -m experiments.pages"


def test_every_table_has_a_place():
    text = "".join(page.read_text() for page in pages())
    assert {name for name in TABLES if f"<!-- table {name} -->" in text} == set(TABLES)


def test_an_edited_number_is_noticed():
    page = next(page for page in pages() if "<!-- table " in page.read_text())
    table = page.read_text().split("<!-- table ")[1].split("<!-- end -->")[0]
    assert filled(page.read_text().replace(table, table.replace("1", "2"))) == page.read_text()


def test_a_table_that_nobody_defines_is_an_error():
    with pytest.raises(KeyError, match="no_such"):
        filled("<!-- table no_such -->\n<!-- end -->")


def test_pages_are_those_of_the_repository():
    assert ROOT / "README.md" in pages()
