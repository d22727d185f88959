"""Sentences that rows decide."""

import pandas as pd

# Allocators that tell heads apart by what was measured on the model.
_HEAD_SPECIFIC = ("paper", "artifact", "waterfill", "error_greedy")


def head_budgets(rows: pd.DataFrame) -> str:
    """Whether head-specific budgets pay beyond `first_layers_dense`, allocator by allocator, by loss increase over dense.

    Better means: by more than the larger of the two standard errors, paired with dense window by window.
    """
    increases, errors = _table(rows, "loss_increase"), _table(rows, "loss_increase_error")
    allocators = rows.drop_duplicates("method").set_index("method").allocator
    lines = []
    for method in [m for m in increases.columns if allocators[m] in _HEAD_SPECIFIC]:
        wins = {}
        for rival in [m for m in increases.columns if allocators[m] in ("first_layers_dense", "uniform")]:
            ahead = increases[rival] - increases[method] > errors[[rival, method]].max(axis=1)
            wins[rival] = f"{ahead.sum()} of {len(ahead)}"
        beaten = ", ".join(f"better than {rival} at {count}" for rival, count in wins.items())
        lines.append(f"  {method}: {beaten} retentions ({_values(increases, errors, method)})")
    rivals = [m for m in increases.columns if allocators[m] in ("first_layers_dense", "uniform")]
    lines += [f"  {method}: ({_values(increases, errors, method)})" for method in rivals]
    return "\n".join(["Do head-specific budgets pay beyond dense first layers? Loss increase over dense in nat:", *lines])


def _table(rows: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Retention × method."""
    chosen = rows[(rows.metric == metric) & (rows.method != "dense")]
    return chosen.pivot_table(index="retention", columns="method", values="value", sort=False).sort_index()


def _values(increases: pd.DataFrame, errors: pd.DataFrame, method: str) -> str:
    each = zip(increases.index, increases[method], errors[method], strict=True)
    return ", ".join(f"{retention:g}: {value:+.4f} ± {error:.4f}" for retention, value, error in each)
