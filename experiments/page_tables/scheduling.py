"""Schedulers against the optimum."""

from experiments.page_tables.common import rows_of, table


def schedulers() -> str:
    """Median gap to the optimum, and planning time."""
    rows = rows_of("study_schedulers")
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
    return table(header, lines, "study_schedulers", f"median gap in percent, n = {int(rows.n.max())} works")


def proven() -> str:
    """Share of the works whose optimum was proven."""
    rows = rows_of("study_schedulers")
    rows = rows[rows.metric == "proven"].set_index(["machines", "costs", "heads"]).value
    heads = sorted(rows.index.get_level_values("heads").unique())
    lines = [
        [f"{machines}, {costs}", *(f"{100 * rows[machines, costs, h]:.0f}" for h in heads)]
        for machines in (3, 2)
        for costs in ("measured", "random")
    ]
    return table(["machines, costs", *(f"{h} heads" for h in heads)], lines, "study_schedulers", "percent of the works")
