"""Text that one split shares with another: runs of four lines, compared by content and not by path.

Lines count without their indentation, and empty ones not at all.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from shadowattn.errors import InputError

_RUN = 4  # lines
# A file of which more than this share stands in the other split is left out whole: what remains of a table is no text.
_MOST_SHARED = 0.1


def line_runs(text: str) -> np.ndarray:
    """Hashes of all runs of four lines, uint32 [max(0, lines − 3)], in the order of the text."""
    return _hashes([line for _, line in _filled_lines(text.split("\n"))])


def distinct_runs(documents: Iterable[str]) -> np.ndarray:
    """The runs that occur in any of `documents`, uint32, sorted, each once."""
    return np.unique(np.concatenate([np.zeros(0, np.uint32), *map(line_runs, documents)]))


def shared_fraction(text: str, seen: np.ndarray) -> float:
    """The share of the text's runs that are in `seen` (sorted), 0 for a text of fewer than four lines."""
    runs = line_runs(text)
    return float(_contained(runs, seen).mean()) if len(runs) else 0.0


def load_runs(path: Path) -> np.ndarray:
    """What `distinct_runs` gave and `np.save` wrote. Raises `InputError` on a file that is missing or something else."""
    remedy = "it is part of the package: install it again"
    try:
        runs = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected hashes of the training text, but it cannot be read ({error}); {remedy}") from error
    if runs.dtype != np.uint32 or runs.ndim != 1 or not (runs[1:] > runs[:-1]).all():
        raise InputError(f"{path}: expected sorted uint32 hashes of the training text, got {runs.dtype} {runs.shape}; {remedy}")
    return runs


def unseen_text(documents: Iterable[str], seen: np.ndarray) -> str:
    """The documents joined by a blank line, without any run of four lines that is in `seen`.

    A document of which more than a tenth is in `seen` is left out; of the others, the lines of the runs in `seen`.
    """
    kept = [text for text in documents if shared_fraction(text, seen) <= _MOST_SHARED]
    lines = "\n\n".join(kept).split("\n")
    while shared := _shared_lines(lines, seen):  # lines that a cut has made neighbours are a new run
        lines = [line for number, line in enumerate(lines) if number not in shared]
    return "\n".join(lines)


def _contained(runs: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Which runs are in `seen`, by bisection: `np.isin` would sort `seen` again for every document."""
    places = np.searchsorted(seen, runs)
    return np.append(seen, 0)[places] == np.where(places < len(seen), runs, 1)


def _shared_lines(lines: list[str], seen: np.ndarray) -> set[int]:
    """Numbers of the lines that stand in a run of `seen`."""
    filled = _filled_lines(lines)
    starts = np.flatnonzero(_contained(_hashes([line for _, line in filled]), seen)).tolist()
    return {filled[start + offset][0] for start in starts for offset in range(_RUN)}


def _filled_lines(lines: list[str]) -> list[tuple[int, str]]:
    """Number and text, without indentation, of every line that is not empty."""
    return [(number, stripped) for number, line in enumerate(lines) if (stripped := line.strip())]


def _hashes(lines: list[str]) -> np.ndarray:
    runs = ("\n".join(lines[start : start + _RUN]).encode() for start in range(len(lines) - _RUN + 1))
    digests = b"".join(hashlib.blake2b(run, digest_size=4).digest() for run in runs)
    return np.frombuffer(digests, dtype="<u4").astype(np.uint32)
