"""Measured importance to retentions, without measuring again: the artifact's files in, its head-retention.txt out.

python -m experiments.reallocate measurements.json head-retention.txt --method artifact --retention 0.2
python -m experiments.reallocate heads.txt layers.txt head-retention.txt --method waterfill --base-ppl 11.2
"""

import argparse
import sys
from inspect import signature
from pathlib import Path

from shadowattn.errors import InputError
from shadowattn.offline import allocate
from shadowattn.offline.allocators import BY_NAME
from shadowattn.offline.artifact_files import read_importance, read_measurements, write_retention
from shadowattn.plugins import needs_nothing

# Those that need nothing but the importance in the files: no other measurement, and no other file.
METHODS = tuple(
    name
    for name, kind in BY_NAME.items()
    if needs_nothing(kind) and kind.needs <= {"importance"} and "path" not in signature(kind).parameters
)


def reallocate(files: list[Path], *, method: str, retention: float, base_ppl: float | None) -> str:
    """Writes the last of the files from the others and returns a line on what is in it."""
    *sources, target = files
    if len(sources) == 1:
        # The artifact's allocator never looks at the base, and its files do not hold one.
        read = read_measurements(sources[0], base_ppl=_base(base_ppl, method))
    elif len(sources) == 2:
        base = _base(base_ppl, method)
        if base is None:
            raise InputError(f"--base-ppl: expected the unchanged model's perplexity for {method}, which the files do not name")
        read = read_importance(*sources, base_ppl=base, ablation="unknown")
    else:
        raise InputError(f"expected measurements.json or heads.txt and layers.txt, then a file to write; got {len(files)} files")
    table = allocate(read.head_ppl, read.layer_ppl, base_ppl=read.base_ppl, retention=retention, method=method)
    write_retention(table, target)
    sparse = [layer for layer in table if min(layer) < 1]
    rest = sum(map(sum, sparse)) / max(1, sum(map(len, sparse))) if sparse else 1.0
    mean = sum(map(sum, table)) / sum(map(len, table))
    return f"{target}: mean {mean:.4g} over {len(table)} layers, {rest:.4g} over the {len(sparse)} sparse ones"


def _base(base_ppl: float | None, method: str) -> float | None:
    return 1.0 if base_ppl is None and (method == "artifact" or not BY_NAME[method].needs) else base_ppl


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--method", choices=METHODS, default="artifact")
    parser.add_argument("--retention", type=float, default=0.2)
    parser.add_argument("--base-ppl", type=float)
    options = parser.parse_args()
    try:
        print(reallocate(options.files, method=options.method, retention=options.retention, base_ppl=options.base_ppl))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
