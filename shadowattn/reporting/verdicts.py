"""Sentences that rows decide."""

import pandas as pd

# Allocators that tell heads apart by what was measured on the model, and those that do not.
HEAD_SPECIFIC = ("paper", "artifact", "waterfill", "error_greedy")
RIVALS = ("first_layers_dense", "uniform")


def head_budgets(rows: pd.DataFrame) -> str:
    """Whether head-specific budgets pay beyond dense first layers and beyond uniform ones, by the loss they gain.

    Better and worse mean: by more than two standard errors of the gain, paired window by window.
    """
    allocators = rows.drop_duplicates("method").set_index("method").allocator
    rivals = [method for method, allocator in allocators.items() if allocator in RIVALS]
    lines = ["Do head-specific budgets pay? Retentions at which a method's loss is better, or worse, than a rival's:"]
    lines += [
        f"  {method} {_compared(rows, method, rival)}"
        for method in allocators.index[allocators.isin(HEAD_SPECIFIC)]
        for rival in rivals
    ]
    return "\n".join(lines)


def _compared(rows: pd.DataFrame, method: str, rival: str) -> str:
    own = rows[rows.method == method]
    gain, error = (_by_retention(own, f"gain_over_{rival}{end}") for end in ("", "_error"))
    better, worse = (gain > 2 * error).sum(), (gain < -2 * error).sum()
    each = ", ".join(f"{at:g}: {value:+.4f} ± {error[at]:.4f}" for at, value in gain.items())
    return f"against {rival}: better at {better}, worse at {worse} of {len(gain)} (gain in nat at {each})"


def _by_retention(rows: pd.DataFrame, metric: str) -> pd.Series:
    return rows[rows.metric == metric].set_index("retention").value.sort_index()
