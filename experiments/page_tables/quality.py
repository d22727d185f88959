"""Loss, divergence and answers of every method."""

import pandas as pd

from experiments.page_tables.common import INCREASE, above, dash, full_int8, loss_cells, loss_marks, rows_of, source, table
from experiments.studies.compare_estimators import kind_of
from experiments.studies.estimator_speed import said_break_even
from shadowattn.reporting.flags import EQUAL_DENSITY
from shadowattn.reporting.style import attending_to_all
from shadowattn.reporting.verdicts import gains


def quickstart() -> str:
    """What the quickstart's table says."""
    rows = rows_of("quickstart")
    columns = {"perplexity": 3, "kl_divergence": 3, "mass_recall": 3, "topk_overlap": 3, "output_error": 3, "density": 3}
    cells = rows[rows.metric.isin(columns)].set_index(["method", "retention", "metric"]).value
    lines = []
    order = rows.method.drop_duplicates().tolist()  # the order of the printed table
    pairs = rows[["method", "retention"]].drop_duplicates().sort_values("method", key=lambda x: x.map(order.index), kind="stable")
    for method, retention in pairs.itertuples(index=False):
        values = [cells.get((method, retention, metric), float("nan")) for metric in columns]
        lines.append([method, f"{retention:g}", *(dash(x, d) for x, d in zip(values, columns.values(), strict=True))])
    header = ["method", "retention", "perplexity", "KL from dense, nat", "attention mass recall", "top-k overlap"]
    header += ["output error", "density"]
    return table(header, lines, "quickstart", f"n = {_tokens(rows)} tokens")


def first_output() -> str:
    """What the quickstart's table says at its larger retention."""
    rows = rows_of("quickstart")
    largest = rows.retention[rows.retention < 1].max()
    rows = rows[rows.retention >= largest]
    cells = rows[rows.metric.isin(["perplexity", "kl_divergence", "output_error"])]
    cells = cells.set_index(["method", "retention", "metric"]).value
    lines = [
        [method, f"{at:g}", *(dash(cells.get((method, at, metric), float("nan")), 3) for metric in _FIRST)]
        for method, at in rows[["method", "retention"]].drop_duplicates().itertuples(index=False)
    ]
    return table(["method", "retention", *_FIRST.values()], lines, "quickstart", f"n = {_tokens(rows)} tokens")


_FIRST = {"perplexity": "perplexity", "kl_divergence": "KL from dense, nat", "output_error": "output error"}


def _tokens(rows: pd.DataFrame) -> int:
    return int(rows[(rows.method == "dense") & (rows.metric == "loss")].n.iloc[0])


def sweep() -> str:
    """Loss above dense of every method on the bundled model."""
    return _losses("sweep_retention")


def headline() -> str:
    """Loss above dense of every method on SmolLM2."""
    return _losses("headline_wikitext")


def headline_more() -> str:
    """The same at further retentions."""
    return _losses("headline_wikitext_more", most=0.7)


def headline_stdlib() -> str:
    """The headline's methods on other text."""
    return _losses("headline_stdlib")


def headline_stdlib_more() -> str:
    """The same at the other retentions, of two runs."""
    more, most = "headline_stdlib_more", "headline_stdlib_most"
    rows, others = rows_of(more), rows_of(most)
    rows = pd.concat([rows, others[others.retention < 1]])  # what attends to every key once
    return f"{_losses(more, most=0.7, rows=rows)}\n\n{source(most, '30% and 70% of the keys')}"


def sweep_qwen2_5_coder() -> str:
    """Loss above dense of every method on Qwen2.5-Coder-1.5B."""
    return _losses("sweep_qwen2_5_coder")


def headline_8192() -> str:
    """The headline's methods on SmolLM2 in windows of its whole context."""
    return _losses("headline_8192")


def headline_8192_stdlib() -> str:
    """The same on other text."""
    return _losses("headline_8192_stdlib")


def headline_min_16() -> str:
    """Three of the headline's methods with a least budget of 16 keys a row."""
    return _losses("headline_min_16")


def published_profile() -> str:
    """Loss of the profile published for Qwen2-1.5B on a sibling of it."""
    return _losses("published_profile_qwen2_5_coder")


_SIZES = {
    "sweep_retention": ("bundled, 5.4 million", "held-out code"),
    "headline_wikitext": ("SmolLM2, 135 million", "WikiText-2"),
    "sweep_qwen2_5_coder": ("Qwen2.5-Coder, 1.5 billion", "WikiText-2"),
}


