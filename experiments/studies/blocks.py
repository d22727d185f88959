"""What the arithmetic of the engine's blocks costs in quality, with dense attention and with sparse attention between them."""

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.table import Table

from experiments.cells import attachment, method_row, paired_error
from experiments.comparisons import comparison_rows
from experiments.engines import build_engine, check_forms, check_look_ahead, refuse_form
from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.studies.base import Study
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import losses_of
from shadowattn.graphs.cpu import multiplies_in_bfloat16
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.reporting import verdicts
from shadowattn.reporting.figures.blocks import draw as draw_blocks
from shadowattn.reporting.rows import Row

EXACT = "float32"  # what others are compared with


@dataclass(frozen=True)
class BlocksRow(Row):
    """A row about blocks: the form's settings by `graphs.decoder.BlockForm`, `floats` as one text, and whether attention between
    them was dense.
    """

    precision: str = ""
    weights: str = ""
    smooth: float = 0.0
    floats: str = ""
    output_layer: str = ""  # the form's `head`
    attention_dtype: str = ""
    look_ahead: int = 0  # the first layer whose lists were made a layer early; 0: none


@dataclass(frozen=True)
class BlocksStudy(Study):
    """Every one of `forms`, by name, with dense attention; those of `sparse` also with the main method at each retention.

    Losses are of the evaluation's windows, each compared with that of blocks in float32 and dense attention, window by window;
    sparse ones also with dense attention between the same blocks.
    """

    forms: dict[str, BlockForm] = field(default_factory=dict)
    sparse: list[str] = field(default_factory=list)
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "retentions", "method", "estimator", "allocator", "selection"),
        *("importance", "sensitivity", "calibration", "key_offset", "grid", "graphs", "device", "kernel", "dense_above"),
        *("decode", "pipeline", "scheduler", "engine"),
    )
    headline: ClassVar[tuple[str, ...]] = ("loss_increase",)

    def __post_init__(self):
        if self.forms.get(EXACT) != BlockForm():
            raise InputError(f"study.forms: expected {EXACT}: {{}}, which others are compared with, got {', '.join(self.forms)}")
        for name in self.sparse:
            if name not in self.forms:
                raise InputError(f"study.sparse: expected names of study.forms ({', '.join(self.forms)}), got {name}")

    def check(self, lab: Lab) -> None:
        check_look_ahead(lab)
        refuse_form(lab, "use study.forms")
        check_forms(lab, *self.forms.values())
        for name, form in self.forms.items():
            if form.precision == "bfloat16" and not multiplies_in_bfloat16():
                raise InputError(
                    f"study.forms.{name}: bfloat16 needs a processor with such products, which OpenVINO does not find here; "
                    f"leave the form out with '~study.forms.{name}'"
                )

    def measure(self, lab: Lab) -> list[Row]:
        units, windows = lab.units("cells"), lab.heldout()
        cells = [(name, 1.0) for name in self.forms]
        cells += [(name, at) for name in self.sparse for at in lab.retentions if at < 1]
        pieces = {_key(*cell): lambda cell=cell: self._losses(lab, *cell) for cell in cells}
        todo = sum(not units.has(key) for key in pieces)
        say(f"blocks: {len(cells)} cells, {len(windows)} windows of {windows.shape[1]} tokens, {todo} cells to do")
        lab.measure_pieces(units, pieces, "blocks")
        losses = {cell: units.read(_key(*cell)) for cell in cells}
        rows, increases = [], {}
        for name, at in cells:
            row = replace(self._row(lab, name, at), n=windows.numel() - len(windows), unit="nat")
            loss, exact = (sum(losses[cell]) / len(windows) for cell in ((name, at), (EXACT, 1.0)))
            increases[name, at] = replace(row, metric="loss_increase", value=loss - exact)
            error = paired_error(losses[name, at], losses[EXACT, 1.0])
            rows += [replace(row, metric="loss", value=loss), increases[name, at]]
            rows.append(replace(row, metric="loss_increase_error", value=error, n=len(windows)))
        pairs = [((name, 1.0), (EXACT, 1.0)) for name in self.forms if name != EXACT]
        pairs += [((name, at), (name, 1.0)) for name, at in cells if at < 1]
        return rows + comparison_rows(increases, losses, pairs)

    def _losses(self, lab: Lab, name: str, at: float) -> list[float]:
        method = None
        if at < 1:
            method = attachment(lab, lab.main, lab.offline.profile(lab.main.allocator, at)).method(lab)
        engine = build_engine(lab, method, self.forms[name])
        return losses_of(engine.prefill_chunks, bar(lab.heldout(), _key(name, at))).tolist()

    def _row(self, lab: Lab, name: str, at: float) -> BlocksRow:
        form, row = self.forms[name], lab.row(BlocksRow)
        row = method_row(lab, row, lab.main, at) if at < 1 else row
        return replace(
            row, method=name, precision=form.precision, weights=form.weights, smooth=form.smooth, floats=" ".join(form.floats),
            output_layer=form.head,
            attention_dtype=lab.of("engine").attention_dtype, look_ahead=(lab.of("engine").look_ahead or 0) if at < 1 else 0,
        )  # fmt: skip

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"blocks": draw_blocks(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """A line for each form, a column for dense attention and for each retention."""
        increase, error = (
            rows[rows.metric == metric].set_index(["method", "retention"]).value
            for metric in ("loss_increase", "loss_increase_error")
        )
        retentions = sorted(increase.index.get_level_values("retention").unique(), reverse=True)
        heads = ["dense attention" if at == 1 else f"retention {at:g}" for at in retentions]
        table = Table("loss above float32, nat", *heads, title=title, title_justify="left")
        for name in dict.fromkeys(increase.index.get_level_values("method")):
            cells = (f"{increase[name, at]:+.4f} ± {error[name, at]:.4f}" if (name, at) in increase else "" for at in retentions)
            table.add_row(str(name), *cells)
        return Group(table, verdicts.comparisons(rows))


def _key(name: str, at: float) -> str:
    return f"{name}@{at:.15g}"
