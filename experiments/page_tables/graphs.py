"""Banks of graphs, and what their estimates find."""

import pandas as pd

from experiments.page_tables.common import INCREASE, above, full_int8, one, rows_of, source, table
from shadowattn.reporting.style import attending_to_all
from shadowattn.reporting.verdicts import gains

_BANK = {
    "build_and_compile_s": ("build and compile (target 3 s)", 3.0, "{:.2f} s"),
    "load_s": ("load from blobs (target 0.5 s)", 0.5, "{:.2f} s"),
    "resident_bytes": ("resident after first use (target 300 MB)", 300e6, "{:.0f} MB"),
    "infer_us": ("a call with bound tensors (target 30 µs)", 30.0, "{:.1f} µs"),
    "call_us": ("a call with both copies", float("inf"), "{:.1f} µs"),
}


def bank() -> str:
    """What a bank of graphs costs."""
    rows = rows_of("graphs")
    lines = []
    for name in ("qwen2_0_5b", "qwen2_1_5b", "phonelm_0_5b", "phonelm_1_5b"):
        part, cells = rows[rows.method == name], []
        for metric, (_, target, form) in _BANK.items():
            value = one(part, metric=metric)
            text = form.format(value / 1e6 if metric.endswith("bytes") else value)
            cells.append(text if value <= target else f"**{text}, missed**")
        lines.append([name, *cells])
    builds = int(rows[rows.metric == "build_and_compile_s"].n.iloc[0])
    header = ["bank of 54 graphs", *(label for label, _, _ in _BANK.values())]
    return table(header, lines, "graphs", f"medians of {builds} builds; calls: of the rounds in the rows")


def waste() -> str:
    """Scores that are computed and not needed, by how shapes are chosen."""
    rows = rows_of("graphs")
    rows = rows[(rows.metric == "waste") & rows.shapes.isin([1, 2, 4, 8, 16])]
    cells = rows.set_index(["method", "shapes"]).value
    sizes = sorted(rows.shapes.unique())
    lines = [[f"`{name}`", *(f"{cells[name, s]:.0%}" for s in sizes)] for name in dict.fromkeys(rows.method)]
    return table(["padding with this many shapes", *map(str, sizes)], lines, "graphs", "500 prompts of 1 to 4096 tokens")


_TEXTS = {
    "table4": "bundled model, standard library",
    "table4_wikitext": "bundled model, WikiText-2",
    "table4_wikitext_stories": "stories260K, WikiText-2",
    "table4_smollm2": "SmolLM2, WikiText-2",
    "table4_stdlib": "SmolLM2, standard library",
    "table4_qwen2_5_coder": "Qwen2.5-Coder, WikiText-2",
}


def recall() -> str:
    """Recall of the exact top 20 %, mean and worst head."""
    sets = {}
    for name in _TEXTS:
        rows = rows_of(name)
        sets[name] = rows[(rows.retention == 0.2) & (rows.granularity == "row")]

    def cell(name: str, method: str) -> str:
        if method not in set(sets[name].method):  # newer than the rows
            return "–"
        mean, worst = (100 * one(sets[name], method=method, metric=metric) for metric in ("recall", "worst_head_recall"))
        return f"{mean:.2f}, {worst:.1f}"

    methods = dict.fromkeys(method for name in _TEXTS for method in sets[name].method)
    lines = [[method, *(cell(name, method) for name in _TEXTS)] for method in methods]
    header = ["percent of the exact top 20 % found: mean, worst head", *_TEXTS.values()]
    return table(header, lines, "table4", "the other columns from the files of their names")


_OFFSETS = ("table4_smollm2", "table4_qwen2_5_coder")
_FORMS = {"static, 1 bucket": "1 bucket", "static, 9 buckets": "9 buckets"}
_ROUNDED = {
    "clipped_heads": "heads clipped",
    "k_saturated": "values of K clipped",
    "k_zero": "values of K to 0",
    "k_levels": "levels of K in use",
}


