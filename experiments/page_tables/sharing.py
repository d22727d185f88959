"""Lists that rows of a block share."""

from collections.abc import Iterable
from itertools import pairwise

import pandas as pd

from experiments.page_tables.common import INCREASE, above, dash, full_int8, rows_of, source, table
from shadowattn.reporting.verdicts import gains


def query_block() -> str:
    """Loss, answers and time of every rule that ranks keys for a block, one column for a block's rows."""
    rows = rows_of("study_query_block")
    cells = rows.set_index(["method", "metric"]).value
    shared = [method.rsplit("_", 1) for method in dict.fromkeys(rows.method[rows.query_block > 1])]
    rules, blocks = list(dict.fromkeys(rule for rule, _ in shared)), list(dict.fromkeys(block for _, block in shared))

    def cell(method: str) -> str:
        faster = dash(cells.get((method, "times_faster_than_dense"), float("nan")), 1)
        loss, error = (cells[method, metric] for metric in INCREASE)
        return f"{loss:+.3f} ± {error:.3f} · {cells[method, 'accuracy']:.0%} · {faster}"

    density = [f"{cells[f'{rules[0]}_{block}', 'density']:.4f}" for block in blocks]
    lines = [
        ["measured density", f"{cells['per_row', 'density']:.4f}", *density],
        ["`per_row`", cell("per_row"), *("" for _ in blocks)],
        *([f"`{rule}`", "", *(cell(f"{rule}_{block}") for block in blocks)] for rule in rules),
    ]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    documents = int(rows[rows.metric == "accuracy"].n.iloc[0])
    header = ["rows of a list", "1", *blocks]
    cells_say = "a cell: loss above dense in nat · answers found · times faster than our dense attention"
    return table(
        header, lines, "study_query_block", f"{cells_say}; n = {windows} windows and {documents} documents{full_int8(rows)}"
    )


def sharing() -> str:
    """What lists shared by blocks of rows add to the loss of per-row lists on SmolLM2, and their divergence from dense."""
    rows = rows_of("study_query_block_smollm2")
    comparisons, divergences = gains(rows), _divergences(rows)
    comparisons = comparisons[comparisons.rival == "per_row"].set_index("method")
    blocks = rows.drop_duplicates("method").set_index("method").query_block.reindex(comparisons.index)
    at = comparisons.retention.iloc[0]
    lines = [["lists of single rows", f"{divergences[at, 'per_row']:.3f}", *("" for _ in blocks.unique())]]
    for kind in dict.fromkeys(name.replace(f"_{block}", "") for name, block in blocks.items()):
        score, _, _ = kind.partition("_without_own")
        names = [name for name, block in blocks.items() if name.replace(f"_{block}", "") == kind]
        cells = (_loss_and_divergence(comparisons.loc[name], divergences[at, name]) for name in names)
        label = f"`{score}`, lists without the block's own keys" if kind.endswith("_without_own") else f"`{score}`"
        lines.append([label, "", *cells])
    header = [f"loss above per-row lists at {at:.0%} of the keys · KL from dense, nat", *_columns(blocks.unique())]
    n = f"95 % intervals, paired; n = {_counted(rows, comparisons)}{_denser(rows)}{full_int8(rows)}"
    return table(header, lines, "study_query_block_smollm2", n)


def sharing_more() -> str:
    """The same of `probability` at several retentions, with smaller blocks."""
    return _by_retention("study_query_block_smollm2_more")


def sharing_two() -> str:
    """The same of blocks of two rows."""
    return _by_retention("study_query_block_smollm2_two")


def sharing_64() -> str:
    """The same for blocks of 64 rows."""
    return _by_retention("study_query_block_smollm2_64")


def sharing_most() -> str:
    """The same where many keys are kept."""
    return _by_retention("study_query_block_smollm2_most")


def sharing_half() -> str:
    """The same of blocks of 64 rows where half of the keys are kept."""
    return _by_retention("study_query_block_smollm2_half")


def sharing_ends() -> str:
    """The same of the smallest and the largest blocks at the ends of the sweep, and between."""
    return _by_retention("study_query_block_smollm2_ends")


def sharing_least() -> str:
    """The same of blocks of four and eight rows where fewest keys are kept."""
    return _by_retention("study_query_block_smollm2_least")


def sharing_stdlib() -> str:
    """The same on the standard library."""
    return _by_retention("study_query_block_stdlib")


def sharing_stdlib_two() -> str:
    """The same of blocks of two and four rows."""
    return _by_retention("study_query_block_stdlib_two")


def sharing_qwen2_5_coder() -> str:
    """The same on Qwen2.5-Coder-1.5B."""
    return _by_retention("study_query_block_qwen2_5_coder")


def sharing_qwen2_5_coder_two() -> str:
    """The same by blocks of fewer rows."""
    return _by_retention("query_block_qwen2_5_coder_2")