def headline_dtypes() -> str:
    """Losses and their paired differences at a tenth of the keys, in both dtypes."""
    return _in_both(["headline_wikitext"], "headline_float32")


def headline_dtypes_stdlib() -> str:
    """The same on other text."""
    return _in_both(["headline_stdlib"], "headline_stdlib_float32")


def allocator_dtypes() -> str:
    """The same of allocators by ablation, whose importance was measured in either dtype, too."""
    return _in_both(["study_allocators_smollm2_retentions"], "allocators_float32")


def block_dtypes() -> str:
    """The same of lists shared by rows."""
    return _in_both(["study_query_block_smollm2_more", "study_query_block_smollm2_two"], "query_block_float32")


def _in_both(bfloat16: list[str], float32: str) -> str:
    """What a run in float32 compares at a tenth of the keys, beside the runs in bfloat16 that have the same comparisons."""
    runs = [pd.concat(map(rows_of, bfloat16)).drop_duplicates(["method", "retention", "metric"]), rows_of(float32)]
    runs = [rows[(rows.retention == 0.1) | (rows.method == "npu_full")] for rows in runs]
    runs[0] = runs[0][runs[0].method.isin(runs[1].method)]
    losses, legends = zip(*(loss_cells(rows[rows.metric.isin(INCREASE)]) for rows in runs), strict=True)
    lines = [
        [f"`{method}`, {'every key' if at == 1 else f'{at:.0%} of the keys'}", *(of[method, at] for of in losses)]
        for method, at in losses[1]
    ]
    pairs = [gains(rows).set_index(["method", "rival"]) for rows in runs]
    for method, rival in pairs[1].index:
        found = [of.loc[(method, rival)] for of in pairs]
        lines.append([f"`{method}` above `{rival}`", *(f"{above(one)}, {one.verdict}" for one in found)])
    windows = [int(rows[rows.metric == "loss_increase_error"].n.iloc[0]) for rows in runs]
    said, last = (
        f"{dtype}, n = {n} windows{legend}" for dtype, n, legend in zip(["bfloat16", "float32"], windows, legends, strict=True)
    )
    first = table(["loss above dense, nat", "bfloat16", "float32"], lines, bfloat16[0], f"95 % intervals, paired; {said}")
    return "\n\n".join([first, *(source(name, said) for name in bfloat16[1:]), source(float32, last)])


_ERRORS = {
    "headline_wikitext": "SmolLM2, 2048 tokens",
    "headline_8192": "SmolLM2, 8192 tokens",
    "headline_stdlib": "SmolLM2, standard library, 2048 tokens",
    "headline_8192_stdlib": "SmolLM2, standard library, 8192 tokens",
    "sweep_qwen2_5_coder": "Qwen2.5-Coder",
}


def output_errors() -> str:
    """How far attention is from dense attention, beside the loss, for methods that the two put in another order."""
    lines, sources = [], []
    for name, words in _ERRORS.items():
        rows = rows_of(name)
        errors = rows[rows.metric == "output_error"].set_index(["method", "retention"]).value
        losses = rows[rows.metric == "loss_increase"].set_index(["method", "retention"]).value
        said = {cell: f"{errors[cell]:.3f} · {losses[cell]:+.3f}" for cell in errors.index}
        lines.append([words, "`npu_full`", *("" for _ in _SHARES), said["npu_full", 1.0]])
        for method in ("int8_uniform", "shadowattn", "streaming"):
            lines.append(["", f"`{method}`", *(said[method, at] for at in _SHARES), ""])
        counted = f"errors over {rows[rows.metric == 'output_error'].n.iloc[0]} tokens"
        sources.append(source(name, counted))
    header = ["output error · loss above dense, nat", "", *(f"{at:.0%} of the keys" for at in _SHARES), "every key"]
    cells = [header, ["---"] * len(header), *lines]
    return "\n\n".join(["\n".join("| " + " | ".join(line) + " |" for line in cells), *sources])


_SHARES = (0.05, 0.1, 0.2)


def loss_and_divergence() -> str:
    """How far pairs of methods are apart on the same windows: by loss, and by divergence from dense attention."""
    return _loss_and_divergence("headline_wikitext")


