"""What a waiting person sees."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group, RenderableType
from rich.table import Table
from tqdm import tqdm

if TYPE_CHECKING:  # with torch, which a list of runs does without
    from shadowattn.offline.work import AblationWork


def bar(items: Iterable, title: str, *, total: int | None = None) -> tqdm:
    """A progress bar with the time left on a terminal; silent elsewhere. `total` where `items` does not know its length."""
    return tqdm(items, desc=title, total=total, disable=None, leave=False)


def say(text: str) -> None:
    """One line on what is going on, to standard error: standard output is for results."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)


def show(result: RenderableType) -> None:
    """A result on standard output, as wide as the terminal, or 160 columns in a file. Nothing in a table is cut short."""
    for part in result.renderables if isinstance(result, Group) else (result,):
        for column in part.columns if isinstance(part, Table) else ():
            column.overflow = "fold"
            column.no_wrap |= column.header == "method"  # of a name in two lines, neither is found again
    Console(width=None if sys.stdout.isatty() else 160).print(result)


def work_bar(work: Sequence["AblationWork"], title: str) -> Iterator["AblationWork"]:
    """A progress bar over pieces of work of different cost, so that the time left is right; silent where there is no terminal."""
    form = "{desc}: {percentage:3.0f}% |{bar}| {elapsed} gone, {remaining} left"
    with tqdm(total=sum(piece.cost for piece in work), desc=title, bar_format=form, disable=None, leave=False) as shown:
        for piece in work:
            yield piece
            shown.update(piece.cost)
