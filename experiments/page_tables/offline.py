"""Importance, need and the allocators."""

import pandas as pd

from experiments.page_tables.common import full_int8, loss_cells, one, rows_of, source, table
from shadowattn.reporting.need import need_and_signals
from shadowattn.reporting.verdicts import gains


def layer_zero() -> str:
    """What each head of layer 0 is worth, and how many keys it needs."""
    rows = rows_of("offline")
    rows = rows[rows.layer == 0]
    lines = []
    for head in sorted(rows["head"][rows["head"] >= 0].unique()):
        part = rows[rows["head"] == head]
        lines.append([
            f"head {head}", f"{one(part, method='ablate_zero', metric='loss_increase'):+.3f}",
            f"{one(part, method='one_head', metric='sensitivity_loss', retention=0.02):+.4f}",
            f"{one(part, metric='top_weight'):.1%}", f"{one(part, metric='effective_keys'):.1f}",
        ])  # fmt: skip
    header = ["layer 0", "without it, nat", "keeping 2 % of its keys, nat", "attention on one key", "effective keys"]
    return table(header, lines, "offline", "n in the rows: 8192 tokens for ablations, 4096 for the rest")


_MORE_WINDOWS = "offline_smollm2_64"  # of SmolLM2's ablations
_SIGNALS = {
    "ablation": "loss increase without the head",
    "sensitivity_error": "relative error of the layer's output (`measure=error`)",
    "sensitivity_divergence": "estimated KL divergence (`measure=divergence`)",
    "effective_keys": "effective keys of dense attention",
}


def need() -> str:
    """How well each signal ranks the bundled model's heads by the loss increase where a head alone keeps few keys."""
    return _need("offline")


def need_smollm2() -> str:
    """The same of SmolLM2's heads, by ablations on more windows too."""
    return f"{_need('need_smollm2', rows_of(_MORE_WINDOWS))}\n\n{source(_MORE_WINDOWS, 'the second line')}"


def _need(name: str, more: pd.DataFrame | None = None) -> str:
    """`more`: rows of a run whose ablations took more windows."""
    rows = rows_of(name)
    correlations = rows[rows.metric == "need_rank_correlation"].set_index(["method", "retention"]).value
    retentions = sorted(correlations.index.unique("retention"))
    lines = [[words, *(f"{correlations[signal, at]:+.2f}" for at in retentions)] for signal, words in _SIGNALS.items()]
    if more is not None:
        others = pd.concat([rows[rows.metric != "loss_increase"], more[more.metric == "loss_increase"]])
        pairs = [need_and_signals(others, at) for at in retentions]
        cells = [f"{signals['ablation'].corr(need, 'spearman'):+.2f}" for need, signals in pairs]
        lines.insert(1, [f"the same of {int(one(more, metric='windows_an_ablation'))} windows", *cells])
    header = ["rank correlation with the loss increase at", *(f"{at:.0%} of the keys" for at in retentions)]
    heads = rows[rows.metric == "top_weight"].shape[0]
    return table(header, lines, name, f"Spearman, n = {heads} heads")


# The bundled model and others of its size: how their weights began, and the end of their experiments' names.
_SEEDS = {
    "made by hand, seed 0 (bundled)": "",
    "made by hand, seed 1": "_struct_seed1",
    "drawn, seed 0": "_plain_seed0",
    "drawn, seed 1": "_plain_seed1",
}
_BY = ("uniform", "paper", "artifact", "waterfill", "error_greedy_error", "error_greedy")


def need_seeds() -> str:
    """How well ablation and divergence rank heads by need, in models of the bundled one's size that began with other weights."""
    correlations = {
        words: rows[rows.metric == "need_rank_correlation"].set_index(["method", "retention"]).value
        for words, rows in ((words, rows_of(f"offline{seed}")) for words, seed in _SEEDS.items())
    }
    retentions = sorted(next(iter(correlations.values())).index.unique("retention"))
    lines = [
        [words, _SIGNALS[signal], *(f"{of[signal, at]:+.2f}" for at in retentions)]
        for signal in ("ablation", "sensitivity_divergence")
        for words, of in correlations.items()
    ]
    header = ["initial weights", "rank correlation with the loss increase at", *(f"{at:.0%} of the keys" for at in retentions)]
    return _of_seeds(header, lines, "offline", "Spearman, n = 32 heads")


def allocators_seeds() -> str:
    """What allocators lose in the same models."""
    every = [(words, rows_of(f"study_allocators{seed}")) for words, seed in _SEEDS.items()]
    rows = pd.concat([rows.assign(method=words + rows.method) for words, rows in every])
    cells, legend = loss_cells(rows[rows.method.isin([words + method for words in _SEEDS for method in (*_BY, "npu_full")])])
    lines = []
    for words in _SEEDS:
        lines += [[words, f"{at:.0%}", *(cells[words + method, at] for method in _BY), ""] for at in (0.05, 0.1)]
        lines.append([words, "every key", *[""] * len(_BY), cells[words + "npu_full", 1.0]])
    header = ["initial weights", "of the keys", *(f"`{method}`" for method in _BY), "`npu_full`"]
    (windows,) = rows[rows.metric == "loss_increase_error"].n.unique()
    n = f"loss above dense, nat, ± one standard error, paired; n = {windows} windows{legend}"
    return _of_seeds(header, lines, "study_allocators", n)