def loss_and_divergence_stdlib() -> str:
    """The same on other text."""
    return _loss_and_divergence("headline_stdlib_divergence")


def _loss_and_divergence(name: str) -> str:
    rows = rows_of(name)
    by = {kind: gains(rows, kind).set_index(["method", "rival", "retention"]) for kind in ("loss", "divergence")}
    lines = []
    for method, rival in dict.fromkeys(place[:2] for place in by["loss"].index):
        for kind, found in by.items():
            cells = [found.loc[(method, rival, at)] for at in _SHARES]
            said = (f"{above(one)}{'' if one.verdict in ('better', 'worse') else ' ='}" for one in cells)
            lines.append([f"`{method}` above `{rival}`" if kind == "loss" else "", kind, *said])
    header = ["nat", "", *(f"{at:.0%} of the keys" for at in _SHARES)]
    counted = {kind: (int(found.n.iloc[0]), len(found)) for kind, found in by.items()}
    (windows, pairs), (compared, _) = counted["loss"], counted["divergence"]
    n = f"95 % intervals, paired; n = {windows} windows, {compared} for the divergence"
    return table(header, lines, name, f"{n}; = p > 0.05, Holm-corrected over {pairs} comparisons of each kind")


def model_sizes() -> str:
    """What an estimate and a window lose on models of three sizes."""
    shown = [("npu_full", 1.0), *((method, at) for at in (0.1, 0.2) for method in ("int8_uniform", "streaming"))]
    parts = {name: rows_of(name) for name in _SIZES}
    chosen = [rows[[cell in shown for cell in zip(rows.method, rows.retention, strict=True)]] for rows in parts.values()]
    losses, marks = loss_cells(
        pd.concat([rows.assign(method=name + rows.method) for name, rows in zip(parts, chosen, strict=True)])
    )
    lines = []
    for name, (model, text) in _SIZES.items():
        windows = int(parts[name].n[parts[name].metric == "loss_increase_error"].iloc[0])
        lines.append([model, text, str(windows), *(losses[name + method, at] for method, at in shown)])
    header = [
        "model, parameters",
        "text",
        "windows",
        *(f"`{method}`, {at:.0%} of the keys" if at < 1 else f"`{method}`, every key" for method, at in shown),
    ]
    names = ", ".join(f"`results/reference/{name}.csv`" for name in _SIZES)
    cells = [header, ["---"] * len(header), *lines]
    return (
        "\n".join("| " + " | ".join(line) + " |" for line in cells)
        + f"\n\n{names}, loss above dense in nat ± one standard error{marks}"
    )


def allocators_smollm2() -> str:
    """Loss above dense of every allocator on SmolLM2."""
    return _losses("study_allocators_smollm2_retentions")


def allocators_smollm2_more() -> str:
    """The same at the smallest and the largest shares of the keys."""
    return _losses("study_allocators_smollm2_more", most=0.7)


def allocators_zero_64() -> str:
    """The same of those that go by ablations, on four times as many windows."""
    return _losses("allocators_smollm2_zero_64")


def allocators_stdlib() -> str:
    """The same on the standard library."""
    return _losses("study_allocators_stdlib")


def allocators_stdlib_more() -> str:
    """The same at the smallest and at the larger shares of the keys."""
    return _losses("study_allocators_stdlib_more", most=0.7)


def allocators_min_16() -> str:
    """Allocators with a least budget of 16 keys a row and without, of other runs of the same windows: loss and density."""
    lines = []
    for at, with_least, without in (
        (0.05, "allocators_min_16", "study_allocators_smollm2_retentions"),
        (0.2, "allocators_min_16_20", "study_allocators_smollm2_retentions"),
    ):
        both = [rows_of(name) for name in (without, with_least)]
        plain = [rows[rows.metric.isin(("loss_increase", "density")) & (rows.retention == at)] for rows in both]
        cells = [rows.set_index(["method", "metric"]).value for rows in plain]
        comparisons = gains(both[1])
        comparisons = comparisons[(comparisons.rival == "uniform") & (comparisons.retention == at)].set_index("method")
        for method in ("uniform", "paper", "waterfill", "artifact", "error_greedy"):
            if method not in set(both[1].method):
                continue
            shown = [f"{cell[method, 'loss_increase']:+.3f} · {cell[method, 'density']:.2%}" for cell in cells]
            beside = "–" if method == "uniform" else above(comparisons.loc[method])
            lines.append([f"{at:.0%}" if method == "uniform" else "", f"`{method}`", *shown, beside])
    header = ["of the keys", "loss above dense, nat · density", "one key a row", "16 keys a row", "16 keys, above `uniform`"]
    n = f"16 keys a row, 5% of the keys; n = {int(comparisons.n.iloc[0])} windows, 95 % intervals, paired{full_int8(both[1])}"
    others = {"allocators_min_16_20": "20% of the keys", "study_allocators_smollm2_retentions": "one key a row"}
    return "\n\n".join([table(header, lines, "allocators_min_16", n), *(source(*one) for one in others.items())])


