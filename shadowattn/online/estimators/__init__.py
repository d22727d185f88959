"""Estimators: how important a key looks to a query row. One file each; only the order of the scores matters."""

from typing import Protocol

from torch import Tensor


class Estimator(Protocol):
    """Scores of keys for query rows.

    To add one: write a class with this method in a file of its own name, a dataclass for it in `experiments/config.py`,
    and a YAML of the same name in `conf/estimator/`.
    """

    def estimate(self, q: Tensor, k: Tensor, *, layer: int, positions: Tensor) -> Tensor:
        """Scores float32 [H, Q, K], finite; larger is more important.

        q [H, Q, D] and k [G, K, D] after RoPE; `positions` int64 [Q], where the rows stand. Causality is not the
        estimator's business: selection never offers a key to a row before it. But the score of a key must not
        depend on keys after the row, or it would leak them (static INT8 scales are the documented exception).
        """
        ...
