"""Per-row lists read by tiles of rows: how much longer the union of a tile's lists is than one of them, and how fast it is read.

Every row attends to its own keys, whatever the tile, so that no quality is measured. Real activations decide: rows of a tile that
keep the same keys have a short union.
"""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor

from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.refusals import check_choice, check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.evaluation.unions import UnionSizes, measure_unions, observe_last_rows, row_lists
from shadowattn.interleave import Timing, interleave, ratio
from shadowattn.kernels import Kernels, choose
from shadowattn.machine import processor
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_tensor import Int8Tensor
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.selection import Rule
from shadowattn.reporting.figures.union_tiles import draw as draw_union_tiles
from shadowattn.reporting.rows import LayerTimeRow

# int8: without static scales, as `sparse_attention` estimates.
ESTIMATORS: dict[str, type[Estimator]] = {"oracle": Oracle, "int8": Int8Tensor}
BASELINES = ("own_dense", "sdpa", "per_row")
_WARMUP = 1


@dataclass(frozen=True)
class UnionRow(LayerTimeRow):
    """A row about tiles of `tile` rows (0: no tiles), in the last `chunk_rows` rows of a context. `n` counts tiles of a head, or
    rounds of a time, whose quartiles are `low` and `high`. `retention` of dense attention names what it was timed beside."""

    tile: int = 0