def allocators_qwen2_5_coder() -> str:
    """The same on Qwen2.5-Coder, by the allocators that were measured there."""
    rows = rows_of("allocators_qwen2_5_coder")
    # The experiment's place for budgets by importance held two dense layers.
    rows = rows.assign(method=rows.method.where(rows.method != "waterfill", "first_layer_dense"))
    return _losses("allocators_qwen2_5_coder", rows=rows)


def ablation_qwen2_5_coder() -> str:
    """Loss above dense on Qwen2.5-Coder of allocators by ablation, beside those by need and two dense layers."""
    return _losses("study_allocators_qwen2_5_coder")


def first_look_8192() -> str:
    """The same in windows of SmolLM2's whole context, at a tenth of the keys and by the experiments' own settings."""
    return _losses("study_first_look_8192")


def first_look_smollm2() -> str:
    """What a first look costs in quality on SmolLM2, by the heads that are spared it and by what it lets through."""
    return _losses("study_first_look_smollm2")


def first_look_qwen2_5_coder() -> str:
    """The same on Qwen2.5-Coder, by the settings that were chosen on SmolLM2."""
    return _losses("study_first_look_qwen2_5_coder")


_FEWEST_FOR_ERRORS = 8  # windows: the standard error of fewer says little


def _losses(name: str, most: float = 0.5, rows: pd.DataFrame | None = None) -> str:
    """Loss above dense and divergence from it of every method, a column a retention up to `most`."""
    rows = rows_of(name) if rows is None else rows
    whole = attending_to_all(rows).method
    rows = rows[(rows.retention <= most) | rows.method.isin(whole)]
    losses, marks = loss_cells(rows)
    divergences = rows[rows.metric == "kl_divergence"].set_index(["method", "retention"])
    errors = rows[(rows.metric == "kl_divergence_error") & (rows.n >= _FEWEST_FOR_ERRORS)]
    errors = errors.set_index(["method", "retention"]).value
    said = {at: f"{value:.3f}" + (f" ± {errors[at]:.3f}" if at in errors else "") for at, value in divergences.value.items()}
    cells = {at: f"{loss} · {said[at]}" for at, loss in losses.items()}
    retentions = sorted({at for _, at in losses})
    methods = dict.fromkeys(name for name, _ in losses)
    lines = [[f"`{method}`", *(cells.get((method, at), "") for at in retentions)] for method in methods]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    header = ["loss above dense · KL from dense, nat", *(f"{r:.0%} of the keys" if r < 1 else "every key" for r in retentions)]
    both = "losses and KL" if len(errors) else "losses"
    n = f"n = {windows} windows, {both} ± one standard error, paired; KL over {int(divergences.n.iloc[0])} tokens{marks}"
    return table(header, lines, name, n)


def top_p() -> str:
    """Loss and measured density of budgets for rows, for heads, or for neither."""
    return _budgets("study_top_p")


def top_p_smollm2() -> str:
    """The same on SmolLM2, of two runs."""
    return _budgets("study_top_p_smollm2", "study_top_p_smollm2_retentions")


def _budgets(name: str, *others: str) -> str:
    """Of a run, and of `others` with the same windows at more retentions."""
    more = [rows_of(one) for one in others]
    rows = pd.concat([rows_of(name), *(one[one.retention < 1] for one in more)])  # dense attention and `npu_full` once
    placed = ["method", "retention", "metric"]
    cells = rows.drop_duplicates(placed).set_index(placed).value.sort_index()
    retentions = sorted(rows.retention[rows.retention < 1].unique())
    losses, marks = loss_cells(rows)
    lines = [
        [words, *(f"{losses[method, at]} · {cells[method, at]['density']:.3f}" for at in retentions)]
        for method, words in _BUDGETS.items()
    ]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    header = ["budgets of", *(f"{at:.0%} of the keys" for at in retentions)]
    n = f"loss above dense, nat, ± one standard error, paired · measured density; n = {windows} windows{marks}{full_int8(rows)}"
    return "\n\n".join([table(header, lines, name, n), *(source(one, "the other retentions") for one in others)])


