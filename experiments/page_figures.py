"""Figures of docs that are drawn from the published rows of several runs; `experiments.publish` draws those of one."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from experiments.page_tables.common import commit_of, origin_of, rows_of
from shadowattn.reporting.figures.loss_against_time import draw as draw_loss_against_time
from shadowattn.reporting.verdicts import gains

_SHARED, _SHARED_64, _LOOKED = "study_query_block_smollm2_more", "study_query_block_smollm2_64", "study_first_look_smollm2"
_TIMES = "study_activation_speed_smollm2_avx512"


def loss_against_time_smollm2() -> tuple[Figure, str]:
    """Losses and times on activations, for lists of single rows and of blocks on SmolLM2; where from.

    What a method loses is what lists of single rows lose and its paired difference from these, of its own run's windows.
    """
    rows, looked = rows_of(_SHARED), gains(rows_of(_LOOKED))
    shared = pd.concat([gains(rows), gains(rows_of(_SHARED_64))])
    added = {"hierarchical": looked[(looked.method == "spared_10_through_1_25") & (looked.rival == "int8")]}
    for method, found in shared[shared.rival == "per_row"].groupby("method", sort=False):
        added[method.replace("probability", "shared")] = found
    budgets = rows[(rows.method == "per_row") & (rows.metric == "loss_increase")].set_index("retention").value
    lines = [{"method": "per_row", "retention": at, "loss": loss, "low": loss, "high": loss} for at, loss in budgets.items()]
    for method, found in added.items():
        gains_at = found.set_index("retention")
        for at, loss in budgets.items():
            ends = {name: loss - gains_at[of][at] for name, of in (("loss", "gain"), ("low", "high"), ("high", "low"))}
            lines.append({"method": method, "retention": at, **ends})
    losses = f"commit {commit_of(_SHARED)}, of 64 rows {commit_of(_SHARED_64)}, a first look {commit_of(_LOOKED)}"
    below = f"times: {origin_of(_TIMES)}; losses: {losses}"
    return draw_loss_against_time(pd.DataFrame(lines), rows_of(_TIMES), int(rows.context_tokens.iloc[0])), below


FIGURES: dict[str, Callable[[], tuple[Figure, str]]] = {"loss_against_time_smollm2": loss_against_time_smollm2}
