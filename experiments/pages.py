"""Fills the tables of README and docs from `results/reference`: `python -m experiments.pages` (`--check` only compares).

A page marks a table's place by `<!-- table NAME -->` and `<!-- end -->`; what lies between is written here and nowhere else, so
that no number of a table is older than its rows. Below each table stand the rows' file, n, machine, commit and command.
"""

import argparse
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pandas as pd

from experiments.provenance import origin_line
from experiments.publish import ROOT, read_reference
from shadowattn.reporting.attention_targets import TARGETS
from shadowattn.reporting.predictions import prediction_errors
from shadowattn.reporting.rows import GOES_BY
from shadowattn.reporting.style import attending_to_all
from shadowattn.reporting.verdicts import gains

REFERENCE = ROOT / "results" / "reference"
_PLACE = re.compile(r"<!-- table (\w+) -->\n.*?<!-- end -->", re.DOTALL)
SHAPES = {"qwen2-0.5b": "Qwen2-0.5B", "qwen2-1.5b": "Qwen2-1.5B", "phonelm-1.5b": "PhoneLM-1.5B"}


def pages() -> list[Path]:
    """README and every page of docs."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(page: str) -> str:
    """The text of a page with every table drawn anew. Raises `KeyError` on a table that is not defined here."""
    return _PLACE.sub(lambda place: f"<!-- table {place[1]} -->\n{TABLES[place[1]]()}\n<!-- end -->", page)


def _rows(name: str) -> pd.DataFrame:
    return read_reference(REFERENCE / f"{name}.csv")


def _one(rows: pd.DataFrame, **where: object) -> float:
    """The value of the only row that fits."""
    for column, value in where.items():
        rows = rows[rows[column] == value]
    if len(rows) != 1:
        raise ValueError(f"expected one row with {where}, got {len(rows)}")
    return float(rows.value.iloc[0])


def _table(header: Iterable[str], lines: Iterable[Iterable[str]], source: str, n: str) -> str:
    header = list(header)
    cells = [header, ["---"] * len(header), *map(list, lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in cells) + f"\n\n{_source(source, n)}"


def _origin(name: str) -> dict:
    return json.loads((REFERENCE / f"{name}.json").read_text())


def _recorded(name: str) -> bool:
    return _origin(name).get("recorded", True)


def _source(name: str, n: str) -> str:
    """Where rows were measured, from the file beside them."""
    origin = _origin(name)
    if not _recorded(name):
        return (
            f"`results/reference/{name}.csv`, {n}; machine and versions **not recorded**, published in commit "
            f"{origin['published_in'][:7]}, older than the code"
        )
    command = f"`{origin['command']}`"
    if "command_today" in origin:
        command = f"`{origin['command_today']}`, which then was {command}"
    on = origin_line(_rows(name), origin["machine"], origin["commit"], origin["dirty"])
    return f"`results/reference/{name}.csv`, {n}; {on}; {command}"


def _dash(value: float, digits: int) -> str:
    return "–" if value != value else f"{value:.{digits}f}"


def quickstart() -> str:
    """What the quickstart's table says."""
    rows = _rows("quickstart")
    columns = {"perplexity": 3, "kl_divergence": 3, "mass_recall": 3, "topk_overlap": 3, "output_error": 3, "density": 3}
    cells = rows[rows.metric.isin(columns)].set_index(["method", "retention", "metric"]).value
    lines = []
    order = rows.method.drop_duplicates().tolist()  # the order of the printed table
    pairs = rows[["method", "retention"]].drop_duplicates().sort_values("method", key=lambda x: x.map(order.index), kind="stable")
    for method, retention in pairs.itertuples(index=False):
        values = [cells.get((method, retention, metric), float("nan")) for metric in columns]
        lines.append([method, f"{retention:g}", *(_dash(x, d) for x, d in zip(values, columns.values(), strict=True))])
    header = ["method", "retention", "perplexity", "KL from dense, nat", "attention mass recall", "top-k overlap"]
    header += ["output error", "density"]
    return _table(header, lines, "quickstart", f"n = {_tokens(rows)} tokens")