_BUDGETS = {
    "uniform": "nobody: every row keeps the same share",
    "error_greedy": "heads (`error_greedy`)",
    "top_p": "rows (`estimator=top_p`)",
}


def estimators() -> str:
    """What the bundled model loses with the keys that every estimator chooses, beside what a score costs."""
    return _estimators("compare_estimators")


def estimator_speed() -> str:
    """How many keys it takes until a chunk with each estimator is faster than dense attention."""
    rows = rows_of("study_estimator_speed")
    longest = int(rows.context_tokens.max())
    ratios = rows[rows.metric == "times_faster_than_dense"]
    at_end = ratios[ratios.context_tokens == longest].pivot(index="method", columns="retention", values="value")
    even = rows[rows.metric == "break_even_keys"].pivot(index="method", columns="retention", values="value")
    lines = [
        [f"`{method}`", *(f"{said_break_even(even[at][method], longest)} · {at_end[at][method]:.2f}" for at in even.columns)]
        for method in at_end.sort_values(at_end.columns[0], ascending=False).index
    ]
    header = [f"break-even, keys · times faster at {longest} keys", *(f"{at:.0%} of the keys" for at in even.columns)]
    first = ratios.iloc[0]
    n = f"chunks of {first.chunk_rows} rows, medians of {first.n} rounds"
    return table(header, lines, "study_estimator_speed", n)


def estimators_smollm2() -> str:
    """The same on SmolLM2."""
    return _estimators("compare_estimators_smollm2")


def estimators_losses_smollm2() -> str:
    """Losses in more windows, which are enough to decide comparisons."""
    return _losses("compare_estimators_wikitext")


def estimators_answers() -> str:
    """The share of a task's questions that the bundled model answers with the keys of every estimator, dense attention first."""
    return _answers("compare_estimators")


def estimators_answers_smollm2() -> str:
    """The same of SmolLM2."""
    return _answers("compare_estimators_smollm2")


def estimators_divergence_smollm2() -> str:
    """What SmolLM2 would write with the keys of every estimator, beside the fidelity of its attention."""
    rows = rows_of("compare_estimators_smollm2")
    metrics = {metric: form for metric, (_, form) in _FIDELITY.items() if (rows.metric == metric).any()}
    placed = ["metric", "method", "retention"]
    cells = rows[rows.metric.isin(metrics)].drop_duplicates(placed).set_index(placed).value
    retentions = sorted(rows[rows.retention < 1].retention.unique())
    order = cells["kl_divergence"].unstack()[retentions].mean(axis=1).sort_values().index
    marks, legend = loss_marks(rows)
    lines = []
    for method in (method for method in order if method in rows[rows.retention < 1].method.unique()):
        figures = {at: [_or_dash(cells.get((metric, method, at)), form) for metric, form in metrics.items()] for at in retentions}
        lines.append([f"`{method}`", *(" · ".join(one) + marks[method, at] for at, one in figures.items())])
    header = [" · ".join(_FIDELITY[metric][0] for metric in metrics), *(f"{at:.0%} of the keys" for at in retentions)]
    generated, others = (rows[rows.metric == metric].iloc[0] for metric in ("divergent_tokens", "mass_recall"))
    prompts = others.n // others.context_tokens
    n = f"n = {generated.n} generated tokens of {prompts} prompts, {others.n} tokens for the others; flags of the losses{legend}"
    return table(header, lines, "compare_estimators_smollm2", n + full_int8(rows))


def layer_errors_smollm2() -> str:
    """In which layers of SmolLM2 the attention output of every estimator is off most, least error over all layers first."""
    rows = rows_of("layer_errors_smollm2")
    layers = rows[rows.metric == "layer_output_error"].pivot_table(index="method", columns="layer", values="value")
    overall = rows[rows.metric == "output_error"].set_index("method").value.sort_values()
    lines = []
    sparse = set(rows[rows.retention < 1].method)
    for method, error in overall.items():
        of = layers.loc[method]
        ends = (f"{of[layer]:.3f} (layer {layer})" for layer in (of.idxmin(), of.idxmax()))
        every = "" if method in sparse else ", every key"
        lines.append([f"`{method}`{every}", f"{error:.3f}", f"{of.median():.3f}", *ends])
    first = rows[rows.metric == "layer_output_error"].iloc[0]
    retention = rows[rows.retention < 1].retention.iloc[0]
    header = [f"output error, {retention:.0%} of the keys", "all layers", "median layer", "least", "largest"]
    return table(header, lines, "layer_errors_smollm2", f"n = {first.n} rows of {first.n // first.context_tokens} windows")


