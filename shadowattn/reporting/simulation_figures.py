"""What was simulated, in pictures: against what was measured or published where that is known."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.figures import new_figure, plain_ticks

_MARKERS = "osDv^<>P*X"


def validation(rows: pd.DataFrame) -> Figure:
    """Simulated against measured calls, a panel for each source of costs; the band is 10 %, hollow points were fitted on.

    Bars: the 95 % interval of the measured times.
    """
    makespans = rows[rows.metric == "makespan"]
    measured = makespans[makespans.measured == "measured"].set_index(["case", "mode"]).value / 1e3
    itself = measured * rows[rows.metric == "uncertainty"].set_index(["case", "mode"]).value
    fitted = sorted(makespans[makespans.flag != ""].case.unique())
    simulated_by = makespans[makespans.measured == "simulated"]
    sources = list(simulated_by.by.unique())
    drawn, axes = new_figure(columns=len(sources), rows=1)
    for axis, by in zip(axes.flat, sources, strict=True):
        simulated = simulated_by[simulated_by.by == by].set_index(["case", "mode"]).value / 1e3
        for index, mode in enumerate(simulated.index.unique("mode")):
            x, y = (of.xs(mode, level="mode").sort_index() for of in (measured, simulated))
            bars = itself.xs(mode, level="mode").sort_index()
            look = {"linestyle": "none", "marker": _MARKERS[index], "markersize": 5, "color": f"C{index}", "elinewidth": 0.7}
            axis.errorbar(x[fitted], y[fitted], xerr=bars[fitted], markerfacecolor="none", **look)
            axis.errorbar(x.drop(fitted), y.drop(fitted), xerr=bars.drop(fitted), label=mode, **look)
        ends = [0.9 * measured.min(), 1.1 * measured.max()]
        axis.plot(ends, ends, color="0.6", linewidth=1)
        axis.fill_between(ends, [0.9 * e for e in ends], [1.1 * e for e in ends], color="0.9", zorder=0)
        axis.set(xscale="log", yscale="log", xlabel="measured ms", ylabel="SIMULATED ms")
        axis.set_title(f"costs from the {by}", fontsize=9)
        plain_ticks(axis.xaxis)
        plain_ticks(axis.yaxis)
    axes.flat[0].legend(fontsize=8)
    held_out = makespans.case.nunique() - len(fitted)
    calls = int(makespans[makespans.measured == "measured"].n.max())
    title = f"one layer's chunk: {rows.model.iloc[0]}, {calls} calls each, band of 10 %"
    chunks = f"filled: {held_out} held-out chunks; hollow: {len(fitted)} that contention was fitted on"
    drawn.suptitle(f"{title}\n{chunks}", fontsize=9)
    return drawn


def fig10(rows: pd.DataFrame) -> Figure:
    """Fig. 10: latency of one layer's attention by length and method, a panel a model."""
    latency = rows[rows.metric == "latency"]
    drawn, axes = new_figure(columns=2, rows=2)
    for axis, (model, of) in zip(axes.flat, latency.groupby("model", sort=False), strict=True):
        lengths, methods = list(of.context_tokens.unique()), list(of.method.unique())
        for index, method in enumerate(methods):
            values = of[of.method == method].set_index("context_tokens").value
            axis.plot(lengths, [values[length] for length in lengths], _MARKERS[index] + "-", markersize=5, label=method)
        axis.set(yscale="log", xscale="log", ylabel="ms", xlabel="tokens")
        axis.set_title(model, fontsize=9)
        axis.set_xticks(lengths, [str(length) for length in lengths])
        axis.set_xticks([], minor=True)
    axes.flat[0].legend(fontsize=7)
    found = rows[rows.metric != "latency"]
    beside = [f" (published {value:g})" if value > 0 else "" for value in found.published]
    names = found.metric.str.replace("_", " ")
    roles = ["" if not text else ", fitted to" if flag else ", held out" for text, flag in zip(beside, found.flag, strict=True)]
    beside = [text.replace(")", f"{role})") for text, role in zip(beside, roles, strict=True)]
    texts = [f"{name} {value:.2g}{text}" for name, value, text in zip(names, found.value, beside, strict=True)]
    cases = found.n.max()
    where = f"{rows.device.iloc[0]}, one layer at retention {rows.retention.iloc[0]:g}"
    title = f"SIMULATED, {where}, n = {cases} cases, one description"
    drawn.suptitle(f"{title}\n{'; '.join(texts)}", fontsize=9)
    return drawn


