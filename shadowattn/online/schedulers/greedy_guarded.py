"""Greedy, unless first in, first out is better: the guard of the authors' code."""

from dataclasses import dataclass

from shadowattn.online.makespan import check_machines, makespan
from shadowattn.online.plan import Plan, Work
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.greedy import Greedy


@dataclass(frozen=True)
class GreedyGuarded:
    """Never worse than `Fifo` on `machines`, as in `makespan`; the authors' guard is of three."""

    machines: int = 3

    def __post_init__(self):
        check_machines(self.machines)

    def plan(self, work: Work) -> Plan:
        greedy, fifo = Greedy().plan(work), Fifo().plan(work)
        taken = [makespan(work, plan, machines=self.machines) for plan in (greedy, fifo)]
        return greedy if taken[0] <= taken[1] + 1e-9 else fifo
