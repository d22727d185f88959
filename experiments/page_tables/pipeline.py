"""The pipeline and the latency profile that its plans go by."""

from experiments.page_tables.common import SHAPES, one, rows_of, table
from shadowattn.reporting.rows import with_graphs_named


def pipeline() -> str:
    """A chunk's time in every mode of the pipeline."""
    rows = with_graphs_named(rows_of("pipeline_speed"))
    rows = rows[rows.metric == "time"]
    methods = [*(f"int8_graph {mode}" for mode in ("batched", "serial", "overlap", "grouped", "planned")), "int8_fused batched"]
    lines = [
        [
            f"{SHAPES[model]}, {keys}",
            *(f"{one(rows, model=model, context_tokens=keys, method=method):.1f}" for method in methods),
        ]
        for model, keys in rows[["model", "context_tokens"]].drop_duplicates().itertuples(index=False)
    ]
    header = ["ms; shape, keys", *(f"`{method}`" for method in methods)]
    return table(header, lines, "pipeline_speed", f"medians of {int(rows.n.max())} rounds")


def interpolation() -> str:
    """The latency profile's error between its points."""
    rows = rows_of("latency_profile")
    rows = rows[rows.metric.str.startswith("interpolation_error")]
    lines = []
    for stage in ("estimate", "select", "attend"):
        for over in ("keys", "retention"):
            part = rows[(rows.stage == stage) & rows.metric.str.contains(f"over_{over}")]
            if len(part):
                values = [one(part, metric=f"interpolation_error_over_{over}_{kind}") for kind in ("median", "worst")]
                lines.append([stage, over, *(f"{100 * value:.1f} %" for value in values), str(int(part.n.iloc[0]))])
    return table(["stage", "over", "median", "worst", "points"], lines, "latency_profile", "each inner point left out once")
