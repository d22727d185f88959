"""Sentences that rows decide."""

import pandas as pd

# Allocators that tell heads apart by what was measured on the model.
_HEAD_SPECIFIC = ("paper", "artifact", "waterfill", "error_greedy")


def head_budgets(rows: pd.DataFrame) -> str:
    """Whether head-specific budgets pay beyond `first_layers_dense`, retention by retention, by loss increase over dense."""
    losses = rows[rows.metric == "loss_increase"]
    lines, wins = [], 0
    for retention, group in losses.groupby("retention"):
        best = _best(group[group.allocator.isin(_HEAD_SPECIFIC)])
        first, uniform = _best(group[group.allocator == "first_layers_dense"]), _best(group[group.allocator == "uniform"])
        wins += best.value < min(first.value, uniform.value)
        costs = ", ".join(f"{row.method} {row.value:+.4f}" for row in (best, first, uniform))
        lines.append(f"  at {retention:g}: {costs} nat")
    total = len(lines)
    head = f"Head-specific budgets pay beyond dense first layers and beyond uniform ones at {wins} of {total} retentions:"
    return "\n".join([head, *lines])


def _best(rows: pd.DataFrame) -> pd.Series:
    return rows.loc[rows.value.idxmin()]
