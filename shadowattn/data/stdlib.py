"""The text that every machine already has: the source of Python's own standard library.

Code repeats its identifiers, so context helps a model that reads it, which is what a study of sparse
attention needs. The library differs between Python versions: every result therefore carries the SHA-256 of
the text it was measured on.
"""

import hashlib
import os
import sysconfig
from pathlib import Path

import numpy as np

from shadowattn.data.overlap import unseen_text

# Shares of the files, by a hash of their path: 1 in 20 calibrates, 2 in 20 are held out for evaluation, the rest may
# train the bundled model. No file serves two of them; what files of two splits have in common, `heldout_text` leaves out.
_BUCKETS = 20
_SPLITS = {"calibration": {0}, "heldout": {1, 2}, "train": set(range(3, _BUCKETS))}
_LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def stdlib_files(split: str) -> list[Path]:
    """The standard library's `.py` files of one split (`train`, `calibration` or `heldout`), in a fixed order."""
    if split not in _SPLITS:
        raise ValueError(f"expected a split out of {sorted(_SPLITS)}, got {split!r}")
    root, paths = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]  # installed packages can be many times the library
        paths += [Path(folder, name).relative_to(root).as_posix() for name in files if name.endswith(".py")]
    return [root / path for path in sorted(paths) if _bucket(path) in _SPLITS[split]]


def stdlib_text(split: str) -> str:
    """All source text of one split, files joined by a blank line."""
    return "\n\n".join(stdlib_documents(split))


def stdlib_documents(split: str) -> list[str]:
    """The texts of one split, one per file."""
    return [path.read_text(encoding="utf-8", errors="ignore") for path in stdlib_files(split)]


def heldout_text(seen: np.ndarray) -> str:
    """The held-out split without any four lines that are in `seen`, the runs of lines that a model was trained on.

    The library repeats itself across files: 13 % of the runs of four lines in the held-out files stand in training files too,
    of its tables of code pages up to 98 %.
    """
    return unseen_text(stdlib_documents("heldout"), seen)


def _bucket(path: str) -> int:
    return hashlib.sha256(path.encode()).digest()[0] % _BUCKETS