def _of_seeds(header: list[str], lines: list[list[str]], name: str, n: str) -> str:
    """A table of several files of rows, and the line of each."""
    others = "\n\n".join(source(f"{name}{seed}", "the same") for seed in list(_SEEDS.values())[1:])
    return f"{table(header, lines, name, n)}\n\n{others}"


_SPREAD = {"main": "waterfill", "paper": "paper", "artifact": "artifact"}


def stability() -> str:
    """How far importance and what follows from it depend on the calibration's windows."""
    lines = []
    labels = {"offline": "bundled model", "offline_smollm2": "SmolLM2, WikiText-2", _MORE_WINDOWS: "SmolLM2, WikiText-2"}
    labels |= {"offline_stdlib": "SmolLM2, standard library"}
    for name, label in labels.items():
        rows = rows_of(name)
        allocators = rows[rows.metric == "largest_spread"].method
        lines.append([
            f"{label}, {int(one(rows, metric='windows_an_ablation'))} windows",
            *(f"{one(rows, method=allocators.iloc[0], metric=f'{what}_rank_correlation'):.2f}" for what in ("head", "layer")),
            *(f"{one(rows, method=method, metric='largest_spread'):.3f}" for method in _SPREAD),
        ])  # fmt: skip
    header = ["", "rank correlation of heads", "of layers", *(f"largest spread, `{words}`" for words in _SPREAD.values())]
    n = "even against odd windows; spread: standard deviation of a head's retention over resampled windows, at a mean of 0.2"
    others = (source(name, f"the {place} line") for name, place in zip([*labels][1:], ("second", "third", "fourth"), strict=True))
    return "\n\n".join([table(header, lines, "offline", n + "; the first line"), *others])


_OF_HEADS = {
    ("loss_increase", 1.0): "loss increase without the head, or the layer",
    ("sensitivity_divergence", 0.1): "estimated KL divergence where the head keeps 10 % of its keys",
    ("sensitivity_error", 0.1): "output error where the head keeps 10 % of its keys",
    ("effective_keys", 1.0): "number of keys that the head's attention is spread over",
}


def across_texts() -> str:
    """How alike SmolLM2's heads and layers are ranked on calibration texts of two corpora, by each thing that was measured."""
    names, lines, counts = ("offline_smollm2", "offline_stdlib"), [], {}
    for (metric, at), words in _OF_HEADS.items():
        rows = (rows_of(name) for name in names)
        values = [some[(some.metric == metric) & (some.retention == at)].set_index(["layer", "head"]).value for some in rows]
        both = pd.concat(values, axis=1, join="inner", keys=names, verify_integrity=True)
        of_layers = both.index.get_level_values("head") < 0  # rows of whole layers
        line = [words]
        for of, some in {"heads": both[~of_layers], "layers": both[of_layers]}.items():
            line.append(f"{some.corr('spearman').iloc[0, 1]:+.2f}" if len(some) else "")
            counts.setdefault(of, len(some))
        lines.append(line)
    header = ["rank correlation between the two texts, by", *counts]
    n = f"Spearman, n = {counts['heads']} heads and {counts['layers']} layers; WikiText-2"
    return f"{table(header, lines, names[0], n)}\n\n{source(names[1], 'the standard library')}"


def importance_speed() -> str:
    """Seconds and memory of the two exact ways to measure importance."""
    lines = []
    for name, label in (("offline_speed", "bundled model"), ("offline_speed_qwen2_0_5b", "random Qwen2-0.5B")):
        cells = rows_of(name).set_index(["method", "metric"]).value
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
    second = source("offline_speed_qwen2_0_5b", "the second line, one round")
    return f"{table(header, lines, 'offline_speed', 'the first line')}\n\n{second}"


_RACES = {
    "racing": "bundled model",
    "racing_stories260k": "stories260K",
    "racing_smollm2": "SmolLM2, WikiText-2",
    "racing_stdlib": "SmolLM2, standard library",
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
        rows = rows_of(name)
        for method, words in _RACED.items():
            cells = rows[(rows.method == method) & (rows.seed == 0)].set_index("metric").value
            lines.append([
                f"{label}, {words}",
                f"{cells['times_fewer_forwards_median']:.2f} ({cells['times_fewer_forwards_smallest']:.2f})",
                f"{cells['rank_correlation_median']:.3f} ({cells['rank_correlation_smallest']:.3f})",
                f"{cells['retention_largest_difference_median']:.3f} ({cells['retention_largest_difference_largest']:.3f})",
            ])  # fmt: skip
    orders = int(rows_of("racing").n.max())
    header = ["", "times fewer forward passes", "rank correlation of heads", "largest difference of a retention"]
    return table(header, lines, "racing", f"median (worst) of {orders} orders; the other models and texts from their own files")


def allocators() -> str:
    """At how many retentions each allocator is better and worse than a rival."""
    comparisons, lines = gains(rows_of("study_allocators")), []
    for (method, rival), line in comparisons.groupby(["method", "rival"], sort=False):
        counts = [f"{(line.verdict == decided).sum()} of {len(line)}" for decided in ("better", "worse")]
        lines.append([f"`{method}`", f"`{rival}`", *counts, f"{line.gain.min():+.4f} … {line.gain.max():+.4f}"])
    header = ["allocator", "against", "better at", "worse at", "gain over the retentions, nat"]
    n = f"{len(comparisons)} comparisons over n = {int(comparisons.n.iloc[0])} windows, sign-flip test, Holm-corrected, p ≤ 0.05"
    return table(header, lines, "study_allocators", n + full_int8(rows_of("study_allocators")))
