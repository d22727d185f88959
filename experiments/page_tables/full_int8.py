"""Whole attention in static INT8."""

import pandas as pd

from experiments.page_tables.common import INCREASE, one, rows_of, source, table
from shadowattn.reporting.verdicts import gains

# Every form of whole attention in INT8, and the sparse method beside it: what of it is rounded.
_ROUNDED = {
    "npu_full": "`npu_full`: Q, K, V, scores, probabilities in 1/127",
    "npu_full_log2": "the same, probabilities in powers of two",
    "npu_full_per_head": "`npu_full` with one scale a head",
    "npu_full_offset": "`npu_full` with the mean key taken off K",
    "qkv": "Q, K and V",
    "qkv_scores": "Q, K, V and scores",
    "qkv_probabilities": "Q, K, V and probabilities in 1/127",
    "qkv_log2": "Q, K, V and probabilities in powers of two",
    "int8_uniform": "nothing; INT8 estimates, exact attention on 20 % of the keys",
}
_NPU_FULL = {
    "study_npu_full": "bundled, float32",
    "study_npu_full_smollm2": "SmolLM2, bfloat16",
    "study_npu_full_stdlib": "SmolLM2, bfloat16, standard library",
    "study_npu_full_smollm2_float32": "SmolLM2, float32",
    "study_npu_full_qwen2_5_coder": "Qwen2.5-Coder-1.5B, bfloat16",
}


def npu_full() -> str:
    """Loss and divergence of whole attention in INT8, by what of it is rounded, a column a model and arithmetic of the rest."""
    cells = [rows_of(name).set_index(["method", "metric"]).value for name in _NPU_FULL]

    def cell(losses: pd.Series, method: str) -> str:
        if (method, "loss_increase") not in losses:
            return ""
        loss, error, divergence = (losses[method, metric] for metric in (*INCREASE, "kl_divergence"))
        return f"{loss:+.3f} ± {error:.3f} · {divergence:.3f}"

    lines = [[words, *(cell(losses, method) for losses in cells)] for method, words in _ROUNDED.items()]
    counted = {name: rows_of(name).groupby("metric").n.first() for name in _NPU_FULL}
    said = {name: f"n = {of.loss_increase_error} windows, KL over {of.kl_divergence} tokens" for name, of in counted.items()}
    header = ["rounded to INT8", *_NPU_FULL.values()]
    first, *others = _NPU_FULL
    n = f"loss above dense ± standard error · KL divergence from dense, nat; {said[first]}"
    return "\n\n".join([table(header, lines, first, n), *(source(name, said[name]) for name in others)])


_SIGNALS = {
    "small_share": "probability that steps of 1/127 round to zero",
    "sink_share": "probability on the first key",
    "q_outlier": "largest magnitude of Q / its root mean square",
    "k_outlier": "largest magnitude of K / its root mean square",
}


def outlier_signals() -> str:
    """How well each signal ranks SmolLM2's heads by the error that static INT8 attention makes in their outputs."""
    rows = rows_of("study_outliers_smollm2")
    rows = rows[rows["head"] >= 0]
    signals = rows[rows.metric.isin(_SIGNALS)].pivot_table(index=["layer", "head"], columns="metric", values="value")
    errors = rows[rows.metric == "output_error"].pivot_table(index=["layer", "head"], columns="method", values="value")
    lines = [
        [_ROUNDED[form], *(f"{errors[form].corr(signals[name], method='spearman'):+.2f}" for name in _SIGNALS)]
        for form in ("npu_full", "qkv", "qkv_scores", "qkv_probabilities")
    ]
    header = ["rank correlation of the error of heads, where this is rounded, with", *_SIGNALS.values()]
    return table(header, lines, "study_outliers_smollm2", f"Spearman, n = {len(errors)} heads")


def equalised_losses() -> str:
    """What equal channels, folded into SmolLM2's projections, change of the loss of whole attention in INT8, on both texts."""
    names, lines = ("study_outliers_smollm2", "study_outliers_stdlib"), []
    for form in ("npu_full", "qkv"):
        cells = []
        for name in names:
            rows = rows_of(name)
            losses = rows[rows.method.isin([form, f"{form}, equalised"])].set_index(["method", "metric"]).value
            (gain,) = gains(rows).query("rival == @form").itertuples()
            for method in (form, f"{form}, equalised"):
                cells.append("{:+.4f} ± {:.4f}".format(*(losses[method, metric] for metric in INCREASE)))
            cells.append(f"{-gain.gain:+.4f} ({-gain.high:+.4f} … {-gain.low:+.4f})")
        lines.append([_ROUNDED[form], *cells])
    texts = ("WikiText-2", "standard library")
    header = ["rounded to INT8", *(f"{text}, {what}" for text in texts for what in ("as it is", "equal channels", "difference"))]
    windows = int(gains(rows_of(names[0])).n.iloc[0])
    n = f"loss above dense, nat, ± one standard error; 95 % intervals of paired differences; n = {windows} windows"
    return f"{table(header, lines, names[0], n)}\n\n{source(names[1], 'the standard library')}"


def calibration_lengths() -> str:
    """The error of static INT8 attention by the length of the prompts that its scales are from, on SmolLM2."""
    rows = rows_of("study_outliers_smollm2")
    rows = rows[rows.metric == "output_error"]
    lengths = {"npu_full": f"{int(rows.context_tokens.iloc[0])} tokens, as the prompts measured"}
    lengths |= {name: name.split(" at ")[1] for name in rows.method.unique() if " at " in name}
    lines = []
    for name, words in lengths.items():
        of = rows[rows.method == name]
        lines.append([words, f"{one(of, head=-1):.3f}", f"{of.value[of['head'] >= 0].median():.3f}"])
    header = ["scales calibrated on prompts of", "output error of all heads together", "median of heads"]
    return table(header, lines, "study_outliers_smollm2", f"`npu_full`, as many tokens for each; n = {rows.n.iloc[0]} tokens")


_CHANGES = {"": "as they are", ", offset": "less the mean key", ", equalised": "equal channels", ", both": "both"}


def outliers() -> str:
    """Median over heads of the error that static INT8 attention makes in a head's output, on SmolLM2."""
    rows = rows_of("study_outliers_smollm2")
    heads = rows[(rows.metric == "output_error") & (rows["head"] >= 0)]
    median = heads.groupby("method").value.median()
    sinks = rows[rows.metric == "error_of_sinks"].set_index("method").value
    lines = [
        [_ROUNDED[form], *(f"{median[form + change]:.3f}" for change in _CHANGES), f"{sinks[form]:.0%}"]
        for form in ("npu_full", "qkv", "qkv_scores", "qkv_probabilities")
    ]
    header = ["rounded to INT8", *(f"Q and K {words}" for words in _CHANGES.values()), "of it in heads with a sink"]
    count, with_sinks = heads.groupby("method").size().iloc[0], one(rows, metric="heads_with_sinks")
    counted = f"median over {count} heads of ‖output − dense‖ / ‖dense‖; {with_sinks:.0f} heads have a sink"
    return table(header, lines, "study_outliers_smollm2", f"{counted}; n = {heads.n.iloc[0]} tokens")