def offset_scales() -> str:
    """What the mean key taken off K changes of static scales: heads and values clipped, values rounded to 0, levels in use."""
    lines = []
    for name in _OFFSETS:
        rows = rows_of(name)
        for method, words in _FORMS.items():
            for suffix, offset in (("", ""), (", less mean K", ", less the mean key")):
                figures = (
                    rows[(rows.method == method + suffix) & rows.metric.isin(_ROUNDED) & (rows.layer < 0)]
                    .set_index("metric")
                    .value
                )
                lines.append([_TEXTS[name].split(",")[0], words + offset, *(f"{figures[metric]:.1%}" for metric in _ROUNDED)])
    header = ["", "scales", *_ROUNDED.values()]
    counted = {name: int(rows_of(name).query("metric == 'k_zero'").n.iloc[0]) for name in _OFFSETS}
    n = f"shares of heads, values or levels; n = {counted[_OFFSETS[0]]} tokens"
    return f"{table(header, lines, _OFFSETS[0], n)}\n\n{source(_OFFSETS[1], f'the same, n = {counted[_OFFSETS[1]]} tokens')}"


_OUTPUTS = {
    "float": "float",
    "target_requant": "INT8, `target_requant`",
    "fixed_output": "INT8, `fixed_output`",
    "float_mean": "float, less the mean key",
    "target_requant_mean": "INT8, `target_requant`, less the mean key",
    "fixed_output_mean": "INT8, `fixed_output`, less the mean key",
}


def int8_outputs_qwen2_5_coder() -> str:
    """What graphs with INT8 scores find and lose on Qwen2.5-Coder-1.5B, with and without the mean key."""
    return _int8_outputs("int8_outputs_qwen2_5_coder")


def int8_outputs_smollm2() -> str:
    """The same on SmolLM2."""
    return _int8_outputs("int8_outputs_smollm2")


def _int8_outputs(name: str) -> str:
    rows = rows_of(name)
    at = rows[rows.metric == "loss_increase"].retention.iloc[0]
    found = rows[(rows.retention == at) & (rows.granularity == "row")].set_index(["method", "metric"]).value
    lines = []
    for method, words in _OUTPUTS.items():
        shares = (f"{100 * found[method, metric]:.1f}" for metric in ("recall", "worst_head_recall"))
        lines.append([words, *shares, *_loss_beside(rows, method, "float")])
    lines += [[f"every key (`{method}`)", "–", "–", *_loss_beside(rows, method, "float")] for method in _whole(rows)]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    header = [
        "scores of the graphs",
        f"% of the exact top {at:.0%} found",
        "worst head",
        "loss above dense, nat",
        "above `float`",
    ]
    n = f"n = {windows} windows; {_found_in(rows)}"
    return table(header, lines, name, f"exact attention to the found keys; 95 % intervals, paired; {n}")


_OFFSET_RUNS = {
    "SmolLM2": ("key_offset_smollm2_05", "key_offset_smollm2_1", "int8_outputs_smollm2"),
    "Qwen2.5-Coder": ("key_offset_qwen2_5_coder_05", "key_offset_qwen2_5_coder_1", "int8_outputs_qwen2_5_coder"),
}


def key_offset_losses() -> str:
    """What the mean key taken off K changes of the keys found and of the loss, with float scores, by retention."""
    lines, origins = [], []
    for model, names in _OFFSET_RUNS.items():
        for name in names:
            rows = rows_of(name)
            at = rows[(rows.metric == "loss_increase") & (rows.method == "float")].retention.iloc[0]
            found = rows[(rows.retention == at) & (rows.granularity == "row")].set_index(["method", "metric"]).value
            shares = (
                " → ".join(f"{100 * found[method, metric]:.1f}" for method in ("float", "float_mean"))
                for metric in ("recall", "worst_head_recall")
            )
            loss, _ = _loss_beside(rows, "float", "float")
            lines.append([f"{model}, {at:.0%}", *shares, loss, *_loss_beside(rows, "float_mean", "float")])
            windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
            beside = full_int8(rows) if _whole(rows) else ""
            origins.append(
                (
                    name,
                    f"{model}, {at:.0%}; 95 % intervals, paired; n = {windows} windows; {_found_in(rows)}{beside}",
                )
            )
    header = ["of the keys", "% found", "worst head", "loss above dense, nat", "less the mean key", "above without"]
    (first, n), *others = origins
    return "\n\n".join([table(header, lines, first, n), *(source(name, n) for name, n in others)])