@dataclass(frozen=True)
class UnionTiles(Study):
    """The last `rows` rows of every held-out window in a dense prefill; per-row lists at `retentions` by each of `estimates`.

    Unions are measured for tiles of each number of rows in `tiles`. Times, for `timed_tiles`, are of the first window and
    estimate: medians of `rounds` rounds of a sum over all layers, in which candidates take turns layer by layer.
    """

    retentions: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2])
    tiles: list[int] = field(default_factory=lambda: [2, 4, 8, 16, 32, 64])
    timed_tiles: list[int] = field(default_factory=lambda: [8, 16, 32, 64])
    estimates: list[str] = field(default_factory=lambda: ["oracle", "int8"])
    rows: int = 256
    rounds: int = 9
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "evaluation", "seed", "kernel", "threads")
    headline: ClassVar[tuple[str, ...]] = ("union_ratio", "union_share", "time")

    def __post_init__(self):
        for name in ("retentions", "tiles", "estimates"):
            if not getattr(self, name) or len(set(getattr(self, name))) < len(getattr(self, name)):
                raise InputError(f"study.{name}: expected at least one and none twice, got {getattr(self, name)}")
        for estimate in self.estimates:
            check_choice("study.estimates", estimate, tuple(ESTIMATORS))
        if not all(0 < retention <= 1 for retention in self.retentions):
            raise InputError(f"study.retentions: expected shares of the visible keys, in (0, 1], got {self.retentions}")
        check_count("study.rows", self.rows)
        check_count("study.rounds", self.rounds)
        for name in ("tiles", "timed_tiles"):
            for tile in getattr(self, name):
                if not 2 <= tile <= 64 or self.rows % tile:
                    raise InputError(
                        f"study.{name}: expected 2 to 64 rows, and study.rows={self.rows} a multiple of them, got {tile}"
                    )
        missing = sorted(set(self.timed_tiles) - set(self.tiles))
        if missing:
            raise InputError(f"study.timed_tiles: expected tiles of study.tiles={self.tiles}, got {missing} beside them")

    def check(self, lab: Lab) -> None:
        if lab.context_tokens % self.rows:
            raise InputError(
                f"study.rows: expected a divisor of the {lab.context_tokens} tokens of a window, got {self.rows}; set study.rows "
                "or evaluation.context_tokens"
            )

    def measure(self, lab: Lab) -> list[UnionRow]:
        """Sizes window by window, then times one retention after the other."""
        windows, sizes, times = lab.heldout(), lab.units("sizes"), lab.units("times")
        say(f"unions: {len(self.tiles)} tiles at {len(self.retentions)} retentions, {len(windows)} windows")
        window_sizes = [
            sizes.get(str(index), partial(self._sizes, lab, window))
            for index, window in enumerate(bar(windows, "unions", total=len(windows)))
        ]
        rows = list(self._size_rows(lab, window_sizes))
        if not self.timed_tiles:
            return rows
        say(f"time: tiles of {', '.join(map(str, self.timed_tiles))} rows, {self.rounds} rounds, candidates take turns")
        for retention in self.retentions:
            seconds = times.get(f"{retention:g}", partial(self._times, lab, windows[0], retention))
            rows += self._time_rows(lab, retention, seconds)
        return rows

    def _kernels(self, lab: Lab) -> Kernels:
        return choose(lab.kernel, head_dim=lab.shape.head_dim, dtype=lab.loaded.model.dtype)

    def _sizes(self, lab: Lab, window: Tensor) -> dict[str, dict]:
        estimates = {name: ESTIMATORS[name]() for name in self.estimates}
        unions = measure_unions(lab.loaded.model, window, self.rows, estimates, self.retentions, self.tiles, self._kernels(lab))
        return {_key(*cell): asdict(sizes) for cell, sizes in unions.items()}

    def _size_rows(self, lab: Lab, window_sizes: list[dict[str, dict]]) -> Iterator[UnionRow]:
        common = replace(lab.row(UnionRow), method="union_tiles", allocator="uniform", chunk_rows=self.rows)
        for estimate in self.estimates:
            for retention in self.retentions:
                for tile in self.tiles:
                    sizes = [UnionSizes(**window[_key(estimate, retention, tile)]) for window in window_sizes]
                    ratio, share = (torch.tensor([getattr(one, name) for one in sizes]).mean(0) for name in ("ratio", "share"))
                    n = len(window_sizes) * self.rows // tile
                    row = replace(common, estimator=estimate, retention=retention, tile=tile, n=n)
                    every = n * ratio.numel()
                    yield replace(row, metric="union_ratio", value=float(ratio.mean()), n=every)
                    yield replace(row, metric="union_share", value=float(share.mean()), n=every)
                    for layer, heads in enumerate(ratio):
                        yield replace(row, metric="layer_union_ratio", value=float(heads.mean()), layer=layer, n=n * len(heads))
                    places = [(float(x), layer, head) for layer, heads in enumerate(ratio) for head, x in enumerate(heads)]
                    for which, (value, layer, head) in (("best", min(places)), ("worst", max(places))):
                        yield replace(row, metric=f"{which}_head_union_ratio", value=value, layer=layer, head=head)
                    if estimate == self.estimates[0]:
                        for value, layer, head in places:
                            yield replace(row, metric="head_union_ratio", value=value, layer=layer, head=head)

    def _times(self, lab: Lab, window: Tensor, retention: float) -> dict[str, list[float]]:
        """Seconds of every round by candidate, summed over layers."""
        kernels, totals, estimate = self._kernels(lab), {}, ESTIMATORS[self.estimates[0]]()
        with bar([], f"time at {retention:g}", total=lab.shape.layers) as shown:

            def observe(chunk: Chunk) -> None:
                with estimate.use():
                    scores = estimate.scores(chunk)
                calls = candidates(chunk, scores, retention, self.timed_tiles, kernels)
                for name, timing in interleave(calls, rounds=self.rounds, warmup=_WARMUP).items():
                    before = totals.get(name, [0.0] * self.rounds)
                    totals[name] = [a + b for a, b in zip(before, timing.seconds, strict=True)]
                shown.update(1)

            observe_last_rows(lab.loaded.model, window, self.rows, observe)
        return totals

    def _time_rows(self, lab: Lab, retention: float, seconds: dict[str, list[float]]) -> Iterator[UnionRow]:
        timings = {name: Timing(tuple(durations)) for name, durations in seconds.items()}
        common = replace(
            lab.row(UnionRow), path_kind="timing", retention=retention, n=self.rounds, chunk_rows=self.rows,
            kernel=lab.kernel_level, dtype=str(lab.loaded.model.dtype).removeprefix("torch."), processor=processor(),
            threads=torch.get_num_threads(),
        )  # fmt: skip
        for name, timing in timings.items():
            method, _, tile = name.partition(" ")
            row = replace(common, method=method, tile=int(tile or 0))
            if method not in ("own_dense", "sdpa"):
                row = replace(row, estimator=self.estimates[0], allocator="uniform")
            if method == "shared_lists":
                row = replace(row, query_block=row.tile, block_score=Rule().block_score)
            low, high = (1e3 * x for x in timing.quartiles_s)
            yield replace(row, metric="time", value=1e3 * timing.median_s, unit="ms", low=low, high=high)
            for baseline in BASELINES:
                yield replace(row, metric=f"times_faster_than_{baseline}", value=ratio(timings[baseline], timing))

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"union_tiles": draw_union_tiles(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table:
        """A line for each retention and tile: the union beside one list, and times, of dense attention beside them."""
        times = ("own_dense", "sdpa", "per_row", "shared_lists", "union_tiles_read", "union_tiles")
        table = Table("retention", "rows", "estimate", "|union| / k", "best head", "worst head", "share of keys", title=title)
        for name in times:
            table.add_column(f"{name.replace('_', ' ')}, ms")
        sizes = rows[rows.metric.isin(("union_ratio", "union_share", "best_head_union_ratio", "worst_head_union_ratio"))]
        values = rows[rows.metric == "time"].set_index(["method", "retention", "tile"]).value
        timed = sizes.estimator.iloc[0]
        for (retention, tile, estimate), tile_rows in sizes.groupby(["retention", "tile", "estimator"], sort=False):
            size = tile_rows.set_index("metric").value
            cells = [f"{size[m]:.2f}" for m in ("union_ratio", "best_head_union_ratio", "worst_head_union_ratio")]
            durations = [values.get((m, retention, at)) for m in times for at in (0 if m in BASELINES else tile,)]
            shown = [f"{x:.2f}" if x is not None and estimate == timed else "" for x in durations]
            table.add_row(f"{retention:g}", str(tile), estimate, *cells, f"{size['union_share']:.1%}", *shown)
        return table


def candidates(
    chunk: Chunk, scores: Tensor, retention: float, tiles: list[int], kernels: Kernels
) -> dict[str, Callable[[], object]]:
    """Attention of a chunk from lists that are there already, by name and rows of a tile.

    `union_tiles` makes the unions from the per-row lists and attends, `union_tiles_read` attends by unions made before.
    `shared_lists` gives the rows of a tile one list of about as many keys as a row keeps: other keys, for scale.
    """
    q, k, v, heads, scale = chunk.q, chunk.k, chunk.v, chunk.heads, chunk.scale
    seen = torch.arange(chunk.keys) <= chunk.positions[:, None]
    sdpa, kept = torch.nn.functional.scaled_dot_product_attention, row_lists(chunk, scores, retention, kernels)
    options = {"heads": heads, "scale": scale}
    calls: dict[str, Callable[[], object]] = {
        "own_dense": lambda: kernels.dense(q, k, v, causal_offset=chunk.first_position, **options),
        "sdpa": lambda: sdpa(q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=True),
        "per_row": lambda: kernels.attend(q, k, v, kept, **options),
    }
    for tile in tiles:
        rule = Rule(tile)
        lists = rule.lists(torch.full((len(heads),), retention, dtype=torch.float64), chunk.positions)
        shared, unions = kernels.select(scores[:, ::tile].contiguous(), lists), kernels.unite(kept, tile)
        calls |= {
            f"shared_lists {tile}": lambda shared=shared: kernels.attend(q, k, v, shared, **options),
            f"union_tiles_read {tile}": lambda unions=unions: kernels.attend_tiles(q, k, v, unions, **options),
            f"union_tiles {tile}": lambda tile=tile: kernels.attend_tiles(q, k, v, kernels.unite(kept, tile), **options),
        }
    return calls


def _key(estimate: str, retention: float, tile: int) -> str:
    return f"{estimate} {retention:g} {tile}"
