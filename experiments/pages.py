"""Fills the tables of README and docs from `results/reference`: `python -m experiments.pages` (`--check` only compares).

A page marks a table's place by `<!-- table NAME -->` and `<!-- end -->`; what lies between is the function of this name in
`experiments/page_tables`, so that no number of a table is older than its rows. Below each table stand the rows' file, n, machine,
commit and command. Figures of several runs (`experiments/page_figures.py`) are drawn as well; one that was drawn from rows of
other commits is older than its rows.
"""

import argparse
import re
import sys
from collections.abc import Callable
from importlib import import_module
from inspect import getmembers, isfunction
from pathlib import Path
from pkgutil import iter_modules

from matplotlib.figure import Figure
from PIL import Image

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
        if not module.__name__.endswith("common")
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


def figures(folder: Path) -> dict[Path, tuple[Figure, str]]:
    """Figures of several runs, and where their rows are from, by the files in `folder` that are to hold them."""
    return {folder / f"{name}.png": draw() for name, draw in FIGURES.items()}


def old_figures(drawn: dict[Path, tuple[Figure, str]]) -> list[Path]:
    """Files of `figures` that are missing, or were drawn from rows of other commits."""
    return [path for path, (_, below) in drawn.items() if _described(path) != below]


def _described(path: Path) -> str | None:
    if not path.is_file():
        return None
    with Image.open(path) as picture:
        return picture.info.get("Description")


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
    drawn = figures(ROOT / "docs")
    late = old_figures(drawn)
    for path in late:
        print(path.relative_to(ROOT), "is older than its rows" if check else "written")
    for path, (figure, below) in () if check else drawn.items():
        save(figure, path, below=below)
    sys.exit(1 if check and (old or late) else 0)


if __name__ == "__main__":
    main()
