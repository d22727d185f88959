"""The native kernels through their C interface (`csrc/abi.h`): which library, which instruction set, which pointers.

The library has no symbol of torch in it, so that one build serves any torch version. Shapes and dtypes are checked by the
callers in `ops.py`; here tensors become pointers and strides.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError

POOLINGS = ("rows", "max", "sum", "probability")
# Of the fused paths, as abi.h numbers them: the first look of a block of rows; packing the keys that it lets through; products of
# rows with keys; the choice of keys by them; attention of rows together, which read a key once, and of each row alone; and all of
# it in heads that a path with a first look spares one.
STAGES = ("first look", "let through", "estimate", "select", "attend together", "attend alone", "spared heads")
# Of "attend together": keys and values into the form that is multiplied; products with keys; the softmax of these; products of
# the weights with values. The next keys are fetched between products with keys, in dense attention on tiles as part of the form.
PARTS = ("form", "scores", "softmax", "values")


class _Tensor(Structure):
    _fields_ = (("data", c_void_p), ("head_stride", c_int64), ("row_stride", c_int64))

    @classmethod
    def of(cls, x: Tensor) -> _Tensor:
        """x [heads, rows, D] with a contiguous last axis."""
        return cls(x.data_ptr(), x.stride(0), x.stride(1))


def _fields(integers: str, *others: tuple[str, type]) -> list[tuple[str, type]]:
    return [*((name, c_int64) for name in integers.split()), *others]


class _Attend(Structure):
    _fields_ = _fields(
        "threads bfloat16 heads rows keys dim query_block",
        *((name, _Tensor) for name in ("q", "k", "v", "out")),
        *((name, c_void_p) for name in ("kv_head", "positions", "indices", "indptr", "ends", "members")),
        ("scale", c_float),
    )


class _Lists(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("candidates", "tail", "indptr", "indices")),
        *((name, c_int64) for name in ("sinks", "recent", "self_first")),
    )


class _Select(Structure):
    _fields_ = _fields("threads dtype heads lists", ("scores", _Tensor), ("to", _Lists))


class _Pack(Structure):
    _fields_ = _fields(
        "threads bfloat16 heads rows dim",
        ("k", _Tensor),
        ("scales", c_void_p),
        ("packed", c_void_p),
        ("packed_head_stride", c_int64),
        ("first_key", c_int64),
        ("by_key", c_void_p),
        ("by_key_head_stride", c_int64),
    )


class _Estimate(Structure):
    _fields_ = _fields(
        "threads bfloat16 pooling heads rows keys dim query_block",
        ("q", _Tensor),
        ("q_scales", c_void_p),
        ("packed", c_void_p),
        ("packed_head_stride", c_int64),
        ("kv_head", c_void_p),
        ("visible", c_void_p),
        ("exponents", c_void_p),
        ("scores", c_void_p),
        ("to", _Lists),
    )


class _Unite(Structure):
    _fields_ = _fields(
        "threads heads rows query_block",
        *((name, c_void_p) for name in ("row_indices", "row_indptr", "indices", "members", "ends")),
    )


class _FirstLook(Structure):
    _fields_ = _fields(
        "rows near", ("spared", c_void_p), ("by_key", c_void_p), ("by_key_head_stride", c_int64), ("candidates", c_float)
    )


class _Budgets(Structure):
    _fields_ = (("retention", c_void_p), ("least", c_int64), ("kept", c_void_p))


class _Rows(Structure):
    _fields_ = (("choose", _Estimate), ("attend", _Attend))


class _FusedRows(Structure):
    _fields_ = (*_Rows._fields_, ("budgets", _Budgets))


class _LookedRows(Structure):
    _fields_ = (("choose", _Estimate), ("first", _FirstLook), ("attend", _Attend), ("budgets", _Budgets))


class _TileLoop(Structure):
    _fields_ = _fields("threads bfloat16 products")


class _Largest(Structure):
    _fields_ = _fields("threads bfloat16 heads rows dim", ("x", _Tensor), ("largest", c_void_p))


_NO_SCALE = 2  # what a kernel that measures scales returns
_SCORES = {torch.float32: 0, torch.float16: 1, torch.int8: 2}
_FUNCTIONS = {
    "attend": _Attend,
    "select": _Select,
    "pack": _Pack,
    "estimate": _Estimate,
    "unite": _Unite,
    "fused_rows": _FusedRows,
    "fused_blocks": _Rows,
    "looked_rows": _LookedRows,
    "shared_step": _Rows,
    "tile_loop": _TileLoop,
    "largest": _Largest,
}


_REMEDY = "set it to such a file (`make sanitize` makes one), or unset SHADOWATTN_NATIVE for the installed kernels"


def path() -> Path | None:
    """The file of the compiled kernels, or None where the installation found no compiler.

    The environment variable SHADOWATTN_NATIVE names another build of them, such as one with sanitizers (`make sanitize`); raises
    `InputError` where that is no file.
    """
    if named := os.environ.get("SHADOWATTN_NATIVE"):
        if not Path(named).is_file():
            raise InputError(f"SHADOWATTN_NATIVE: expected a file of compiled kernels, got {named!r}; {_REMEDY}")
        return Path(named)
    spec = importlib.util.find_spec("shadowattn.kernels._native")
    return Path(spec.origin) if spec and spec.origin else None


@cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None where there are none. Raises `InputError` where they cannot be loaded, or are of another
    interface than this.
    """
    file = path()
    if file is None:
        return None
    try:
        loaded = ctypes.CDLL(str(file.absolute()))
    except OSError as error:
        named = os.environ.get("SHADOWATTN_NATIVE")
        remedy = f"SHADOWATTN_NATIVE names them; {_REMEDY}" if named else "compile them again: install shadowattn again"
        raise InputError(f"{file}: expected compiled kernels for this machine, got {error}; {remedy}") from error
    _check_interface(loaded, file)
    for name, struct in _FUNCTIONS.items():
        getattr(loaded, f"shadowattn_{name}").argtypes = (c_int, POINTER(struct))
    loaded.shadowattn_level.restype = c_char_p
    loaded.shadowattn_time_stages.argtypes = (c_int, POINTER(c_int64))
    loaded.shadowattn_time_stages.restype = None
    return loaded