def fig15(rows: pd.DataFrame) -> Figure:
    """Fig. 15: latency by kind of core, ours against dense attention on it."""
    drawn, axes = new_figure(columns=2, rows=2)
    for axis, (model, of) in zip(axes.flat, rows.groupby("model", sort=False), strict=True):
        cores = list(of.core.unique())
        for index, (method, line) in enumerate(of.groupby("method", sort=False)):
            values = line.set_index("core").value
            axis.plot(cores, [values[core] for core in cores], _MARKERS[index] + "-", markersize=6, label=method)
        axis.set(yscale="log", ylabel="ms", xlabel="core")
        axis.set_title(model, fontsize=9)
        plain_ticks(axis.yaxis)
    axes.flat[0].legend(fontsize=8)
    title = f"SIMULATED, {rows.device.iloc[0]}, {rows.context_tokens.iloc[0]} tokens, one layer, n = {len(rows)}, one description"
    known = "the middle core's speed fitted to Fig. 10's mean, the others' assumed; nothing published to hold it to"
    drawn.suptitle(f"{title}\n{known}", fontsize=9)
    return drawn


def table8(rows: pd.DataFrame) -> Figure:
    """Table 8: simulated against published energy, hollow points fitted to; by model where nothing is published."""
    known = rows.published.notna().all()
    drawn, axis = new_figure(columns=1, rows=1)
    for index, (method, of) in enumerate(rows.groupby("method", sort=False)):
        fitted = (of.flag != "") & known
        look = {"linestyle": "none", "marker": _MARKERS[index], "markeredgecolor": f"C{index}"}
        for part, fill, label in ((of[fitted], "none", "_"), (of[~fitted], f"C{index}", method)):
            axis.plot(part.published if known else part.model, part.value, markerfacecolor=fill, label=label, **look)
    axis.set(yscale="log", ylabel=" ".join(["simulated J", *filter(None, [] if known else rows.flag.unique())]))
    if known:
        ends = [0.8 * rows.published.min(), 1.25 * rows.published.max()]
        axis.plot(ends, ends, color="0.6", linewidth=1)
        axis.set(xscale="log", xlabel="published J", ylabel="simulated J (hollow: fitted to)")
    axis.legend(fontsize=7)
    title = f"SIMULATED, {rows.device.iloc[0]}: energy of one kernel, 1024 tokens"
    fitted = int((rows.flag != "").sum())
    counts = (
        f"\none description; powers fitted to n = {fitted} (hollow), n = {len(rows) - fitted} held out (filled)" if known else ""
    )
    axis.set_title(f"{title}{counts}", fontsize=8)
    return drawn


