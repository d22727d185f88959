"""The best of several constructions, then moves of single heads and launches while they help and time is left.

The constructions are first in first out, the paper's greedy, Johnson's rule, and Johnson's rule with the middle machine counted
on both sides (Campbell, Dudek and Smith, 1970). The search stops as soon as the lower bound is reached, often right there.
"""

import time
from dataclasses import dataclass
from functools import partial

from shadowattn.errors import InputError
from shadowattn.online.makespan import check_machines, check_work, finish, released
from shadowattn.online.plan import Plan, Work
from shadowattn.online.schedulers.bounds import lower_bound
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.greedy import greedy_plan
from shadowattn.online.schedulers.johnson import Johnson, johnson_order

_GAIN = 1e-9


@dataclass(frozen=True)
class LocalSearch:
    """`limit_us`: planning stops there, whatever is found, but not before the bound and a first order: some 5 µs a head.

    `machines` as in `makespan`.
    """

    machines: int = 3
    limit_us: float = 700.0

    def __post_init__(self):
        check_machines(self.machines)
        if not self.limit_us > 0:
            raise InputError(f"scheduler.limit_us: expected a time above 0 µs, got {self.limit_us}")

    def plan(self, work: Work) -> Plan:
        end = time.perf_counter() + self.limit_us * 1e-6
        check_work(work)
        least = lower_bound(work, machines=self.machines) * (1 + 1e-12)
        best, shortest = None, float("inf")
        for construct in (_both_sides, Johnson().plan, Fifo().plan, partial(greedy_plan, end=end)):
            plan = construct(work)
            if plan is None:
                return best
            length = self._length(work, plan.launches, plan.heads)
            if length < shortest - _GAIN:
                best, shortest = plan, length
            if shortest <= least or time.perf_counter() > end:
                return best
        return self._improve(work, best, shortest, least, end)

    def _improve(self, work: Work, plan: Plan, shortest: float, least: float, end: float) -> Plan:
        """First improvement: every head, then every launch with its heads, into every other place, round after round."""
        launches, heads = list(plan.launches), list(plan.heads)
        improved = True
        while improved:
            improved = False
            release = released(work, launches)
            for moved in _insertions(heads):
                length = finish(release, work.select_us, work.attend_us, moved, self.machines)
                if length < shortest - _GAIN:
                    heads, shortest, improved = moved, length, True
                    break
                if time.perf_counter() > end:
                    return Plan(tuple(launches), tuple(heads))
            if shortest <= least:
                break
            if improved:
                continue
            for order in _insertions(launches):
                # A launch takes its heads with it: they keep their order among themselves.
                place = {head: position for position, launch in enumerate(order) for head in work.launches[launch].heads}
                moved = sorted(heads, key=place.__getitem__)
                length = self._length(work, order, moved)
                if length < shortest - _GAIN:
                    launches, heads, shortest, improved = order, moved, length, True
                    break
                if time.perf_counter() > end:
                    return Plan(tuple(launches), tuple(heads))
        return Plan(tuple(launches), tuple(heads))

    def _length(self, work: Work, launches, heads) -> float:
        return finish(released(work, launches), work.select_us, work.attend_us, heads, self.machines)


def _both_sides(work: Work) -> Plan:
    """Johnson's rule on (device + selection, selection + attention); in a launch on (selection, attention)."""
    select = [sum(work.select_us[head] for head in launch.heads) for launch in work.launches]
    attend = [sum(work.attend_us[head] for head in launch.heads) for launch in work.launches]
    before = [launch.estimate_us + s for launch, s in zip(work.launches, select, strict=True)]
    after = [s + a for s, a in zip(select, attend, strict=True)]
    launches = johnson_order(range(len(work.launches)), before, after)
    heads = [head for i in launches for head in johnson_order(work.launches[i].heads, work.select_us, work.attend_us)]
    return Plan(tuple(launches), tuple(heads))


def _insertions(order: list[int]):
    """Every order that differs by one item in another place."""
    for source in range(len(order)):
        rest = order[:source] + order[source + 1 :]
        for target in range(len(order)):
            if target != source:
                yield [*rest[:target], order[source], *rest[target:]]