def _check_interface(loaded: ctypes.CDLL, file: Path) -> None:
    """A library of other source would read arguments from wrong places."""
    expected = [*(ctypes.sizeof(struct) for struct in _FUNCTIONS.values()), ctypes.sizeof(c_int64) * len(STAGES + PARTS)]
    compiled = (c_int64 * 64)()  # room for other interfaces
    try:
        loaded.shadowattn_struct_bytes(compiled)
        _ = loaded.shadowattn_set_threads, loaded.shadowattn_level, loaded.shadowattn_time_stages
        compiled = [size for size in compiled if size]
    except AttributeError:
        compiled = []
    if compiled != expected:
        raise InputError(
            f"{file}: expected kernels with argument structs of {expected} bytes, got {compiled or 'an older interface'}; "
            "compile them again: install shadowattn again"
        )


@cache
def levels() -> tuple[str, ...]:
    """The instruction sets that the kernels were compiled for and this processor runs, lowest first: none where they were not
    compiled.
    """
    loaded = library()
    names = (loaded.shadowattn_level(number) for number in itertools.count()) if loaded else ()
    return tuple(name.decode() for name in itertools.takewhile(lambda name: name is not None, names))


_forced_level: str | None = None


def level() -> str:
    """The instruction set in use, the best one unless another is forced. Raises `InputError` where no kernels were compiled."""
    require()
    return _forced_level or levels()[-1]


@contextmanager
def forced_level(name: str) -> Iterator[None]:
    """Runs the kernels of a lower instruction set than the processor has: for tests and comparisons.

    Raises `InputError` where this processor lacks it.
    """
    global _forced_level
    require()
    checks.one_of("level on this processor", name, levels())
    before, _forced_level = _forced_level, name
    try:
        yield
    finally:
        _forced_level = before


def require() -> ctypes.CDLL:
    """The compiled kernels; raises `InputError` where there are none."""
    loaded = library()
    if loaded is None:
        raise InputError(
            "kernel: the native kernels were not built, since the installation found no C++ compiler; install one "
            "(GCC 12 or Clang 19 and later) and install shadowattn again, or choose kernel=torch"
        )
    return loaded


_stage_clocks = threading.Lock()
_before_alone = threading.local()
_SMALL = 1 << 18  # numbers that one thread goes through in less time than a second one may need to wake up


