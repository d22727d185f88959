"""What a study is: settings, what it needs, how it measures, and what it shows of its rows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.console import RenderableType

from shadowattn.reporting.rows import Row

if TYPE_CHECKING:
    from experiments.lab import Lab


class Study(ABC):
    """One experiment. Derive a frozen dataclass whose fields are its settings: every constant that changes a number.

    To add one: a class in a file of its own, and `conf/exp/NAME.yaml`, whose `study` names the class by `_target_`.

    `needs` names what it uses of the configuration, by the keys of `config.Config`. Only that is computed, checked, printed and
    hashed; on the command line anything else is refused. `on_gpu`: whether it runs with `model.device=cuda`; what times stages or
    needs graphs does not.

    `headline` names the metrics that a sweep's table shows, a literal; its figure draws the first of them. Without any these are
    the first metric of the rows.
    """

    needs: ClassVar[tuple[str, ...]] = ()
    on_gpu: ClassVar[bool] = False
    headline: ClassVar[tuple[str, ...]] = ()

    def check(self, lab: "Lab") -> None:  # noqa: B027 - most have nothing more to refuse
        """Raises `InputError` on what cannot be measured, before anything is; what single settings rule out is refused by the
        class when it is made."""

    def diverging(self, lab: "Lab") -> tuple[str, int] | None:
        """The windows on which next-token distributions can be held to dense attention's: the setting that counts them, and its
        value. `evaluation.divergence_windows` asks for the first of them; None: the study measures no divergence."""
        return None

    def inputs(self) -> dict[str, Any]:
        """What else decides the results, and belongs into the hash: the content of files that settings name; JSON values."""
        return {}

    @abstractmethod
    def measure(self, lab: "Lab") -> Sequence[Row]:
        """The rows. Finished pieces go to `lab.units(name)`, so that the same command goes on where it was interrupted."""

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        """Figures by name, drawn from rows alone: fresh ones, or those that were committed. The first stands for the experiment
        in the documentation."""
        return {}

    @abstractmethod
    def table(self, rows: pd.DataFrame, title: str) -> RenderableType:
        """What a terminal shows of the rows."""
