"""The retention above which dense attention is faster than a whole sparse chunk, measured on this machine.

Processors differ too much for one number: measured once for each dtype and way to make lists, in a few seconds, and kept in the
cache folder by processor, compiled kernels and instruction set.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from shadowattn.artifacts import cache_folder, read_json, sha256, write_json
from shadowattn.errors import InputError
from shadowattn.interleave import interleave, ratio
from shadowattn.kernels import Kernels, native
from shadowattn.kernels.native_kernels import NativeKernels
from shadowattn.machine import cores, processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.base import FirstLook
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.estimators.int8_fused import Int8Fused
from shadowattn.online.executor import Threads, run_batched
from shadowattn.online.selection import Rule
from shadowattn.online.stages import Parts, Stages
from shadowattn.types import Heads

RETENTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9)
# Blocks of fewer rows leave lanes empty and count as lists of their own.
_SHARED_ROWS = 32
# The chunk that is timed. Constants: what the cache folder holds is of this one, and `dense_above=LIMIT` sets the limit itself.
_HEADS, _KV_HEADS, _HEAD_DIM, _ROWS, _KEYS, _ROUNDS = 4, 2, 64, 256, 8192, 5


def break_even(kernels: Kernels, dtype: torch.dtype, rule: Rule, look: FirstLook | None = None) -> float:
    """A retention in (0, 1]; 1, never, with the torch twins. Lists are those of one row, or shared by 16 or more.

    One chunk of random tensors: estimate, selection and attention by the native kernels, against our own dense attention. The
    estimate is `int8_fused`'s, whichever the method's is, or after a first `look` `hierarchical`'s, of heads that none is spared.
    Lists are as long as the retention says: a rule's least budget, which makes those of the first rows longer, has no say.
    """
    if kernels.name != "native":
        return 1.0
    timed = Rule(_SHARED_ROWS, rule.block_score) if rule.query_block >= 16 else Rule()
    return _kept(dtype, timed, None if timed.query_block > 1 else look, native.level(), cache_folder())


@cache
def _kept(dtype: torch.dtype, rule: Rule, look: FirstLook | None, level: str, folder: Path) -> float:
    lists = f"{rule.query_block} rows by {rule.block_score}" if rule.query_block > 1 else "single rows"
    after = f" after a look at {look.candidates:g} times as many keys, {look.block_rows} rows" if look else ""
    key = f"{lists}{after}, {str(dtype).removeprefix('torch.')}"
    machine = f"{processor()}, {cores()} cores, kernels {sha256(native.path())[:12]}, {level}"
    path = folder / "break_even.json"
    try:
        break_evens = read_json(path, "measured again")
    except InputError:  # not there yet, or damaged
        break_evens = {}
    if key not in break_evens.get(machine, {}):
        value = measure(NativeKernels(), dtype, rule, look)
        break_evens[machine] = break_evens.get(machine, {}) | {key: value}
        write_json(path, break_evens)
    return float(break_evens[machine][key])


def measure(kernels: Kernels, dtype: torch.dtype, rule: Rule, look: FirstLook | None = None) -> float:
    """The same, measured now: interleaved calls, medians of their quotients, linear in between."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(_HEADS, _ROWS, _HEAD_DIM, generator=generator).to(dtype)
    k, v = (torch.randn(_KV_HEADS, _KEYS, _HEAD_DIM, generator=generator).to(dtype) for _ in range(2))
    estimator = Int8Fused.of(q, k) if look is None else replace(Hierarchical.of(q, k), **look._asdict())
    parts = Parts(estimator, rule, kernels)
    heads, scale = Heads.all(_HEADS, _KV_HEADS), _HEAD_DIM**-0.5
    calls = {"dense": lambda: kernels.dense(q, k, v, heads, causal_offset=_KEYS - _ROWS, scale=scale)}
    for retention in RETENTIONS:
        calls[str(retention)] = _sparse(Chunk.of(q, k, v, retention=retention, scale=scale), parts)
    timings = interleave(calls, rounds=_ROUNDS)
    return crossing(RETENTIONS, [ratio(timings["dense"], timings[str(retention)]) for retention in RETENTIONS])


def crossing(retentions: Sequence[float], ratios: Sequence[float]) -> float:
    """Where `ratios`, times faster than dense, fall to 1; 1 where they never do, the least retention where they all are below."""
    above = np.asarray(ratios) >= 1
    if not above.any():
        return float(retentions[0])
    last = int(np.flatnonzero(above)[-1])
    if last + 1 == len(ratios):
        return 1.0
    share = (ratios[last] - 1) / (ratios[last] - ratios[last + 1])
    return float(retentions[last] + share * (retentions[last + 1] - retentions[last]))


def _sparse(chunk: Chunk, parts: Parts) -> Callable[[], object]:
    return lambda: run_batched(Stages(chunk.rewound(), parts), threads=Threads(), keep_lists=False)