def threads() -> int:
    """How many threads a kernel may use: torch's number, or what it was before `alone`."""
    return getattr(_before_alone, "threads", None) or torch.get_num_threads()


@contextmanager
def alone() -> Iterator[None]:
    """Within, torch's own loops run on the calling thread alone, and the kernels on as many threads as before.

    For what lies between kernels and is small, as one chunk's lists are beside its attention on two cores. Each
    parallel region waits for all of its threads, and beside other programs for their turns on a core, which are milliseconds.
    Products by MKL keep their threads. It changes the number of the calling thread alone; torch.set_num_threads would also change
    the one that threads to come begin with.
    """
    if getattr(_before_alone, "threads", None):
        yield
        return
    loaded, threads_before = require(), torch.get_num_threads()  # which also makes torch set this thread's number up
    before = None
    try:
        _before_alone.threads = threads_before
        before = loaded.shadowattn_set_threads(1)
        yield
    finally:
        _before_alone.threads = None
        if before is not None:
            loaded.shadowattn_set_threads(before)


@contextmanager
def timed_stages() -> Iterator[dict[str, float]]:
    """Within, the fused paths time their stages, and these their parts: at the end the dictionary has the seconds of each of
    `STAGES` and `PARTS`, of all threads together. Dense attention is one stage, "attend together", and so is attention to
    lists that blocks share.

    Of what any thread of the process calls meanwhile. Raises `InputError` inside another one, and where no kernels were compiled.
    """
    loaded, nanoseconds, seconds = require(), (c_int64 * len(STAGES + PARTS))(), {}
    if not _stage_clocks.acquire(blocking=False):
        raise InputError("stages are timed already: expected one caller at a time, whose calls alone are counted")
    try:
        loaded.shadowattn_time_stages(1, nanoseconds)
        yield seconds
    finally:
        loaded.shadowattn_time_stages(0, nanoseconds)
        _stage_clocks.release()
        seconds |= {stage: 1e-9 * spent for stage, spent in zip(STAGES + PARTS, nanoseconds, strict=True)}


def _run(name: str, arguments: Structure) -> None:
    number = levels().index(level())
    failed = getattr(require(), f"shadowattn_{name}")(number, byref(arguments))
    if failed == _NO_SCALE:
        raise InputError(
            "expected finite q and k, got NaN or infinity, or numbers so small that the processor takes them for 0; a ranking of "
            "keys would mean nothing"
        )
    if failed:
        raise MemoryError(f"native {name}: no memory for its scratch; use shorter prompts or fewer threads")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    kv_head: Tensor,
    positions: Tensor,
    indices: Tensor | None,
    indptr: Tensor | None,
    query_block: int,
    scale: float,
    ends: Tensor | None = None,
    members: Tensor | None = None,
) -> None:
    """Writes `out` [H, Q, D]. Lists as in `Selection`; without them each row attends to every key up to its own.

    With `ends` and `members` they are unions as in `UnionTiles`, and `indptr` its `starts`.
    """
    lists = {"indices": indices, "indptr": indptr, "ends": ends, "members": members}
    _run("attend", _attention(q, k, v, out, kv_head=kv_head, positions=positions, query_block=query_block, scale=scale, **lists))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    *,
    kv_head: Tensor,
    positions: Tensor,
    query_block: int,
    scale: float,
    indices: Tensor | None = None,
    indptr: Tensor | None = None,
    ends: Tensor | None = None,
    members: Tensor | None = None,
) -> _Attend:
    heads, rows, dim = q.shape
    return _Attend(
        threads(), q.dtype == torch.bfloat16, heads, rows, k.shape[1], dim, query_block,
        *map(_Tensor.of, (q, k, v)), _Tensor() if out is None else _Tensor.of(out), kv_head.data_ptr(), positions.data_ptr(),
        *(None if x is None else x.data_ptr() for x in (indices, indptr, ends, members)), scale,
    )  # fmt: skip


def _lists(
    candidates: Tensor, tail: Tensor, indptr: Tensor, indices: Tensor | None, sinks: int, recent: int, self_first: bool
) -> _Lists:
    return _Lists(*(None if x is None else x.data_ptr() for x in (candidates, tail, indptr, indices)), sinks, recent, self_first)