def scale(rows: pd.DataFrame) -> Figure:
    """Latency against context and against heads; and how busy the device is in ours."""
    drawn, axes = new_figure(columns=2, rows=2)
    for column, (against, x, label) in enumerate((("context", "context_tokens", "tokens"), ("heads", "heads", "heads"))):
        of = rows[(rows.data == against)]
        for index, (method, line) in enumerate(of[of.metric == "latency"].groupby("method", sort=False)):
            axes[0, column].plot(line[x], line.value / 1e3, marker=_MARKERS[index], markersize=4, linewidth=1, label=method)
        axes[0, column].set(xscale="log", yscale="log", xlabel=label, ylabel="seconds, one layer")
        ours = of[of.method.str.startswith("ours")]
        for index, ((method, metric), line) in enumerate(
            ours[ours.metric != "latency"].groupby(["method", "metric"], sort=False)
        ):
            name = f"{method}: {'estimate' if metric == 'estimate_share' else 'core'}"
            axes[1, column].plot(line[x], line.value, marker=_MARKERS[index], markersize=4, linewidth=1, label=name)
        axes[1, column].set(xscale="log", xlabel=label, ylabel="share of the time at work", ylim=(0, 1.05))
        for axis in axes[:, column]:
            ticks = sorted(of[x].unique())[:: 1 if x == "heads" else 2]
            names = [f"{tick // 1024}k" if tick >= 1024 else str(tick) for tick in ticks]
            axis.set_xticks(ticks, names)
            axis.set_xticks([], minor=True)
    axes[0, 0].legend(fontsize=7)
    axes[1, 0].legend(fontsize=7)
    title = f"SIMULATED, {rows.device.iloc[0]}: Qwen2-1.5B against context; head dimension 128 at 32768 tokens against heads"
    known = f"one description, n = {(rows.metric == 'latency').sum()} times; nothing published or measured to hold it to"
    drawn.suptitle(f"{title}\n{known}", fontsize=9)
    return drawn


def parameters(rows: pd.DataFrame) -> Figure:
    """What all parameter sets that fit say: of block-sparse attention, of the largest speed-up, of another engine; verdicts."""
    sets = rows[rows.metric == "fitting_sets"].iloc[0]
    drawn, axes = new_figure(columns=2, rows=2)
    counts = rows[rows.metric == "block_sparse_faster"]
    axes[0, 0].bar(counts.method.astype(int), counts.value)
    axes[0, 0].set(xlabel="cases of Fig. 10, of 12, with block-sparse faster", ylabel="share of sets", xticks=range(0, 13, 2))
    each = rows[rows.metric == "set"].pivot(index="number", columns="method", values="value")
    for index, (chunk, of) in enumerate(each.groupby("chunk_tokens")):
        label = f"chunks of {chunk:.0f}"
        axes[0, 1].plot(of.launch_us / 1e3, of.largest_speedup, _MARKERS[index], markersize=4, label=label)
    published = rows[(rows.metric == "quantity") & (rows.method == "largest_speedup")].published.iloc[0]
    axes[0, 1].axhline(published, color="0.4", linewidth=1, linestyle="--", label=f"published, held out: {published:g}")
    axes[0, 1].set(xlabel="fixed part of a launch, ms", ylabel="largest speed-up over C/G-Full", ylim=(0, None))
    axes[0, 1].legend(fontsize=7)
    ratios = rows[rows.metric == "ttft_ratio"]
    names = [f"{row.model.replace('Qwen', 'Q')}\n{row.context_tokens}" for row in ratios.itertuples()]
    bars = [ratios.value - ratios.low, ratios.high - ratios.value]
    axes[1, 0].errorbar(range(len(ratios)), ratios.value, yerr=bars, fmt="o", markersize=4, label="simulated, 5 to 95 % of sets")
    axes[1, 0].plot(range(len(ratios)), ratios.published, "k_", markersize=10, label="published, held out")
    axes[1, 0].set_xticks(range(len(ratios)), names, fontsize=5)
    axes[1, 0].set(ylabel="mllm: dense over sparse TTFT", ylim=(0, None))
    axes[1, 0].legend(fontsize=7)
    verdicts = rows[rows.metric == "verdict"].iloc[::-1]
    axes[1, 1].barh(range(len(verdicts)), verdicts.value, color="0.8")
    for place, row in enumerate(verdicts.itertuples()):
        axes[1, 1].text(0.01, place, f"{row.value:.0%}: {row.method}", fontsize=5.5, va="center")
    axes[1, 1].set(xlabel="share of sets for which it holds", xlim=(0, 1), yticks=[])
    title = f"SIMULATED, Snapdragon 8 Gen 3: {sets.value:.0f} of {sets.n} parameter sets fit"
    fitted = "fitted to: launches of 2, 3, 4 ms, Fig. 4a at 20 %, mean of Fig. 10; the rest of the published is held out"
    drawn.suptitle(f"{title}\n{fitted}", fontsize=9)
    return drawn
