"""Which heads break static INT8 attention, and why: each head's error beside its sinks and outliers, and what remedies save."""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import ClassVar

import pandas as pd
import torch
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table
from torch import Tensor

from experiments.cells import paired_error
from experiments.comparisons import comparison_rows
from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.evaluation.outliers import (
    RESCALINGS,
    Candidate,
    HeadErrors,
    Rescaling,
    measure_head_errors,
    observe_channels,
    rescalings,
)
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.models.channels import channel_factors
from shadowattn.offline.attention_ranges import observe_attention_ranges, observe_prepared_ranges
from shadowattn.offline.key_offsets import observe_key_offset
from shadowattn.online.full_int8 import FullInt8
from shadowattn.reporting.figures.outliers import draw as draw_outliers
from shadowattn.reporting.rows import PlacedRow
from shadowattn.reporting.style import ALL_KEYS

# What of the attention is rounded, from Q, K and V alone to all of it.
FORMS = {
    "qkv": FullInt8(scores=False, probabilities="float"),
    "qkv_scores": FullInt8(probabilities="float"),
    "qkv_probabilities": FullInt8(scores=False),
    "npu_full": FullInt8(),
}
_SIGNALS = {"sink_share": "sink", "small_share": "small", "q_outlier": "q_outlier", "k_outlier": "k_outlier"}
INCREASE = ("loss_increase", "loss_increase_error")
FURTHER = {"npu_full_log2": FullInt8(probabilities="log2"), "npu_full_per_head": FullInt8(granularity="head")}