_OFFSET_DIVERGENCES = {
    "Qwen2.5-Coder": "key_offset_divergence_qwen2_5_coder",
}


def key_offset_divergences() -> str:
    """What the mean key taken off K changes of the model's attention and of its next-token distribution."""
    lines, origins = [], []
    for model, name in _OFFSET_DIVERGENCES.items():
        rows = rows_of(name)
        values = rows[rows.granularity == ""].set_index(["method", "metric"]).value
        mass, worst, kl = (
            " → ".join(f"{values[method, metric]:.3f}" for method in ("float", "float_mean"))
            for metric in ("mass_recall", "worst_head_mass", "kl_divergence")
        )
        pairs = []
        for by in ("loss", "divergence"):
            found = gains(rows, by).set_index("method").loc["float_mean"]
            pairs.append(f"{above(found)}, {found.verdict}")
        at, n = found.retention, found.n
        tokens = int(rows[rows.metric == "worst_head_mass"].n.iloc[0])
        lines.append([f"{model}, {at:.0%}", mass, worst, pairs[0], kl, pairs[1]])
        origins.append((name, f"{model}; 95 % intervals, paired; n = {n} windows, mass over {tokens} tokens{full_int8(rows)}"))
    header = [
        "of the keys",
        "attention mass",
        "of the worst head",
        "loss above without, nat",
        "KL from dense, nat",
        "KL above without, nat",
    ]
    (first, n), *others = origins
    return "\n\n".join([table(header, lines, first, n), *(source(name, n) for name, n in others)])


def _loss_beside(rows: pd.DataFrame, method: str, reference: str) -> tuple[str, str]:
    """Loss above dense with its error, and above the reference with its interval."""
    cells = rows[rows.method == method].set_index("metric").value
    loss = "{:+.3f} ± {:.3f}".format(*(cells[metric] for metric in INCREASE))
    if method == reference:
        return loss, "–"
    gain, low, high = (cells[f"gain_over_{reference}{which}"] for which in ("", "_low", "_high"))
    return loss, f"{-gain:+.3f} ({-high:+.3f} … {-low:+.3f})"


def _whole(rows: pd.DataFrame) -> list[str]:
    """Methods that attend to every key."""
    return list(dict.fromkeys(attending_to_all(rows).method))


def grids() -> str:
    """Recall and loss by number of buckets and by their step, on the bundled model."""
    return _grids("fig14")


def grids_smollm2() -> str:
    """The same on SmolLM2."""
    return _grids("fig14_smollm2")


def _grids(name: str) -> str:
    rows = rows_of(name)
    recalls = rows[(rows.metric == "recall") & (rows.granularity == "row")].set_index("method").value
    cells = rows.set_index(["method", "metric"]).value
    lines = []
    for method in dict.fromkeys(rows.method[rows.method.isin(recalls.index)]):
        loss = [cells.get((method, metric), float("nan")) for metric in INCREASE]
        lines.append([method, f"{100 * recalls[method]:.2f} %", "–" if loss[0] != loss[0] else f"{loss[0]:+.4f} ± {loss[1]:.4f}"])
    for method in _whole(rows):
        loss, error = (cells[method, metric] for metric in INCREASE)
        lines.append([f"every key (`{method}`)", "–", f"{loss:+.4f} ± {error:.4f}"])
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    header = ["buckets, step, lookup", "exact top 20 % found", "loss above dense, nat"]
    first = table(header, lines, name, f"n = {windows} windows; {_found_in(rows)}")
    if len(_whole(rows)):
        return first
    return f"{first}\n\n{source('study_npu_full', 'every key' + full_int8(rows_of('study_npu_full')))}"


def _found_in(rows: pd.DataFrame) -> str:
    """How many rows of queries the share of found keys is of."""
    return f"keys found in {int(rows[(rows.metric == 'recall') & (rows.granularity == 'row')].n.iloc[0])} rows of queries"
