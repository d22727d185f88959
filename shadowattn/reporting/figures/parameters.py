"""What all parameter sets of the phone say that fit the published values."""

import pandas as pd
from matplotlib.figure import Figure

from shadowattn.reporting.style import (
    MARKERS,
    new_figure,
)


def draw(rows: pd.DataFrame) -> Figure:
    """What all parameter sets that fit say: of block-sparse attention, of the largest speed-up, of another engine; verdicts."""
    sets = rows[rows.metric == "fitting_sets"].iloc[0]
    drawn, axes = new_figure(columns=2, rows=2)
    counts = rows[rows.metric == "block_sparse_faster"]
    axes[0, 0].bar(counts.method.astype(int), counts.value)
    axes[0, 0].set(xlabel="cases of Fig. 10, of 12, with block-sparse faster", ylabel="share of sets", xticks=range(0, 13, 2))
    each = rows[rows.metric == "set"].pivot(index="number", columns="method", values="value")
    for index, (chunk, chunk_sets) in enumerate(each.groupby("chunk_tokens")):
        label = f"chunks of {chunk:.0f}"
        axes[0, 1].plot(chunk_sets.launch_us / 1e3, chunk_sets.largest_speedup, MARKERS[index], markersize=4, label=label)
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