def first_output() -> str:
    """What the quickstart's table says at its larger retention."""
    rows = _rows("quickstart")
    largest = rows.retention[rows.retention < 1].max()
    rows = rows[rows.retention >= largest]
    cells = rows[rows.metric.isin(["perplexity", "kl_divergence", "output_error"])]
    cells = cells.set_index(["method", "retention", "metric"]).value
    lines = [
        [method, f"{at:g}", *(_dash(cells.get((method, at, metric), float("nan")), 3) for metric in _FIRST)]
        for method, at in rows[["method", "retention"]].drop_duplicates().itertuples(index=False)
    ]
    return _table(["method", "retention", *_FIRST.values()], lines, "quickstart", f"n = {_tokens(rows)} tokens")


_FIRST = {"perplexity": "perplexity", "kl_divergence": "KL from dense, nat", "output_error": "output error"}


def _tokens(rows: pd.DataFrame) -> int:
    return int(rows[(rows.method == "dense") & (rows.metric == "loss")].n.iloc[0])


def sweep() -> str:
    """Loss above dense of every method on the bundled model."""
    return _losses("sweep_retention")


def headline() -> str:
    """Loss above dense of every method on SmolLM2."""
    return _losses("headline_wikitext")


def _losses(name: str) -> str:
    """Loss above dense of every method, a column a retention."""
    rows = _rows(name)
    whole = attending_to_all(rows).method
    rows = rows[(rows.retention <= 0.5) | rows.method.isin(whole)]
    increase, error = (rows[rows.metric == metric].set_index(["method", "retention"]).value for metric in _INCREASE)
    retentions = sorted(increase.index.get_level_values("retention").unique())
    lines = [
        [
            f"`{method}`",
            *(f"{increase[method, r]:+.3f} ± {error[method, r]:.3f}" if (method, r) in increase else "" for r in retentions),
        ]
        for method in dict.fromkeys(increase.index.get_level_values("method"))
    ]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    header = ["loss above dense, nat", *(f"{r:.0%} of the keys" if r < 1 else "every key" for r in retentions)]
    return _table(header, lines, name, f"n = {windows} windows, ± one standard error, paired")


_INCREASE = ("loss_increase", "loss_increase_error")


def estimators() -> str:
    """What the bundled model loses with the keys that every estimator chooses, beside what a score costs."""
    return _estimators("compare_estimators")


def _estimators(name: str) -> str:
    """A line an estimator, that of the least mean loss first."""
    rows = _rows(name)
    costs = rows[rows.metric == "estimate_mac_bits"].drop_duplicates("method").set_index("method").fillna({"needs": ""})
    increase, error = (rows[rows.metric == metric].set_index(["method", "retention"]).value for metric in _INCREASE)
    losses = increase[increase.index.get_level_values("method").isin(costs.index)].unstack()
    lines = []
    for method in losses.mean(axis=1).sort_values().index:
        cells = (f"{losses.loc[method, at]:+.3f} ± {error[method, at]:.3f}" for at in losses.columns)
        kind = costs.loc[method]
        lines.append([f"`{method}`", f"{kind.value:.4g}", GOES_BY[kind.sees], kind.needs, *cells])
    header = ["loss above dense, nat", "MAC × bits", "goes by", "calibrated", *(f"{at:.0%} of the keys" for at in losses.columns)]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    return _table(header, lines, name, f"n = {windows} windows, ± one standard error, paired")