def select(
    scores: Tensor,
    indices: Tensor,
    *,
    candidates: Tensor,
    tail: Tensor,
    indptr: Tensor,
    sinks: int,
    recent: int,
    self_first: bool,
) -> None:
    """Writes the lists that `scores` [H, B, K], float32, float16 or int8, call for into `indices`."""
    heads, lists, _ = scores.shape
    to = _lists(candidates, tail, indptr, indices, sinks, recent, self_first)
    _run("select", _Select(threads(), _SCORES[scores.dtype], heads, lists, _Tensor.of(scores), to))


def pack(k: Tensor, scales: Tensor, packed: Tensor, first_key: int, by_key: Tensor | None = None) -> None:
    """Quantises the rows of k [G, rows, D] and writes them into `packed` [G, K / 16, D / 4, 16, 4] from `first_key` on, and into
    `by_key` [G, K, D].
    """
    heads, rows, dim = k.shape
    workers = threads() if k.numel() > _SMALL else 1
    _run(
        "pack",
        _Pack(
            workers, k.dtype == torch.bfloat16, heads, rows, dim, _Tensor.of(k), scales.data_ptr(),
            packed.data_ptr(), packed.stride(0), first_key,
            *((None, 0) if by_key is None else (by_key.data_ptr(), by_key.stride(0))),
        ),
    )  # fmt: skip


def largest(x: Tensor, out: Tensor) -> None:
    """Writes the largest magnitude of each head of x [heads, rows, D] or NaN into `out` float32 [heads]."""
    heads, rows, dim = x.shape
    workers = threads() if x.numel() > _SMALL else 1
    _run("largest", _Largest(workers, x.dtype == torch.bfloat16, heads, rows, dim, _Tensor.of(x), out.data_ptr()))


def estimate(
    q: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    *,
    keys: int,
    kv_head: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    exponents: Tensor | None,
    scores: Tensor | None = None,
    lists: dict[str, Tensor | int | None] | None = None,
) -> None:
    """INT8 products of q [H, Q, D] with packed keys: into `scores` float32 [H, B, K], or chosen from into `lists`."""
    _run(
        "estimate",
        _choice(q, q_scales, packed, keys, kv_head, visible, pooling, query_block, exponents, scores=scores, lists=lists),
    )


def shared_scores(q: Tensor, q_scales: Tensor, packed: Tensor, scores: Tensor) -> None:
    """What the heads of a key head share a list by in a decoding step, q [H, 1, D], which follow one another: their INT8 products
    with packed keys, each head's divided by their standard deviation, summed over the heads. Into `scores` float32 [G, 1, K].
    """
    choose = _choice(q, q_scales, packed, scores.shape[2], None, None, query_block=len(q) // len(packed), scores=scores)
    _run("shared_step", _Rows(choose, _Attend()))


def shared_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    indices: Tensor,
    *,
    q_scales: Tensor | None,
    packed: Tensor,
    counts: list[int],
    sinks: int,
    recent: int,
    self_first: bool,
    scale: float,
) -> None:
    """Writes `out` [G, heads, D]: the heads of each key head, q [G, heads, D], attend to the `counts` [G] best keys by
    `shared_scores`, which are written into `indices`, a list after another. Without `q_scales` each head's is that of its row;
    raises `InputError` where that is not finite or not above 0.
    """
    groups, keys, dim = k.shape
    numbers = range(groups)
    # candidates, tail, indptr and kv_head of `_Lists` and `_Attend`, in one piece of memory
    plan = (c_int64 * (2 * groups + 3))(keys, 0, 0, *itertools.accumulate(counts), *numbers)
    at, place = ctypes.addressof(plan), ctypes.sizeof(c_int64)
    lists = _Lists(at, at + place, at + 2 * place, indices.data_ptr(), sinks, recent, self_first)
    heads, common = q.shape[1], (threads(), q.dtype == torch.bfloat16)
    choose = _Estimate(
        *common, 0, groups * heads, 1, keys, dim, heads, _Tensor(q.data_ptr(), dim, dim),
        None if q_scales is None else q_scales.data_ptr(), packed.data_ptr(), packed.stride(0), None, None, None, None, lists,
    )  # fmt: skip
    attend = _Attend(
        *common, groups, heads, keys, dim, heads, *map(_Tensor.of, (q, k, v, out)), at + (groups + 3) * place, None, None, None,
        None, None, scale,
    )  # fmt: skip
    _run("shared_step", _Rows(choose, attend))


