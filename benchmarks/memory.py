"""Peak memory of one way to attend, beyond Q, K, V and the output: `python -m benchmarks.memory CANDIDATE SHAPE DTYPE KEYS`.

A process of its own for each, since memory that was once used is rarely given back. Linux only: the kernel's high-water mark is
reset before the call that counts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CANDIDATES = (
    *("sdpa", "own dense", "total (int8_fused), per row", "total (int8_fused), 32-row blocks, leading_query"),
    *("total (int8), per row", "total (int8), 32-row blocks, leading_query"),
)


def peak_bytes(candidate: str, shape: str, dtype: str, keys: int, rows: int, retention: float) -> int:
    """Measured in a fresh process: one chunk of `rows` queries, the last ones of `keys`."""
    arguments = [candidate, shape, dtype, str(keys), str(rows), str(retention)]
    done = subprocess.run([sys.executable, "-m", "benchmarks.memory", *arguments], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def _measure(candidate: str, shape: str, dtype: str, keys: int, rows: int, retention: float) -> int:
    import torch

    from benchmarks.candidates import Case, Tensors, baselines, totals

    def build(t: Tensors):
        if candidate in ("sdpa", "own dense"):
            return baselines(t)[candidate]
        return (totals(t, 1) | totals(t, 32))[candidate]

    # Libraries and kernels load on first use; that is not what a longer prompt costs.
    build(Tensors(Case(shape, getattr(torch, dtype), 1024, rows, retention)))()
    t = Tensors(Case(shape, getattr(torch, dtype), keys, rows, retention))
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    build(t)()  # with what it prepares: packed keys, or the baseline's mask
    return max(0, _status("VmHWM") - before - t.q.numel() * t.q.element_size())


def _status(field: str) -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    name, shape, dtype, keys, rows, retention = sys.argv[1:]
    print(json.dumps(_measure(name, shape, dtype, int(keys), int(rows), float(retention))))