def query_block() -> str:
    """Loss, answers and time of every rule that ranks keys for a block, one column for a block's rows."""
    rows = _rows("study_query_block")
    cells = rows.set_index(["method", "metric"]).value
    shared = [method.rsplit("_", 1) for method in dict.fromkeys(rows.method[rows.query_block > 1])]
    rules, blocks = list(dict.fromkeys(rule for rule, _ in shared)), list(dict.fromkeys(block for _, block in shared))

    def cell(method: str) -> str:
        faster = _dash(cells.get((method, "times_faster_than_dense"), float("nan")), 1)
        loss, error = (cells[method, metric] for metric in _INCREASE)
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
    return _table(header, lines, "study_query_block", f"{cells_say}; n = {windows} windows and {documents} documents")


def sharing() -> str:
    """What lists shared by blocks of rows add to the loss of per-row lists on SmolLM2."""
    rows = _rows("study_query_block_smollm2")
    comparisons = gains(rows)
    comparisons = comparisons[comparisons.rival == "per_row"].set_index("method")
    blocks = rows.drop_duplicates("method").set_index("method").query_block.reindex(comparisons.index)
    lines = []
    for kind in dict.fromkeys(name.replace(f"_{block}", "") for name, block in blocks.items()):
        score, _, _ = kind.partition("_without_own")
        names = [name for name, block in blocks.items() if name.replace(f"_{block}", "") == kind]
        cells = (comparisons.loc[name] for name in names)
        label = f"`{score}`, lists without the block's own keys" if kind.endswith("_without_own") else f"`{score}`"
        lines.append([label, *(f"{-cell.gain:+.3f} ({-cell.high:+.3f} … {-cell.low:+.3f})" for cell in cells)])
    at = comparisons.retention.iloc[0]
    header = [f"loss above per-row lists at {at:.0%} of the keys, nat", *(f"{block} rows" for block in sorted(blocks.unique()))]
    n = f"95 % intervals, paired; n = {int(comparisons.n.iloc[0])} windows"
    return _table(header, lines, "study_query_block_smollm2", n)


_SPEED = {
    "attend, per row": "attend, a list for every row",
    "attend, 32-row blocks": "attend, a list for 32 rows",
    "total (int8_fused), per row": "all of it, a list for every row",
    "total (int8_fused), 32-row blocks, leading_query": "all of it, a list for 32 rows (`leading_query`)",
    "total (int8_fused), 32-row blocks, max": "all of it, a list for 32 rows (`max`)",
    "total (int8_fused), 32-row blocks, probability": "all of it, a list for 32 rows (`probability`)",
    "total (int8), per row": "the same by OpenVINO's graphs (`int8`), a list for every row",
    "total (int8), 32-row blocks, leading_query": "by OpenVINO's graphs, a list for 32 rows (`leading_query`)",
}