def _by_retention(name: str) -> str:
    rows = rows_of(name)
    comparisons, divergences = gains(rows), _divergences(rows)
    comparisons = comparisons[comparisons.rival == "per_row"].set_index(["retention", "method"])
    blocks = sorted(rows.query_block[rows.query_block > 1].unique())
    lines = []
    for at in sorted(rows.retention[rows.retention < 1].unique()):
        cells = ((at, f"probability_{block}") for block in blocks)
        shared = (_loss_and_divergence(comparisons.loc[cell], divergences[cell]) for cell in cells)
        lines.append([f"{at:.0%} of the keys", f"{divergences[at, 'per_row']:.3f}", *shared])
    header = ["`probability`, loss above per-row lists · KL from dense, nat", *_columns(blocks)]
    n = f"95 % intervals, paired; n = {_counted(rows, comparisons)}{_denser(rows)}"
    return table(header, lines, name, f"{n}{full_int8(rows)}")


def _columns(blocks: Iterable[int]) -> list[str]:
    return ["1 row: KL", *(f"{block} rows" for block in sorted(blocks))]


def _divergences(rows: pd.DataFrame) -> pd.Series:
    """The KL divergence from dense attention, by retention and method."""
    return rows[rows.metric == "kl_divergence"].set_index(["retention", "method"]).value


def _counted(rows: pd.DataFrame, comparisons: pd.DataFrame) -> str:
    tokens = int(rows[rows.metric == "kl_divergence"].n.iloc[0])
    return f"{int(comparisons.n.iloc[0])} windows, KL over {tokens} tokens"


def _denser(rows: pd.DataFrame) -> str:
    """By how much a measured density differs at most from that of per-row lists of the same retention."""
    densities = rows[(rows.metric == "density") & (rows.retention < 1)].set_index(["retention", "method"]).value
    apart = densities - densities.xs("per_row", level="method")
    return f"; measured densities differ from that of per-row lists by at most {apart.abs().max():.4f}"


def _loss_and_divergence(comparison: pd.Series, divergence: float) -> str:
    return f"{above(comparison)} · {divergence:.3f}"


_FORCED = {
    "per_row": "none",
    "recent_1": "the row's own key",
    "sinks_1": "the row's own key and the first key",
    "recent_16": "the last 16 keys",
}


def own_keys() -> str:
    """Lists of single rows in which some keys stand whatever their scores, within the budget: loss and divergence."""
    rows, lines = rows_of("own_key_smollm2"), []
    cells = rows.set_index(["method", "metric"]).value
    comparisons = gains(rows).set_index(["method", "rival"])
    for method, words in _FORCED.items():
        loss, error, divergence, mass = (cells[method, metric] for metric in (*INCREASE, "kl_divergence", "mass_recall"))
        beside = "–"
        if method != "per_row":
            beside = above(comparisons.loc[(method, "per_row")])
        lines.append([words, f"{loss:+.3f} ± {error:.3f}", beside, f"{divergence:.3f}", f"{mass:.3f}"])
    header = ["keys that outrank all others", "loss above dense, nat", "above none", "KL from dense, nat", "attention mass"]
    at, windows = rows.retention[rows.method == "per_row"].iloc[0], int(comparisons.n.iloc[0])
    counted = int(rows[rows.metric == "kl_divergence"].n.iloc[0])
    n = f"{at:.0%} of the keys; 95 % intervals, paired; n = {windows} windows, KL and mass over {counted} tokens"
    return table(header, lines, "own_key_smollm2", n + full_int8(rows))


def min_budgets() -> str:
    """Loss, divergence and density by the least budget of a row, on SmolLM2."""
    return _by_min_budget("min_budget_smollm2")


def min_budgets_stdlib() -> str:
    """The same on the standard library."""
    return _by_min_budget("min_budget_stdlib")


def min_budgets_qwen2_5_coder() -> str:
    """The same on Qwen2.5-Coder-1.5B."""
    return _by_min_budget("min_budget_qwen2_5_coder")


def _by_min_budget(name: str) -> str:
    rows, lines = rows_of(name), []
    own = rows[(rows.retention < 1) & (rows.method != "dense")]
    cells = own[own.octave == 0].drop_duplicates(["retention", "method", "metric"])
    cells = cells.set_index(["retention", "method", "metric"]).value.sort_index()
    comparisons, least = gains(rows), own.drop_duplicates("method").set_index("method").min_budget.sort_values()
    comparisons = comparisons[comparisons.rival == "per_row"].set_index(["retention", "method"])
    for at in sorted(own.retention.unique()):
        for index, (method, budget) in enumerate(least.items()):
            cell = cells[at, method]
            beside = "–" if method == "per_row" else above(comparisons.loc[(at, method)])
            loss, error = (cell[metric] for metric in INCREASE)
            lines.append([
                f"{at:.0%}" if index == 0 else "", str(budget), f"{cell['density']:.2%}", f"{loss:+.3f} ± {error:.3f}", beside,
                f"{cell['kl_divergence']:.3f}", f"{cell['mass_recall']:.3f}",
            ])  # fmt: skip
    header = [
        *("of the keys", "at least", "measured density", "loss above dense, nat", "above that of one key"),
        *("KL from dense, nat", "attention mass"),
    ]
    counted = int(rows[rows.metric == "kl_divergence"].n.iloc[0])
    n = f"95 % intervals, paired; n = {int(comparisons.n.iloc[0])} windows, KL and mass over {counted} tokens"
    return table(header, lines, name, f"{n}{full_int8(rows)}")


