"""Fills the tables of README and docs from `results/reference`: `python -m experiments.pages` (`--check` only compares tables).

A page marks a table's place by `<!-- table NAME -->` and `<!-- end -->`; what lies between is the function of this name in
`experiments/page_tables`, so that no number of a table is older than its rows. Below each table stand the rows' file, n, machine,
commit and command. Figures of several runs (`experiments/page_figures.py`) are drawn as well.
"""

import argparse
import re
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import getmembers, isfunction
from pathlib import Path
from pkgutil import iter_modules

from experiments import page_tables
from experiments.page_figures import FIGURES
from experiments.publish import ROOT
from shadowattn.reporting.style import save

_PLACE = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)


def _tables() -> dict[str, Callable[[], str]]:
    modules = (import_module(f"{page_tables.__name__}.{one.name}") for one in iter_modules(page_tables.__path__))
    return {
        name: draw
        for module in modules
        if not module.__name__.endswith(".common")
        for name, draw in getmembers(module, isfunction)
        if draw.__module__ == module.__name__ and not name.startswith("_")
    }


TABLES = _tables()


def pages() -> list[Path]:
    """README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(page: str) -> str:
    """The text of a page with every table drawn anew. Raises `KeyError` on a table that nothing draws."""
    return _PLACE.sub(lambda place: f"<!-- table {place[1]} -->\n{TABLES[place[1]]()}\n<!-- end -->", page)


def main() -> None:
    """Writes the pages, or with `--check` names those that are not what their rows say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is not what its rows say")
    check = parser.parse_args().check
    old = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in old:
        if not check:
            page.write_text(filled(page.read_text()))
        print(page.relative_to(ROOT), "is older than its rows" if check else "written")
    for name, draw in () if check else FIGURES.items():
        figure, below = draw()
        save(figure, ROOT / "docs" / f"{name}.png", below=below)
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