def speed() -> str:
    """Times faster than torch's and than our own dense attention."""
    rows = _rows("attention_speed")
    rows = rows[(rows.part == "chunk") & rows.model.isin(list(SHAPES)[:2])]
    cases = [(model, dtype) for model in list(SHAPES)[:2] for dtype in ("float32", "bfloat16")]

    def cell(method: str, model: str, dtype: str) -> str:
        where = {"method": method, "model": model, "dtype": dtype}
        return " · ".join(f"{_one(rows, metric=f'times faster than {other}', **where):.1f}" for other in ("sdpa", "own dense"))

    measured = set(rows.method)
    lines = [[label, *(cell(method, *case) for case in cases)] for method, label in _SPEED.items() if method in measured]
    rounds = int(rows[rows.metric == "time"].n.max())
    header = ["times faster than SDPA · than our dense attention", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    return _table(header, lines, "attention_speed", f"medians of {rounds} rounds")


def peak_memory() -> str:
    """Peak memory of every path at 32k keys."""
    rows = _rows("attention_speed")
    rows = rows[rows.part == "memory"]
    cases = [(model, dtype) for model in SHAPES for dtype in ("float32", "bfloat16")]

    def cell(method: str, model: str, dtype: str) -> str:
        value = _one(rows, method=method, model=model, dtype=dtype)
        return f"{value:.0f}" if value <= _MEMORY_TARGET_MB else f"**{value:.0f}**"

    lines = [[method, *(cell(method, *case) for case in cases)] for method in dict.fromkeys(rows.method)]
    header = ["MB beyond q, k, v and output", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    return _table(header, lines, "attention_speed", f"one run each; above the target of {_MEMORY_TARGET_MB} MB in bold")


_MEMORY_TARGET_MB = 256


def stages() -> str:
    """What one chunk spends its time on, per row."""
    rows = _rows("attention_speed")
    rows = rows[(rows.part == "chunk") & (rows.metric == "time") & rows.model.isin(list(SHAPES)[:2])]
    cases = [(model, dtype) for model in list(SHAPES)[:2] for dtype in ("float32", "bfloat16")]
    names = ["quantise", "estimate", "select", "attend, per row", "total (int8_fused), per row", "own dense", "sdpa"]
    lines = [[name, *(f"{_one(rows, method=name, model=m, dtype=d):.1f}" for m, d in cases)] for name in names]
    header = ["ms a chunk", *(f"{SHAPES[model]} {dtype}" for model, dtype in cases)]
    return _table(header, lines, "attention_speed", f"medians of {int(rows.n.max())} rounds")


def decode() -> str:
    """One decode step at 8192 keys, times faster than our own dense attention."""
    rows = _rows("attention_speed")
    rows = rows[(rows.part == "decode") & (rows.context_tokens == 8192)]
    cases = list(dict.fromkeys(zip(rows.model, rows.dtype, strict=True)))
    lines = [
        [method, *(f"{_one(rows, method=method, model=m, dtype=d, metric='times faster than own dense'):.2f}" for m, d in cases)]
        for method in dict.fromkeys(rows.method)
    ]
    header = ["times faster than our dense attention", *(f"{SHAPES.get(m, m)} {d}" for m, d in cases)]
    rounds = int(rows[rows.metric == "time"].n.max())
    return _table(header, lines, "attention_speed", f"8192 keys, retention 0.2, medians of {rounds} rounds")


def pipeline() -> str:
    """A chunk's time in every mode of the pipeline."""
    rows = _rows("pipeline_speed")
    rows = rows[rows.metric == "time"]
    methods = ["int8 batched", "int8 serial", "int8 overlap", "int8 grouped", "int8 planned", "int8_fused batched"]
    lines = [
        [
            f"{SHAPES[model]}, {keys}",
            *(f"{_one(rows, model=model, context_tokens=keys, method=method):.1f}" for method in methods),
        ]
        for model, keys in rows[["model", "context_tokens"]].drop_duplicates().itertuples(index=False)
    ]
    header = ["ms; shape, keys", *(f"`{method}`" for method in methods)]
    return _table(header, lines, "pipeline_speed", f"medians of {int(rows.n.max())} rounds")


def interpolation() -> str:
    """The latency profile's error between its points."""
    rows = _rows("latency_profile")
    rows = rows[rows.metric.str.startswith("interpolation_error")]
    lines = []
    for stage in ("estimate", "select", "attend"):
        for over in ("keys", "retention"):
            part = rows[(rows.stage == stage) & rows.metric.str.contains(f"over_{over}")]
            if len(part):
                values = [_one(part, metric=f"interpolation_error_over_{over}_{kind}") for kind in ("median", "worst")]
                lines.append([stage, over, *(f"{100 * value:.1f} %" for value in values), str(int(part.n.iloc[0]))])
    return _table(["stage", "over", "median", "worst", "points"], lines, "latency_profile", "each inner point left out once")


_BANK = {
    "build_and_compile_s": ("build and compile (target 3 s)", 3.0, "{:.2f} s"),
    "load_s": ("load from blobs (target 0.5 s)", 0.5, "{:.2f} s"),
    "resident_bytes": ("resident after first use (target 300 MB)", 300e6, "{:.0f} MB"),
    "infer_us": ("a call with bound tensors (target 30 µs)", 30.0, "{:.1f} µs"),
    "call_us": ("a call with both copies", float("inf"), "{:.1f} µs"),
}


def bank() -> str:
    """What a bank of graphs costs."""
    rows = _rows("graphs")
    lines = []
    for name in ("qwen2_0_5b", "qwen2_1_5b", "phonelm_0_5b", "phonelm_1_5b"):
        part, cells = rows[rows.method == name], []
        for metric, (_, target, form) in _BANK.items():
            value = _one(part, metric=metric)
            text = form.format(value / 1e6 if metric.endswith("bytes") else value)
            cells.append(text if value <= target else f"**{text}, missed**")
        lines.append([name, *cells])
    builds = int(rows[rows.metric == "build_and_compile_s"].n.iloc[0])
    header = ["bank of 54 graphs", *(label for label, _, _ in _BANK.values())]
    return _table(header, lines, "graphs", f"medians of {builds} builds; calls: of the rounds in the rows")


def targets() -> str:
    """The targets of attention's speed beside what was measured; missed ones in bold."""
    rows = _rows("attention_speed")
    values = rows[rows.part.isin(("chunk", "memory"))].set_index(["method", "metric", "model", "dtype"]).value.to_dict()
    lines = []
    for target in TARGETS:
        limits = {"float32": target.float32, "bfloat16": target.bfloat16}
        cells = []
        for model, dtype in itertools.product(("qwen2-0.5b", "qwen2-1.5b"), limits):
            value, limit = values[target.method, target.metric, model, dtype], limits[dtype]
            met = limit is None or (value <= limit if target.at_most else value >= limit)
            cells.append(f"{value:.3g}" if met else f"**{value:.3g}**")
        limit = " · ".join("–" if limit is None else f"{limit:g}" for limit in limits.values())
        lines.append([target.method, target.metric, f"{'≤' if target.at_most else '≥'} {limit}", *cells])
    header = ["", "measure", "target, float32 · bfloat16"]
    header += [f"{SHAPES[model]} {dtype}" for model in ("qwen2-0.5b", "qwen2-1.5b") for dtype in limits]
    return _table(header, lines, "attention_speed", "missed targets in bold; shares of SDPA's time, memory in MiB")


def waste() -> str:
    """Scores that are computed and not needed, by how shapes are chosen."""
    rows = _rows("graphs")
    rows = rows[(rows.metric == "waste") & rows.shapes.isin([1, 2, 4, 8, 16])]
    cells = rows.set_index(["method", "shapes"]).value
    sizes = sorted(rows.shapes.unique())
    lines = [[f"`{name}`", *(f"{cells[name, s]:.0%}" for s in sizes)] for name in dict.fromkeys(rows.method)]
    return _table(["padding with this many shapes", *map(str, sizes)], lines, "graphs", "500 prompts of 1 to 4096 tokens")


_TEXTS = {
    "table4": "bundled model, standard library",
    "table4_wikitext": "bundled model, WikiText-2",
    "table4_wikitext_stories": "stories260K, WikiText-2",
}


def recall() -> str:
    """Recall of the exact top 20 %, mean and worst head."""
    sets = {}
    for name in _TEXTS:
        rows = _rows(name)
        sets[name] = rows[(rows.retention == 0.2) & (rows.granularity == "row")]

    def cell(name: str, method: str) -> str:
        mean, worst = (100 * _one(sets[name], method=method, metric=metric) for metric in ("recall", "worst_head_recall"))
        return f"{mean:.2f}, {worst:.1f}"

    methods = dict.fromkeys(sets["table4"].method)
    lines = [[method, *(cell(name, method) for name in _TEXTS)] for method in methods]
    header = ["percent of the exact top 20 % found: mean, worst head", *_TEXTS.values()]
    return _table(header, lines, "table4", "the other two columns from the files of their names")


def grids() -> str:
    """Recall and loss by number of buckets and by their step."""
    rows = _rows("fig14")
    recalls = rows[(rows.metric == "recall") & (rows.granularity == "row")].set_index("method").value
    cells = rows.set_index(["method", "metric"]).value
    lines = []
    for method in dict.fromkeys(rows.method[rows.method.isin(recalls.index)]):
        loss = [cells.get((method, metric), float("nan")) for metric in _INCREASE]
        lines.append([method, f"{100 * recalls[method]:.2f} %", "–" if loss[0] != loss[0] else f"{loss[0]:+.4f} ± {loss[1]:.4f}"])
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    header = ["buckets, step, lookup", "exact top 20 % found", "loss above dense, nat"]
    return _table(header, lines, "fig14", f"n = {windows} windows")


def schedulers() -> str:
    """Median gap to the optimum, and planning time."""
    rows = _rows("study_schedulers")
    gaps = rows[rows.metric == "gap_median"].set_index(["machines", "costs", "method", "heads"]).value
    times = rows[(rows.metric == "planning_time") & (rows.heads == 16)].set_index(["machines", "costs", "method"]).value
    heads = sorted(rows.heads.unique())
    lines = []
    for machines in (3, 2):
        for costs in ("measured", "random"):
            for method in dict.fromkeys(rows.method[rows.method != "optimal"]):
                key = (machines, costs, method)
                cells = [f"{100 * gaps[(*key, h)]:.1f}" for h in heads]
                lines.append([f"{machines}, {costs}", f"`{method}`", *cells, f"{times[key]:.0f}"])
    header = ["machines, costs", "scheduler", *(f"{h} heads" for h in heads), "µs to plan 16 heads"]
    return _table(header, lines, "study_schedulers", f"median gap in percent, n = {int(rows.n.max())} works")


def proven() -> str:
    """Share of the works whose optimum was proven."""
    rows = _rows("study_schedulers")
    rows = rows[rows.metric == "proven"].set_index(["machines", "costs", "heads"]).value
    heads = sorted(rows.index.get_level_values("heads").unique())
    lines = [
        [f"{machines}, {costs}", *(f"{100 * rows[machines, costs, h]:.0f}" for h in heads)]
        for machines in (3, 2)
        for costs in ("measured", "random")
    ]
    return _table(["machines, costs", *(f"{h} heads" for h in heads)], lines, "study_schedulers", "percent of the works")


def layer_zero() -> str:
    """What each head of layer 0 is worth, and how many keys it needs."""
    rows = _rows("offline")
    rows = rows[rows.layer == 0]
    lines = []
    for head in sorted(rows["head"][rows["head"] >= 0].unique()):
        part = rows[rows["head"] == head]
        lines.append([
            f"head {head}", f"{_one(part, method='ablate_zero', metric='loss_increase'):+.3f}",
            f"{_one(part, method='one_head', metric='sensitivity_loss', retention=0.02):+.4f}",
            f"{_one(part, metric='top_weight'):.1%}", f"{_one(part, metric='effective_keys'):.1f}",
        ])  # fmt: skip
    header = ["layer 0", "without it, nat", "keeping 2 % of its keys, nat", "attention on one key", "effective keys"]
    return _table(header, lines, "offline", "n in the rows: 8192 tokens for ablations, 4096 for the rest")


_SIGNALS = {
    "ablation": "loss increase without the head",
    "sensitivity_error": "relative error of the layer's output (`measure=error`)",
    "sensitivity_divergence": "estimated KL divergence (`measure=divergence`)",
    "effective_keys": "effective keys of dense attention",
}


def need() -> str:
    """How well each signal ranks heads by the loss increase where a head alone keeps few keys."""
    rows = _rows("offline")
    correlations = rows[rows.metric == "need_rank_correlation"].set_index(["method", "retention"]).value
    retentions = sorted(correlations.index.unique("retention"))
    lines = [[words, *(f"{correlations[name, at]:+.2f}" for at in retentions)] for name, words in _SIGNALS.items()]
    header = ["rank correlation with the loss increase at", *(f"{at:.0%} of the keys" for at in retentions)]
    return _table(header, lines, "offline", "Spearman, n = 32 heads")


def importance_speed() -> str:
    """Seconds and memory of the two exact ways to measure importance."""
    lines = []
    for name, label in (("offline_speed", "bundled model"), ("offline_speed_qwen2_0_5b", "random Qwen2-0.5B")):
        cells = _rows(name).set_index(["method", "metric"]).value
        lines.append([
            label, f"{cells['plain', 'seconds']:.1f} s", f"{cells['shared, torch', 'times_faster']:.2f}",
            f"{cells['shared', 'times_faster']:.2f}", f"{cells['shared', 'difference']:.0e}",
            f"{cells['plain', 'peak_bytes'] / 2**20:.0f} → {cells['shared', 'peak_bytes'] / 2**20:.0f} MiB",
        ])  # fmt: skip
    header = [
        "model",
        "plain",
        "times faster: shared, torch's linear layers",
        "shared",
        "largest difference of a loss",
        "peak memory",
    ]
    second = _source("offline_speed_qwen2_0_5b", "the second line, one round")
    return f"{_table(header, lines, 'offline_speed', 'the first line')}\n\n{second}"


_RACES = {
    "racing": "bundled model",
    "racing_stories260k": "stories260K",
}
_RACED = {
    "racing": "racing",
    "racing, loose": "racing with `z=1 tolerance=0.2 overlap=0.15 first=16`",
    "exact on fewer windows": "`shared` on as many windows as the race costs",
}


def racing() -> str:
    """Racing against all windows: the median and the worst of many orders."""
    lines = []
    for name, label in _RACES.items():
        rows = _rows(name)
        for method, words in _RACED.items():
            cells = rows[(rows.method == method) & (rows.seed == 0)].set_index("metric").value
            lines.append([
                f"{label}, {words}",
                f"{cells['times_fewer_forwards_median']:.2f} ({cells['times_fewer_forwards_smallest']:.2f})",
                f"{cells['rank_correlation_median']:.3f} ({cells['rank_correlation_smallest']:.3f})",
                f"{cells['retention_largest_difference_median']:.3f} ({cells['retention_largest_difference_largest']:.3f})",
            ])  # fmt: skip
    orders = int(_rows("racing").n.max())
    header = ["", "times fewer forward passes", "rank correlation of heads", "largest difference of a retention"]
    return _table(header, lines, "racing", f"median (worst) of {orders} orders; the other model from its own file")


# Every form of whole attention in INT8, and the sparse method beside it: what of it is rounded.
_ROUNDED = {
    "npu_full": "`npu_full`: Q, K, V, scores, probabilities in 1/127",
    "npu_full_log2": "the same, probabilities in powers of two",
    "npu_full_per_head": "`npu_full` with one scale a head",
    "qkv": "Q, K and V",
    "qkv_scores": "Q, K, V and scores",
    "qkv_probabilities": "Q, K, V and probabilities in 1/127",
    "qkv_log2": "Q, K, V and probabilities in powers of two",
    "int8_uniform": "nothing; INT8 estimates, exact attention on 20 % of the keys",
}
_NPU_FULL = ("study_npu_full", "study_npu_full_smollm2")


def npu_full() -> str:
    """Loss and divergence of whole attention in INT8, by what of it is rounded, a column a model."""
    cells = [_rows(name).set_index(["method", "metric"]).value for name in _NPU_FULL]

    def cell(losses: pd.Series, method: str) -> str:
        loss, error, divergence = (losses[method, metric] for metric in (*_INCREASE, "kl_divergence"))
        return f"{loss:+.3f} ± {error:.3f} · {divergence:.3f}"

    lines = [[words, *(cell(losses, method) for losses in cells)] for method, words in _ROUNDED.items()]
    windows = [int(_rows(name).query("metric == 'loss_increase_error'").n.iloc[0]) for name in _NPU_FULL]
    models = [_rows(name).model.iloc[0] for name in _NPU_FULL]
    header = ["rounded to INT8", *models]
    n = f"loss above dense ± standard error · KL divergence from dense, nat; n = {windows[0]} windows"
    second = _source(_NPU_FULL[1], f"n = {windows[1]} windows")
    return _table(header, lines, _NPU_FULL[0], n) + f"\n\n{second}"


_CHANGES = {"": "as they are", ", offset": "less the mean key", ", equalised": "equal channels", ", both": "both"}


def outliers() -> str:
    """Median over heads of the error that static INT8 attention makes in a head's output, on SmolLM2."""
    rows = _rows("study_outliers_smollm2")
    heads = rows[(rows.metric == "output_error") & (rows["head"] >= 0)]
    median = heads.groupby("method").value.median()
    sinks = rows[rows.metric == "error_of_sinks"].set_index("method").value
    lines = [
        [_ROUNDED[form], *(f"{median[form + change]:.3f}" for change in _CHANGES), f"{sinks[form]:.0%}"]
        for form in ("npu_full", "qkv", "qkv_scores", "qkv_probabilities")
    ]
    header = ["rounded to INT8", *(f"Q and K {words}" for words in _CHANGES.values()), "of it in heads with a sink"]
    count, with_sinks = heads.groupby("method").size().iloc[0], _one(rows, metric="heads_with_sinks")
    counted = f"median over {count} heads of ‖output − dense‖ / ‖dense‖; {with_sinks:.0f} heads have a sink"
    return _table(header, lines, "study_outliers_smollm2", f"{counted}; n = {heads.n.iloc[0]} tokens")


def allocators() -> str:
    """At how many retentions each allocator is better and worse than a rival."""
    comparisons, lines = gains(_rows("study_allocators")), []
    for (method, rival), line in comparisons.groupby(["method", "rival"], sort=False):
        counts = [f"{(line.verdict == decided).sum()} of {len(line)}" for decided in ("better", "worse")]
        lines.append([f"`{method}`", f"`{rival}`", *counts, f"{line.gain.min():+.4f} … {line.gain.max():+.4f}"])
    header = ["allocator", "against", "better at", "worse at", "gain over the retentions, nat"]
    n = f"{len(comparisons)} comparisons over n = {int(comparisons.n.iloc[0])} windows, sign-flip test, Holm-corrected, p ≤ 0.05"
    return _table(header, lines, "study_allocators", n)


def simulated() -> str:
    """The simulator's error on this machine's executor; rows of its earlier form are no evidence."""
    if not _recorded("validate_simulator"):
        return "Not measured yet in this form; the rows and the figure are of an earlier one, and nothing is quoted from them."
    rows = _rows("validate_simulator")
    lines = [one.cells() for one in prediction_errors(rows)]
    header = ["mode", "costs from", "mean error (95 %)", "worst", "within 10 %", "target"]
    calls = int(rows[rows.metric == "makespan"].n.max())
    return _table(
        header, lines, "validate_simulator", f"n = {prediction_errors(rows)[0].chunks} held-out chunks, {calls} calls each"
    )


TABLES: dict[str, Callable[[], str]] = {
    draw.__name__: draw
    for draw in (
        quickstart, first_output, headline, sweep, estimators, query_block, sharing, speed, peak_memory, stages, decode,
        targets, pipeline, interpolation, bank, waste, recall, grids, schedulers, proven, layer_zero, need,
        importance_speed, racing, allocators, npu_full, outliers, simulated,
    )
}  # fmt: skip


def main() -> None:
    """Writes the pages, or with `--check` names those that are not what their rows say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a page is not what its rows say")
    check = parser.parse_args().check
    old = [page for page in pages() if filled(page.read_text()) != page.read_text()]
    for page in old:
        if not check:
            page.write_text(filled(page.read_text()))
        print(page.relative_to(ROOT), "is older than its rows" if check else "written")
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
