"""Estimators at equal budget: what is lost with the keys that each chooses, beside what choosing them costs."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from torch import Tensor

from experiments.cells import Attachment, estimator_of
from experiments.lab import Lab
from experiments.part_building import part_name
from experiments.studies.quality import Quality, answer_flags
from shadowattn.errors import InputError
from shadowattn.evaluation.fidelity import measure_on_dense
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.top_p import TopP
from shadowattn.reporting import verdicts
from shadowattn.reporting.figures.cost import draw as draw_cost
from shadowattn.reporting.flags import flag_lines
from shadowattn.reporting.rows import GOES_BY, EstimatorRow, Row, list_for

_SHOWN = {
    "loss_increase": "loss above dense, nat",
    "kl_divergence": "KL, nat",
    "mass_recall": "mass recall",
    "topk_overlap": "top-k overlap",
    "dense_mass_recall": "mass recall on the dense trace",
    "dense_topk_overlap": "top-k overlap on the dense trace",
    "output_error": "output error",
    "divergent_tokens": "divergent tokens",
    "density": "density",
    "accuracy": "answered",
}
# What calibration text gives an estimator, where its name does not say it.
_MADE = {
    "indexer": "trained indexer",
    "key_offset": "key offset",
    "top_p": "share of the weights",
    "first_look": "losses by a first look",
}
_LEGEND = (
    "MAC × bits, bytes: counted for each row and key of a chunk at the end of the context; floats count 32 bits\n"
    "goes by: whose queries or keys decide what a row keeps; later rows: of its own chunk\n"
    "a list for: who shares a ranking; keys at once: how many neighbouring keys share a score\n"
    "calibrated: what calibration text gave the estimator\n"
    "on the dense trace: of dense attention's own queries and keys, the same for all; else of the sparse model's"
)


# Single channels with each other; what does not rank every key by itself, with the cheapest that does.
_RIVALS = {"sparq": "double_sparsity"} | dict.fromkeys(
    ("double_sparsity", "loki", "lightning_indexer", "quest", "mean_keys", "spargeattn", "xattention", "vertical_slash",
     "flexprefill", "h2o", "streaming"),
    "sign1",
)  # fmt: skip


@dataclass(frozen=True)
class CompareEstimators(Quality):
    """A quality study whose methods differ in the estimator alone, and which counts what every estimator costs.

    Without `rivals`: `sparq` with `double_sparsity`, and with `sign1` what ranks by fewer channels, by a list for all heads, by
    pages, blocks, patterns or position, where both are compared.
    """

    headline: ClassVar[tuple[str, ...]] = ("loss_increase", "kl_divergence", "mass_recall", "estimate_mac_bits")

    def check(self, lab: Lab) -> None:
        main = lab.main
        if main.rule.query_block != 1:
            raise InputError(
                f"selection: expected lists for single rows, whose costs and rankings are compared, got query_block="
                f"{main.rule.query_block}; use selection=per_row, or +exp=study_query_block for shared lists"
            )
        for name, method in lab.methods.items():
            if (method.allocator, method.selection) != (main.allocator, main.selection):
                raise InputError(
                    f"compare.{name}: expected the allocator and the selection of {main.name}, so that all keep equally many "
                    "keys, got others; set them for all methods"
                )
        super().check(lab)

    def rivals_of(self, lab: Lab) -> dict[str, str]:
        pairs = {name: rival for name, rival in _RIVALS.items() if {name, rival} <= lab.methods.keys()}
        return self.rivals or {name: rival for name, rival in pairs.items() if lab.main.name not in (name, rival)}

    def beside(self, lab: Lab, windows: Tensor, attached: Attachment) -> dict[str, float]:
        """What the estimator keeps of dense attention's own queries and keys: its ranking alone, and no drift of the model's."""
        return measure_on_dense(
            lab.loaded.model, windows, attached.estimator, attached.profile.retention, attached.rule,
            chunk_tokens=lab.of("graphs").chunk_tokens,
            dense_above=lab.dense_above(attached.rule, attached.estimator.look),
        )  # fmt: skip

    def measure(self, lab: Lab) -> list[Row]:
        rows = super().measure(lab)
        size = lab.shape.head_dim, lab.of("graphs").chunk_tokens, lab.context_tokens
        for name, method in lab.methods.items():
            estimator = estimator_of(lab, method, lab.offline.profile(method.allocator, lab.retentions[0]))
            if (cost := estimator.cost(*size)) is None:
                continue
            ranked_rows, ranked_keys = estimator.ranked_together
            row = replace(
                lab.row(EstimatorRow), method=name, estimator=part_name(method.estimator), measured="counted",
                granularity=estimator.granularity, sees=estimator.goes_by, needs=" ".join(sorted(_needs(estimator))),
                ranked_rows=ranked_rows, ranked_keys=ranked_keys,
            )  # fmt: skip
            for at in (at for at in lab.retentions if at < 1):
                rows.append(replace(row, metric="estimate_mac_bits", value=cost.mac_bits, retention=at))
                rows.append(replace(row, metric="estimate_bytes", value=cost.bytes, retention=at))
        return rows

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """What losses cost first; of one retention, which makes no curve, where in the model the output is off."""
        drawn = {"cost": draw_cost(rows)} | super().figures(rows)
        first = "layers" if "layers" in drawn and rows[rows.retention < 1].retention.nunique() == 1 else "cost"
        return {first: drawn.pop(first)} | drawn

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A leaderboard for each retention, least loss first; then which methods differ."""
        cells = (
            rows.drop_duplicates(["method", "retention", "metric"]).set_index(["retention", "method", "metric"]).value.unstack()
        )
        costs = rows[rows.metric == "estimate_mac_bits"]
        kinds = costs.drop_duplicates("method").set_index("method").fillna({"needs": ""})
        shown = {name: title for name, title in _SHOWN.items() if name in cells}
        tables = []
        for at in sorted(costs.retention.unique()):
            leaderboard = Table(
                "method", "MAC × bits", "bytes",
                "goes by", "a list for", "keys at once", "calibrated", *shown.values(),
                title=f"{title}, retention {at:g}", title_justify="left",
            )  # fmt: skip
            for method, line in cells.loc[at].sort_values("loss_increase").iterrows():
                if method != "dense":
                    cost = (_said(line.get(name), ".4g") for name in ("estimate_mac_bits", "estimate_bytes"))
                    kind = kind_of(kinds.loc[method]) if method in kinds.index else [""] * 4
                    leaderboard.add_row(method, *cost, *kind, *(_said(line.get(name), ".4f") for name in shown))
            tables.append(leaderboard)
        answered = rows[(rows.method == "dense") & (rows.metric == "accuracy")]
        blocks = rows[rows.metric == "block_heads"].groupby("method").value.mean()
        mixed = [
            f"{name}: ranks blocks in {share:.0%} of heads and chunks, single keys elsewhere" for name, share in blocks.items()
        ]
        dense = [f"answered: dense attention answers {share:.0%} of the task's questions" for share in answered.value]
        flags = flag_lines(rows[rows.metric.isin(("loss", "density"))])  # a loss's are those of its perplexity and its increase
        dense += answer_flags(rows)
        return Group(*tables, _LEGEND, *mixed, *dense, *flags, *verdicts.compared(rows))


def _needs(estimator: Estimator) -> frozenset[str]:
    """What it needs, and what the one that it ranks by."""
    return estimator.needs | (_needs(estimator.estimator) if isinstance(estimator, TopP) else frozenset())


def kind_of(row: pd.Series) -> list[str]:
    """What an estimator's row says of its lists: whom they go by, whom they are for, keys chosen at once, what is calibrated."""
    needs = ", ".join(_MADE.get(name, name) for name in row.needs.split())
    return [GOES_BY[row.sees], list_for(row.granularity, row.get("ranked_rows")), _said(row.get("ranked_keys"), "g"), needs]


def _said(value: float | None, form: str) -> str:
    return "–" if value is None or value != value else f"{value:{form}}"
