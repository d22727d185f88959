"""The evidence of every finding: one value with its interval, n, figure and rows, in the order of the findings' page."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from experiments.page_tables.common import above, rows_of
from shadowattn.reporting.verdicts import gains

_REFERENCE = "../results/reference"
_BY = {"loss": "loss", "divergence": "divergence from dense attention"}


@dataclass(frozen=True)
class _Loss:
    """The loss of `method` above that of `rival`, paired, at one retention; or, by `divergence`, that from dense attention.

    `on`: what text or arithmetic, where it is not what the page says of the model.
    """

    rows: str
    method: str
    rival: str
    retention: float = 0.1
    by: str = "loss"
    on: str = ""

    def said(self) -> tuple[str, str, str]:
        """What is measured, its value and n."""
        found = gains(rows_of(self.rows), self.by)
        found = found[(found.method == self.method) & (found.rival == self.rival) & (found.retention == self.retention)]
        (one,) = found.itertuples()
        at = f", {self.retention:.0%} of the keys" if self.retention < 1 else ""
        on = f"{self.on}, " if self.on else ""
        what = f"{_BY[self.by]} of `{self.method}` above that of `{self.rival}`{at}, {on}nat"
        return what, above(one), f"{one.n} windows"


@dataclass(frozen=True)
class _One:
    """A single row: its value, with the interval that the row has, or its standard error where a row beside it has that."""

    rows: str
    what: str
    unit: str
    metric: str
    where: Mapping[str, object] = field(default_factory=dict)

    def said(self) -> tuple[str, str, str]:
        """What is measured, its value and n."""
        rows = _chosen(rows_of(self.rows), self.where)
        (row,) = rows[rows.metric == self.metric].itertuples()
        errors = rows[rows.metric == f"{self.metric}_error"]
        if len(errors):
            (error,) = errors.itertuples()
            return self.what, f"{row.value:+.3f} ± {error.value:.3f} (standard error)", f"{error.n} {self.unit}"
        quartiles = "quartiles " if self.unit == "rounds" else ""  # of times; shares of questions have 95 % intervals
        spread = f" ({quartiles}{row.low:.2f} … {row.high:.2f})" if "low" in rows and row.low < row.value <= row.high else ""
        return self.what, f"{row.value:.2f}{spread}", f"{row.n} {self.unit}"


class _Middle(_One):
    """The median over layers of the mean in each, with the quartiles."""

    def said(self) -> tuple[str, str, str]:
        """What is measured, its value and how many layers there are."""
        rows = _chosen(rows_of(self.rows), self.where)
        means = rows[rows.metric == self.metric].groupby("layer").value.mean()
        low, middle, high = means.quantile([0.25, 0.5, 0.75])
        spread = f" (quartiles {low:.2f} … {high:.2f})" if len(means) > 1 else ""
        return self.what, f"{middle:.2f}{spread}", f"{len(means)} {self.unit}"


class _RankCorrelation(_One):
    """Spearman's, with its 95 % interval by Fisher's z and the variance of Bonett and Wright (Psychometrika 65, 2000)."""

    def said(self) -> tuple[str, str, str]:
        """What is measured, its value and of how many."""
        rows = _chosen(rows_of(self.rows), self.where)
        (row,) = rows[rows.metric == self.metric].itertuples()
        half = 1.96 * math.sqrt((1 + row.value**2 / 2) / (row.n - 3))
        low, high = (math.tanh(math.atanh(row.value) + shift) for shift in (-half, half))
        return self.what, f"{row.value:.2f} ({low:.2f} … {high:.2f})", f"{row.n} {self.unit}"


@dataclass(frozen=True)
class _Faster:
    """How many times faster than the engine's dense attention a runner reads the longest prompt, and what it loses above `dense`,
    its own.
    """

    rows: str
    method: str
    dense: str
    words: str

    def said(self) -> tuple[str, str, str]:
        """What is measured, its value and n."""
        rows = rows_of(self.rows)
        loss = rows[rows.metric == "loss_increase"].set_index("method").value
        first = rows[(rows.metric == "time_to_first_token") & (rows.context_tokens == rows.context_tokens.max())]
        one, engine = (first[first.method == name].iloc[0] for name in (self.method, "engine_w8a8"))
        what = f"{self.words}, times as fast as the engine's dense attention at {one.context_tokens} tokens (seconds), and loss "
        what += "above its own dense attention, nat"
        value = f"{engine.value / one.value:.2f} ({one.value:.2f}, quartiles {one.low:.2f} … {one.high:.2f}), "
        return what, value + f"{loss[self.method] - loss[self.dense]:+.3f}", f"{one.n} rounds"


def _chosen(rows: pd.DataFrame, where: Mapping[str, object]) -> pd.DataFrame:
    if "source_layer" in rows:
        rows = rows.assign(apart=rows.layer - rows.source_layer)
    for column, value in where.items():
        rows = rows[rows[column] == value]
    return rows


_BY_LEVEL = {"avx512_bf16": "study_activation_speed_smollm2_avx512", "avx2_vnni": "activations_avx2_vnni"}


def _faster_than_dense(method: str, level: str = "avx512_bf16") -> _One:
    where = {"method": method, "retention": 0.2, "context_tokens": 8192, "dtype": "bfloat16", "layer": -1}
    what = f"`{method}` at 20% of the keys, level `{level}`, bfloat16, times as fast as our dense attention, 8192 tokens"
    return _One(_BY_LEVEL[level], what, "rounds", "times_faster_than_own_dense", where | {"kernel": f"native ({level})"})


def _rank(rows: str, signal: str) -> _One:
    what = f"rank correlation of {_SIGNALS[signal]} with the loss where a head keeps 5% of its keys"
    return _RankCorrelation(rows, what, "heads", "need_rank_correlation", {"method": signal, "retention": 0.05})


def _above_dense(rows: str, method: str) -> _One:
    return _One(rows, f"`{method}`, {_LOSS}", "windows", "loss_increase", {"method": method})


def _change(rows: str, method: str, task: str, words: str, where: Mapping[str, object] | None = None) -> _One:
    where = {"method": method, "task": task} | (where or {})
    return _One(rows, f"{words}, change from dense attention", "questions", "accuracy_change", where)


def _far(method: str, retention: float) -> _One:
    where = {"method": method, "retention": retention}
    kept = f"{retention:.0%} of the keys" if retention < 1 else "every key"
    return _One("headline_8192", f"`{method}`, {kept}, output error, 8192 tokens", "tokens", "output_error", where)


_SIGNALS = {"ablation": "the loss without a head", "sensitivity_divergence": "the estimated divergence"}
_LOSS = "loss above dense attention, nat"
_ON_OTHER = "on the list of the layer before, 20% of the keys"
_OF_OWN = "share of its own list's attention mass on such a list, 10% of the keys"
_ABOVE_OWN = "loss above the layers' own lists, 10% of the keys, nat"
_FROM_4 = {"first_layer": 4, "retention": 0.1}
_BEFORE = {"apart": 1}
_WORST = {"method": "static, 9 buckets", "granularity": "row", "retention": 0.2}
_STREAMING = {"method": "streaming", "retention": 0.1}
_RACE = {"method": "racing"}
_AHEAD = {"method": "exact", "retention": 0.1, "ahead": 1}
_EVIDENCE = {
    "INT8 scores choose keys nearly as well as exact scores": [
        _Loss("sweep_retention", "int8_uniform", "oracle"),
        _Loss("headline_wikitext", "int8_uniform", "oracle"),
        _Loss("headline_stdlib_float32", "int8_uniform", "oracle", on="standard library, float32"),
        _Loss("sweep_qwen2_5_coder", "int8_uniform", "oracle"),
    ],
    "A retention of its own for each head": [
        _Loss("headline_wikitext", "int8_uniform", "shadowattn"),
        _Loss("sweep_qwen2_5_coder", "int8_uniform", "shadowattn"),
    ],
    "The first rows of a prompt": [
        _Loss("min_budget_smollm2", "min_16", "per_row", 0.05), _Loss("min_budget_qwen2_5_coder", "min_16", "per_row", 0.05),
    ],
    "Budgets of rows": [_Loss("study_top_p", "error_greedy", "top_p"), _Loss("study_top_p_smollm2", "error_greedy", "top_p")],
    "Output error does not rank methods": [
        _far("npu_full", 1.0), _above_dense("headline_8192", "npu_full"),
        _far("streaming", 0.1), _One("headline_8192", f"the same, {_LOSS}", "windows", "loss_increase", _STREAMING),
        _Loss("headline_wikitext", "int8_uniform", "shadowattn", by="divergence"),
    ],
    "Keys chosen by position": [
        _Loss("headline_wikitext", "streaming", "int8_uniform"),
        _Loss("sweep_qwen2_5_coder", "streaming", "int8_uniform"),
    ],
    "What a head is worth is not what it needs": [
        _Loss("study_allocators_smollm2_retentions", "waterfill", "uniform"),
        _Loss("allocators_mixed_smollm2", "int8_uniform", "mixed"), _Loss("allocators_mixed_smollm2", "error_greedy", "mixed"),
        _Loss("study_allocators_qwen2_5_coder", "waterfill", "uniform", 0.05),
    ],
    "Ablation does not rank heads by need": [
        _rank("offline", "ablation"), _rank("offline", "sensitivity_divergence"),
        _rank("need_smollm2", "ablation"), _rank("need_smollm2", "sensitivity_divergence"),
    ],
    "Dense first layers": [_Loss("study_allocators_smollm2_retentions", "first_layer_dense", "uniform", 0.05)],
    "Lists shared by rows": [
        _Loss("study_query_block_smollm2", "probability_32", "per_row", 0.2),
        _Loss("study_query_block_qwen2_5_coder", "probability_32", "per_row", 0.2),
    ],
    "No number of buckets": [_Loss("fig14_smollm2", "1 bucket", "9, raw", 0.2)],
    "Which lists are fastest": [
        *(_faster_than_dense(method) for method in ("hierarchical", "per_row", "shared_32")),
        *(_faster_than_dense(method, "avx2_vnni") for method in ("hierarchical", "per_row", "shared_32")),
    ],
    "Products with every key": [_Loss("compare_estimators_wikitext", "quest", "sign1")],
    "From layer 4 on, lists by what enters the layer before": [
        _One("study_hidden_ranking_smollm2", _ABOVE_OWN, "windows", "loss_increase", _FROM_4),
    ],
    "Another layer's list": [
        _Middle("study_overlap_maps_smollm2", f"share of a layer's own list {_ON_OTHER}", "layers", "layer_overlap", _BEFORE),
        _Middle("study_overlap_maps_smollm2", f"share of its own attention mass {_ON_OTHER}", "layers", "layer_mass", _BEFORE),
    ],
    "Static INT8 attention loses quality": [
        _Loss("headline_wikitext", "shadowattn", "npu_full"),
        _Loss("sweep_qwen2_5_coder", "shadowattn", "npu_full"),
    ],
    "What of it costs": [
        _above_dense("study_npu_full_smollm2", "qkv_probabilities"), _above_dense("study_npu_full_qwen2_5_coder", "qkv_scores"),
    ],
    "Tasks under pooled blocks": [_change("study_accuracy_smollm2", "cg_block_sparse", "needle", "needles found in blocks")],
    "A block's common first look": [
        _Loss("study_first_look_smollm2", "spared_0", "int8"),
        _Loss("study_first_look_smollm2", "spared_10", "int8"),
    ],
    "What prompts hold under static INT8 attention": [
        _change(
            "study_retrieval_smollm2_chat", "npu_full", "records", "records found in 2048 tokens", {"tokens": 2048, "chat": False}
        ),
        _change("study_retrieval_smollm2_chat_4096", "npu_full", "records", "records found in 4096 tokens", {"chat": False}),
        _change(
            "study_retrieval_smollm2_chat_4096", "npu_full", "records", "the same, by the chat template", {"chat": True}
        ),
        _change("study_retrieval_smollm2_8192", "npu_full", "needle", "lines found in 8064 tokens"),
        _change("study_retrieval_smollm2_chat_8064", "npu_full", "records", "records in 8064 tokens, by the chat template"),
    ],
    "At equal loss, rows after a first look and XAttention": [
        _Faster("ttft_all", "engine_w8a8_15", "engine_w8a8", "lists of single rows, 15% of the keys"),
        _Faster("ttft_all", "genai_own_xattention_15", "genai_own", "XAttention, 15% of the keys"),
    ],
    "INT8 blocks and the down projection": [
        _Loss("study_blocks_smollm2", "w8a8_smooth", "float32", 1.0),
        _Loss("study_blocks_smollm2", "down_in_float32", "float32", 1.0),
    ],
    "A list from what entered the layer before": [
        _Middle("study_look_ahead_smollm2", _OF_OWN, "layers", "mass", _AHEAD),
        _Middle("study_look_ahead_smollm2", "the same of layer 1", "layer", "mass", _AHEAD | {"layer": 1}),
    ],
    "Sinks, outliers and equal channels": [
        _Loss("study_outliers_smollm2", "npu_full, equalised", "npu_full", 1.0),
        _Loss("study_outliers_stdlib", "npu_full, equalised", "npu_full", 1.0, on="standard library"),
    ],
    "Union tiles": [
        _One(
            "study_union_tiles_smollm2", "tiles of 32 rows, 20% of the keys, times faster than lists of single rows", "rounds",
            "times_faster_than_per_row", {"method": "union_tiles", "tile": 32, "retention": 0.2},
        ),
    ],
    "Settings of a race": [
        _One("racing_smollm2", "times fewer forward passes in a race, median", "orders", "times_fewer_forwards_median", _RACE),
    ],
    "Small steps between buckets": [_Loss("fig14_smollm2", "9, σ 0.005, raw", "9, raw", 0.2)],
    "The mean key taken off K": [
        _above_dense("study_npu_full_qwen2_5_coder", "npu_full"), _above_dense("study_npu_full_qwen2_5_coder", "npu_full_offset"),
    ],
    "INT8 scores of the graphs": [
        _Loss("int8_outputs_qwen2_5_coder", "target_requant", "float", 0.2),
        _Loss("int8_outputs_qwen2_5_coder", "fixed_output", "float", 0.2),
        _Loss("int8_outputs_qwen2_5_coder", "fixed_output_mean", "float", 0.2),
    ],
    "The worst head without an offset": [
        _One("table4_qwen2_5_coder", "recall of the worst head", "rows", "worst_head_recall", _WORST),
        _One(
            "table4_qwen2_5_coder", "with the mean key taken off", "rows", "worst_head_recall",
            _WORST | {"method": "static, 9 buckets, less mean K"},
        ),
        _Loss("key_offset_divergence_qwen2_5_coder", "float_mean", "float", 0.05, by="divergence"),
    ],
    "The profile published for Qwen2-1.5B": [_Loss("published_profile_qwen2_5_coder", "int8_uniform", "published", 0.2)],
}  # fmt: skip


def evidence() -> str:
    """A line or two a finding: what is measured, with its interval, n, figure, rows and command."""
    lines = [["finding", "model", "measured", "value", "n", "figure, rows, machine and command"], ["---"] * 6]
    for finding, values in _EVIDENCE.items():
        for value in values:
            figure = f"[figure]({value.rows}.png)"
            origin = f"[rows]({_REFERENCE}/{value.rows}.csv), [machine and command]({_REFERENCE}/{value.rows}.json)"
            model = rows_of(value.rows).model.iloc[0].split("-")[0]
            lines.append([finding, model, *value.said(), f"{figure}, {origin}"])
            finding = ""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