_FIDELITY = {
    "divergent_tokens": ("divergent tokens", ".0%"),
    "kl_divergence": ("KL, nat", ".3f"),
    "mass_recall": ("mass recall", ".3f"),
    "topk_overlap": ("top-k overlap", ".3f"),
    "dense_mass_recall": ("mass recall on the dense trace", ".3f"),
    "dense_topk_overlap": ("top-k overlap on the dense trace", ".3f"),
}


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _answers(name: str) -> str:
    rows = rows_of(name)
    mean, low, high = (
        rows[rows.metric == metric].set_index(["method", "retention"]).value
        for metric in ("accuracy", "accuracy_low", "accuracy_high")
    )
    said = {cell: f"{mean[cell]:.0%} ({low[cell]:.0%} … {high[cell]:.0%})" for cell in mean.index}
    retentions = sorted(at for at in mean.index.get_level_values("retention").unique() if at < 1)
    whole = [cell for cell in mean.index if cell[1] == 1]
    sparse = mean[mean.index.get_level_values("retention") < 1].unstack().mean(axis=1).sort_values(ascending=False, kind="stable")
    lines = [[f"`{method}`", said[method, at], *("" for _ in retentions)] for method, at in whole]
    lines += [[f"`{method}`", "", *(said[method, at] for at in retentions)] for method in sparse.index]
    questions = int(rows[rows.metric == "accuracy"].n.iloc[0])
    header = ["questions answered", "every key", *(f"{at:.0%} of the keys" for at in retentions)]
    return table(header, lines, name, f"n = {questions} questions, 95 % intervals (Wilson)")


def _is_apart(density: float, usual: float) -> bool:
    """Whether a method keeps so many more or fewer keys than most that its loss is not one at equal density."""
    return abs(density / usual - 1) > EQUAL_DENSITY


def _estimators(name: str) -> str:
    """A line an estimator, that of the least mean loss first."""
    rows = rows_of(name)
    costs = rows[rows.metric == "estimate_mac_bits"].drop_duplicates("method").set_index("method").fillna({"needs": ""})
    losses, marks = loss_cells(rows[rows.method.isin(costs.index)])
    retentions = sorted({at for _, at in losses})
    increase = rows[(rows.metric == "loss_increase") & rows.method.isin(costs.index)]
    read = rows[rows.metric == "estimate_bytes"].drop_duplicates("method").set_index("method").value
    errors = rows[rows.metric == "output_error"].set_index(["method", "retention"]).value
    densities = rows[(rows.metric == "density") & rows.method.isin(costs.index)].set_index(["method", "retention"]).value
    usual = densities.groupby("retention").median()
    apart = {cell: f" · density {value:.3f}" for cell, value in densities.items() if _is_apart(value, usual[cell[1]])}
    lines = []
    for method in increase.groupby("method").value.mean().sort_values().index:
        cells = (f"{losses[method, at]} · {errors[method, at]:.3f}{apart.get((method, at), '')}" for at in retentions)
        kind = costs.loc[method]
        lines.append([f"`{method}`", f"{kind.value:.4g}", f"{read[method]:.4g}", *kind_of(kind), *cells])
    header = [
        "loss above dense, nat · output error",
        "MAC × bits",
        "bytes",
        "goes by",
        "a list for",
        "keys at once",
        "calibrated",
    ]
    header += [f"{at:.0%} of the keys" for at in retentions]
    windows = int(rows[rows.metric == "loss_increase_error"].n.iloc[0])
    blocks = rows[rows.metric == "block_heads"].value
    mixed = f"; `flexprefill` ranks blocks in {blocks.mean():.0%} of heads and chunks, else single keys" if len(blocks) else ""
    return table(header, lines, name, f"n = {windows} windows, ± one standard error, paired{marks}{mixed}{full_int8(rows)}")
