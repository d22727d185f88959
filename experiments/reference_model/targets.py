"""What the reference model must do before a study of sparse attention on it means anything."""

from dataclasses import dataclass

from shadowattn.evaluation.intervals import Interval


@dataclass(frozen=True)
class Target:
    """`meaning` for people; the figure is to be at least (or at most) `value`, in `unit`."""

    meaning: str
    unit: str
    value: float
    at_most: bool = False

    def verdict(self, measured: Interval) -> str:
        """`met` where all of the 95 % interval is on the target's side, `missed` where none is, `not shown` between them."""
        low, high, target = measured.low, measured.high, self.value
        if self.at_most:
            low, high, target = -high, -low, -target
        if low >= target:
            return "met"
        return "missed" if high < target else "not shown"


TARGETS = {
    "copy_gain": Target("repeated random block: fall of the loss, second copy against first", "share", 0.6),
    "context_gain": Target(
        "held-out text: fall of the loss of the same tokens, 64-128 tokens of context to 1024-2048", "nat", 0.15
    ),
    "key_value_accuracy": Target("key-value retrieval, 40 pairs, dense, exact match", "share", 0.95),
    "needle_accuracy": Target("needle in 2048 tokens, all depths, dense, exact match", "share", 0.95),
    "random_loss_increase": Target("random 5 % of keys against dense, held-out text", "nat", 0.3),
    "oracle_loss_increase": Target("exact top 20 % per row against dense, held-out text", "nat", 0.02, at_most=True),
    "importance_ratio": Target("loss increase without the most important head, against the median head", "times", 5.0),
}