@dataclass(frozen=True)
class Outliers(Study):
    """Static scales are those of `calibration_windows` windows of the calibration text; errors those of the held-out windows.

    Every form with every rescaling of Q and K (`evaluation.outliers`): none, the mean key taken off, channels equalised, both.
    A head is said to have a sink where the first key holds more than `sink_share` of its probability. `calibration_tokens`: as
    many tokens of the calibration text in prompts of each of these lengths, whose scales serve the same held-out windows.
    `loss_windows`: on so many held-out windows also the losses of NPU-Full and of INT8 Q, K and V, of the model as it is and with
    equal channels folded into its projections, compared pair by pair; 0: none.
    """

    calibration_windows: int = 4
    loss_windows: int = 0
    calibration_tokens: list[int] = field(default_factory=lambda: [64, 256])
    sink_share: float = 0.3
    on_gpu: ClassVar[bool] = True
    needs: ClassVar[tuple[str, ...]] = ("model", "data", "evaluation", "seed", "graphs")
    headline: ClassVar[tuple[str, ...]] = ("output_error", "error_of_sinks")

    def __post_init__(self):
        check_count("study.calibration_windows", self.calibration_windows)
        check_count("study.loss_windows", self.loss_windows, least=0)
        if len(set(self.calibration_tokens)) < len(self.calibration_tokens):
            raise InputError(f"study.calibration_tokens: expected every length once, got {self.calibration_tokens}")
        for tokens in self.calibration_tokens:
            check_count("study.calibration_tokens", tokens)

    def check(self, lab: Lab) -> None:
        for tokens in self.calibration_tokens:
            if tokens >= lab.context_tokens:
                raise InputError(
                    f"study.calibration_tokens: expected prompts shorter than the {lab.context_tokens} tokens of a window, which "
                    f"are calibrated on in any case, got {tokens}; set shorter ones, or study.calibration_tokens=[]"
                )

    def measure(self, lab: Lab) -> list[PlacedRow]:
        """One row a head and figure, and for each candidate one about all heads."""
        rescaled = self._rescalings(lab)
        errors = self._errors(lab, rescaled)
        windows = lab.heldout()
        row = replace(lab.row(PlacedRow), n=errors.rows)
        rows = []
        for metric, signal in _SIGNALS.items():
            rows += _by_head(replace(row, metric=metric), vars(errors)[signal])
        sinks = errors.sink > self.sink_share
        rows.append(replace(row, metric="heads_with_sinks", value=float(sinks.sum()), n=sinks.numel()))
        for name in errors.error:
            method_row = replace(row, method=name, allocator=ALL_KEYS, estimator="full_int8", n=errors.rows)
            total = errors.error[name].sum()
            rows.append(replace(method_row, metric="output_error", value=float((total / errors.norm.sum()).sqrt())))
            rows.append(replace(method_row, metric="error_of_sinks", value=float(errors.error[name][sinks].sum() / total)))
            rows += _by_head(replace(method_row, metric="output_error"), errors.relative(name))
        say(f"outliers: {int(sinks.sum())} of {sinks.numel()} heads have a sink, {len(windows)} windows")
        return rows + self._loss_rows(lab, rescaled["equalised"].factor) if self.loss_windows else rows

    def _loss_rows(self, lab: Lab, factors: Sequence[Tensor]) -> list[PlacedRow]:
        """Loss above dense of two forms, with and without the factors in the projections."""
        model, how = lab.loaded.model, {"chunk_tokens": lab.of("graphs").chunk_tokens}
        calibration, windows = self._calibration(lab), lab.heldout(windows=self.loss_windows)
        dense = window_losses(model, windows, **how)
        row, rows = replace(lab.row(PlacedRow), unit="nat", allocator=ALL_KEYS, estimator="full_int8", n=len(windows)), []
        losses, method_rows = {}, {}
        for suffix, folded in (("", nullcontext()), (", equalised", channel_factors(model, factors))):
            with folded:
                ranges = observe_attention_ranges(model, calibration, **how, progress=lambda w: bar(w, "ranges"))
                for form in ("qkv", "npu_full"):
                    name = form + suffix
                    with FORMS[form](model, ranges, **how):
                        losses[name] = window_losses(model, windows, **how, progress=lambda w, name=name: bar(w, name))
                    figures = {
                        "loss_increase": float((losses[name] - dense).mean()),
                        "loss_increase_error": paired_error(losses[name].tolist(), dense.tolist()),
                    }
                    method_rows[name] = replace(row, method=name)
                    rows += [replace(row, method=name, metric=metric, value=value) for metric, value in figures.items()]
        pairs = [(f"{form}, equalised", form) for form in ("qkv", "npu_full")]
        return rows + comparison_rows(method_rows, {name: one.tolist() for name, one in losses.items()}, pairs)

    def _calibration(self, lab: Lab) -> Tensor:
        return lab.calibration(tokens=lab.context_tokens, windows=self.calibration_windows)

    def _rescalings(self, lab: Lab) -> dict[str, Rescaling]:
        model, how = lab.loaded.model, {"chunk_tokens": lab.of("graphs").chunk_tokens}
        calibration = self._calibration(lab)
        say(f"ranges: {len(RESCALINGS)} rescalings of Q and K, {len(calibration)} windows of {lab.context_tokens} tokens")
        mean_key = observe_key_offset(model, calibration, how="mean", **how, progress=lambda w: bar(w, "mean key"))
        return rescalings(observe_channels(model, calibration, **how, progress=lambda w: bar(w, "channels")), mean_key)

    def _errors(self, lab: Lab, rescaled: Mapping[str, Rescaling]) -> HeadErrors:
        model, how = lab.loaded.model, {"chunk_tokens": lab.of("graphs").chunk_tokens}
        calibration = self._calibration(lab)
        ranges = observe_prepared_ranges(model, calibration, rescaled, **how, progress=lambda w: bar(w, "ranges"))
        candidates = {
            form if name == "none" else f"{form}, {name}": Candidate(rounding, rescaled[name], ranges[name])
            for name in RESCALINGS
            for form, rounding in FORMS.items()
        }
        candidates |= {form: Candidate(rounding, rescaled["none"], ranges["none"]) for form, rounding in FURTHER.items()}
        plain = {"none": rescaled["none"]}
        for tokens in self.calibration_tokens:
            count = calibration.numel() // tokens
            shorter = lab.calibration(tokens=tokens, windows=count, key="study.calibration_tokens")
            shorter_ranges = observe_prepared_ranges(model, shorter, plain, **how, progress=lambda w: bar(w, "ranges"))
            candidates[f"npu_full, calibrated at {tokens} tokens"] = Candidate(
                FORMS["npu_full"], plain["none"], shorter_ranges["none"]
            )
        return measure_head_errors(model, lab.heldout(), candidates, **how, progress=lambda w: bar(w, "errors"))

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"study_outliers": draw_outliers(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Table | Group:
        """A line for each candidate: its error over all heads, the head it serves worst, and what heads with sinks make of it."""
        table = Table("method", "output error", "worst head", "share of the error in heads with sinks", title=title)
        for name, method_rows in rows[rows.metric.isin(("output_error", "error_of_sinks"))].groupby("method", sort=False):
            whole, heads = method_rows[method_rows.layer < 0].set_index("metric").value, method_rows[method_rows.layer >= 0]
            worst = heads.loc[heads.value.idxmax()]
            place = f"{worst.value:.3f} (layer {worst.layer}, head {worst['head']})"
            table.add_row(str(name), f"{whole['output_error']:.4f}", place, f"{whole['error_of_sinks']:.0%}")
        losses = rows[rows.metric.isin(INCREASE)].pivot_table(index="method", columns="metric", values="value", sort=False)
        if losses.empty:
            return table
        further = Table("method", "loss above dense, nat", title="channels folded into the projections")
        for name, loss in losses.iterrows():
            further.add_row(str(name), "{:+.4f} ± {:.4f}".format(*loss[list(INCREASE)]))
        return Group(table, further)


def _by_head(row: PlacedRow, values: Tensor) -> Sequence[PlacedRow]:
    layers, heads = values.shape
    places = torch.cartesian_prod(torch.arange(layers), torch.arange(heads)).tolist()
    return [replace(row, layer=layer, head=head, value=float(values[layer, head])) for layer, head in places]
