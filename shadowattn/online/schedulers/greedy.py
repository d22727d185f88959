"""The paper's two-level greedy (algorithm 1): the launch, and in it the head, after which attention is done earliest.

Ties within 1e-9 go to the launch given first and to the lower head, as in the authors' code. Both look one step ahead only: with
heads (1, 10) and (8, 1) in one launch it takes the second first and ends at 29 where first in, first out ends at 22.
"""

import math
import time
from dataclasses import dataclass

from shadowattn.online.makespan import check_work
from shadowattn.online.plan import Plan, Work

_TIE = 1e-9


@dataclass(frozen=True)
class Greedy:
    def plan(self, work: Work) -> Plan:
        return greedy_plan(work)


def greedy_plan(work: Work, *, end: float = math.inf) -> Plan | None:
    """The greedy's plan, or None where `time.perf_counter()` is past `end` before it is made."""
    check_work(work)
    clocks, launches, heads = (0.0, 0.0, 0.0), [], []
    left = list(range(len(work.launches)))
    while left:
        best = None
        for launch in left:
            if time.perf_counter() > end:
                return None
            tried = _launch(work, launch, clocks)
            if best is None or tried[1][2] < best[1][1][2] - _TIE:
                best = launch, tried
        launch, (order, clocks) = best
        left.remove(launch)
        launches.append(launch)
        heads += order
    return Plan(tuple(launches), tuple(heads))


def _launch(work: Work, launch: int, clocks: tuple[float, float, float]) -> tuple[list[int], tuple[float, float, float]]:
    """One launch's heads in greedy order from these clocks of device, selection and attention, and the clocks after them."""
    device, selected, attended = clocks
    device += work.launches[launch].estimate_us
    left, order = sorted(work.launches[launch].heads), []
    while left:
        best = None
        for head in left:
            ready = max(device, selected) + work.select_us[head]
            done = max(attended, ready) + work.attend_us[head]
            if best is None or done < best[2] - _TIE:
                best = head, ready, done
        head, selected, attended = best
        left.remove(head)
        order.append(head)
    return order, (device, selected, attended)
