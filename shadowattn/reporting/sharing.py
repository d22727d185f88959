"""Lists shared by blocks of rows: what sharing adds to the loss of per-row lists."""

import pandas as pd

from shadowattn.reporting.verdicts import gains


def sharing_losses(rows: pd.DataFrame) -> pd.DataFrame:
    """What methods that share lists lose more than per-row lists of the same estimator, from the comparisons in a study's rows.

    A line for each method and retention. Columns: block_score, query_block, retention, n (windows), loss,
    low, high (nat; 95 %, paired).
    """
    sparse = rows[(rows.method != "dense") & (rows.metric == "density")].drop_duplicates("method").set_index("method")
    per_row = sparse[sparse.query_block == 1]
    shared = sparse[(sparse.query_block > 1) & sparse.estimator.isin(per_row.estimator)]
    comparisons = gains(rows)
    comparisons = comparisons[comparisons.rival.isin(per_row.index) & comparisons.method.isin(shared.index)]
    return pd.DataFrame(
        {
            "block_score": sparse.block_score.reindex(comparisons.method).to_numpy(),
            "query_block": sparse.query_block.reindex(comparisons.method).to_numpy(),
            "retention": comparisons.retention.to_numpy(),
            "n": comparisons.n.to_numpy(),
            "loss": -comparisons.gain.to_numpy(),
            "low": -comparisons.high.to_numpy(),
            "high": -comparisons.low.to_numpy(),
        }
    )


def largest_blocks(rows: pd.DataFrame, tolerance: float) -> pd.DataFrame:
    """The largest block of every way to score (columns) at every retention (index) whose loss stays within `tolerance` nat.

    It counts where the upper end of the 95 % interval does, and that of every smaller block; 1: no block does.
    """
    losses = sharing_losses(rows)

    def largest(block_losses: pd.DataFrame) -> int:
        within = block_losses.sort_values("query_block").set_index("query_block").high.le(tolerance).cummin()
        return int(max(within.index[within], default=1))

    order = losses.block_score.drop_duplicates()
    return losses.groupby(["retention", "block_score"])[["query_block", "high"]].apply(largest).unstack()[order]
