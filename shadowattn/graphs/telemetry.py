"""Usage reports of OpenVINO and NNCF: none are sent by a process that uses this package."""

from openvino_telemetry import Telemetry
from openvino_telemetry.utils.opt_in_checker import ConsentCheckResult, OptInChecker


def decline() -> None:
    """Answers no for this process, whatever was answered before; the user's own answer stays where it is.

    Where nobody answered, every conversion and quantisation reports to Google Analytics several times, each time from a fork of
    the process: the page tables of a process that holds a model are copied, and a neighbour runs beside what is being timed.
    """
    OptInChecker.check = lambda *_, **__: ConsentCheckResult.DECLINED
    try:
        Telemetry().consent = False  # the process's only one, which NNCF makes when it is imported
    except RuntimeError:  # there is none yet
        return