def _choice(
    q: Tensor,
    q_scales: Tensor | None,
    packed: Tensor,
    keys: int,
    kv_head: Tensor | None,
    visible: Tensor | None,
    pooling: str = "rows",
    query_block: int = 1,
    exponents: Tensor | None = None,
    *,
    scores: Tensor | None = None,
    lists: dict[str, Tensor | int | None] | None = None,
) -> _Estimate:
    heads, rows, dim = q.shape
    return _Estimate(
        threads(), q.dtype == torch.bfloat16, POOLINGS.index(pooling), heads, rows, keys, dim, query_block,
        _Tensor.of(q), None if q_scales is None else q_scales.data_ptr(), packed.data_ptr(), packed.stride(0),
        *(None if x is None else x.data_ptr() for x in (kv_head, visible, exponents, scores)),
        _lists(**lists) if lists else _Lists(),
    )  # fmt: skip


def unite(
    row_indices: Tensor, row_indptr: Tensor, indices: Tensor, members: Tensor, ends: Tensor, *, rows: int, query_block: int
) -> None:
    """Writes unions of the lists of `query_block` of `rows` rows a head into the other three tensors; see `UnionTiles`."""
    heads = (len(row_indptr) - 1) // rows
    pointers = (x.data_ptr() for x in (row_indices, row_indptr, indices, members, ends))
    _run("unite", _Unite(threads(), heads, rows, query_block, *pointers))


def multiply_tiles(dtype: torch.dtype, products: int) -> None:
    """So many products of whole tiles on all threads, and nothing else: what tiles can do at most. One is 16,384 operations in
    bfloat16, and 32,768 in int8.

    Raises `InputError` where no level with tiles serves.
    """
    if level() != "amx":
        raise InputError(
            f"multiply_tiles: expected a level with tiles, got {level() or 'no kernels'}; measure another roof there"
        )
    _run("tile_loop", _TileLoop(threads(), dtype == torch.bfloat16, products))


def fused_rows(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    kept: Tensor,
    *,
    q_scales: Tensor | None,
    packed: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    retention: Tensor,
    min_budget: int,
    scale: float,
    sinks: int,
    recent: int,
    self_first: bool,
    indices: Tensor | None = None,
    first_look: dict[str, Tensor | int | float] | None = None,
) -> None:
    """Writes `out` [H, Q, D]: rows attend to what they choose by INT8 products with packed keys, of all or of those that a first
    look lets through. How many they keep together, by `keep_counts`, goes to `kept` int64 [1], and which to `indices` int32,
    where it is given. Without `q_scales` a head's is measured on its rows. With neither `out` nor a first look rows choose
    and do not attend.
    """
    if out is None and first_look is not None:
        raise ValueError("expected an output after a first look, got none")
    choose = _choice(q, q_scales, packed, k.shape[1], kv_head, None)
    choose.to = _Lists(None, None, None, None if indices is None else indices.data_ptr(), sinks, recent, self_first)
    attend = _attention(q, k, v, out, kv_head=kv_head, positions=positions, query_block=1, scale=scale)
    budgets = _Budgets(retention.data_ptr(), min_budget, kept.data_ptr())
    if first_look is None:
        _run("fused_rows", _FusedRows(choose, attend, budgets))
        return
    spared, by_key = first_look["spared"], first_look["by_key"]
    first = _FirstLook(
        first_look["rows"], first_look["near"], spared.data_ptr(), by_key.data_ptr(), by_key.stride(0), first_look["candidates"]
    )
    _run("looked_rows", _LookedRows(choose, first, attend, budgets))


def fused_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    *,
    scored: Tensor,
    q_scales: Tensor,
    packed: Tensor,
    kv_head: Tensor,
    positions: Tensor,
    visible: Tensor,
    pooling: str,
    query_block: int,
    exponents: Tensor | None,
    scale: float,
    lists: dict[str, Tensor | int | None],
) -> None:
    """Writes `out` [H, Q, D]: blocks of rows attend to the list that `estimate` of `scored` [H, rows, D] chooses for each. Lists
    without `indices` are not written.
    """
    choose = _choice(scored, q_scales, packed, k.shape[1], kv_head, visible, pooling, query_block, exponents, lists=lists)
    attend = _attention(q, k, v, out, kv_head=kv_head, positions=positions, query_block=query_block, scale=scale)
    _run("fused_blocks", _Rows(choose, attend))
