"""Kernels of a lower instruction set than the processor has, for a study that asks for them by `study.level`."""

from contextlib import AbstractContextManager, nullcontext

from experiments.refusals import check_choice
from shadowattn.kernels import native


def check_level(level: str | None) -> None:
    """Raises `InputError` where no kernels were built, or this processor does not run those of `level`."""
    native.require()
    if level is not None:
        check_choice("study.level", level, native.levels())


def at_level(level: str | None) -> AbstractContextManager[None]:
    """Within, kernels are those of `level`; None changes nothing."""
    return nullcontext() if level is None else native.forced_level(level)
