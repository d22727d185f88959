"""OpenVINO's core, one for the whole process."""

from functools import cache

import openvino as ov

from shadowattn.graphs import telemetry

telemetry.decline()  # at import, before any conversion, since the first one reports already


@cache
def core() -> ov.Core:
    """Every core loads the device's plugin anew, and the CPU's puts a stack of its own in place for the calling thread's signals.

    Of two cores that do not end in the reverse order of their beginning, one leaves the other's stack behind, which is freed by
    then: the next signal, such as Ctrl-C, ends the process. One core that never ends leaves none.
    """
    return ov.Core()
