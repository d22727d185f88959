"""What a waiting person sees."""

from collections.abc import Iterable

from rich.console import Console
from tqdm import tqdm


def bar(items: Iterable, title: str) -> tqdm:
    """A progress bar with the time left on a terminal; silent elsewhere."""
    return tqdm(items, desc=title, disable=None, leave=False)


def say(text: str) -> None:
    """One line on what is going on, to standard error: standard output is for results."""
    Console(stderr=True, highlight=False, soft_wrap=True).print(text, markup=False)