def min_budget_octaves() -> str:
    """Where in a window loss rises, by the least budget of a row, at 5 % of the keys, and with static INT8 attention."""
    rows, at = rows_of("min_budget_smollm2"), 0.05
    found = rows[rows.metric.str.startswith("octave_loss_increase")]
    found = found[(found.retention == at) | (found.method == "npu_full")]
    cells, octaves = found.set_index(["method", "octave", "metric"]).value, sorted(found.octave.unique())
    least = found[found.retention == at].drop_duplicates("method").set_index("method").min_budget.sort_values()
    lines = []
    for method, words in {**{name: f"at least {budget}" for name, budget in least.items()}, "npu_full": "`npu_full`"}.items():
        shown = (
            [cells[method, octave, metric] for metric in ("octave_loss_increase", "octave_loss_increase_error")]
            for octave in octaves
        )
        lines.append([words, *(f"{increase:+.2f} ± {error:.2f}" for increase, error in shown)])
    spans = [*(f"{first} to {after - 1}" for first, after in pairwise(octaves)), f"{octaves[-1]} or more"]
    header = ["a row keeps · a row sees", *spans]
    n = f"loss above dense, nat, of the rows of an octave; {at:.0%} of the keys; n = {found.n.iloc[0]} windows"
    return table(header, lines, "min_budget_smollm2", f"{n}, ± one standard error")


_OVERLAPS = ("study_overlap_maps", "study_overlap_maps_smollm2")
_REUSE = {
    "layer_overlap": "of a layer's list, share in the source layer's",
    "layer_mass": "of a layer's attention mass, share on the source layer's list",
    "row_reuse": "of a row's list, share in the source row's",
}


def overlap_maps() -> str:
    """How much of a list is found by how far its source is, layers or rows, on both models."""
    lines = []
    for name in _OVERLAPS:
        rows = rows_of(name)
        apart = rows.distance.where(rows.metric == "row_reuse", rows.layer - rows.source_layer)
        means = rows.groupby(["metric", apart]).value.mean()
        for metric, words in _REUSE.items():
            cells = [f"{means[metric, at]:.0%}" if (metric, at) in means.index else "" for at in (0, 1, 4, 16)]
            lines.append([rows.model.iloc[0], words, *cells])
    header = ["model", "found", "its own", "1 before", "4 before", "16 before"]
    n = f"n = {int(rows_of(_OVERLAPS[0]).n.iloc[0])} rows for a pair of layers"
    return table(header, lines, _OVERLAPS[0], n) + f"\n\n{source(_OVERLAPS[1], n)}"


def union_tiles() -> str:
    """Unions of per-row lists on SmolLM2's activations: their length, and times of attention beside per-row and shared lists."""
    name = "study_union_tiles_smollm2"
    rows = rows_of(name)
    sizes = rows[(rows.metric == "union_ratio") & (rows.estimator == rows.estimator.iloc[0])]
    sizes = sizes.set_index(["retention", "tile"]).value
    share = rows[(rows.metric == "union_share") & (rows.estimator == rows.estimator.iloc[0])]
    share = share.set_index(["retention", "tile"]).value
    faster = rows[rows.metric == "times_faster_than_per_row"].set_index(["method", "retention", "tile"]).value
    tiles = sorted({tile for method, _, tile in faster.index if method == "union_tiles"})
    others = {"own_dense": "our dense attention", "sdpa": "SDPA"}
    lines = []
    for retention in dict.fromkeys(at for at, _ in sizes.index):
        lines += [
            [f"{retention:.0%}", "length of the union, of one list", *(f"{sizes[retention, tile]:.2f}" for tile in tiles)],
            ["", "share of the visible keys in it", *(f"{share[retention, tile]:.0%}" for tile in tiles)],
            ["", "union tiles", *(f"{faster['union_tiles', retention, tile]:.2f}" for tile in tiles)],
            ["", "union tiles, unions made before", *(f"{faster['union_tiles_read', retention, tile]:.2f}" for tile in tiles)],
            ["", "one list for the tile (other keys)", *(f"{faster['shared_lists', retention, tile]:.2f}" for tile in tiles)],
        ]
        lines += [
            ["", words, f"{faster[method, retention, 0]:.2f}", *[""] * (len(tiles) - 1)] for method, words in others.items()
        ]
    timed = rows[rows.metric == "time"].iloc[0]
    header = ["keys kept", "times faster than per-row lists, but for lengths and shares", *(f"{tile} rows" for tile in tiles)]
    n = f"attention alone, {timed['dtype']}, medians of {int(timed.n)} rounds; unions of {rows.chunk_rows.max()} rows a window"
    return table(header, lines, name, n)
