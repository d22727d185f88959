"""Greedy, unless first in, first out is better: the guard of the authors' code."""

from dataclasses import dataclass

from shadowattn.online.makespan import makespan
from shadowattn.online.plan import Plan, Work
from shadowattn.online.schedulers.fifo import Fifo
from shadowattn.online.schedulers.greedy import Greedy


@dataclass(frozen=True)
class GreedyGuarded:
    """Never worse than `Fifo` on three machines."""

    def plan(self, work: Work) -> Plan:
        greedy, fifo = Greedy().plan(work), Fifo().plan(work)
        return greedy if makespan(work, greedy) <= makespan(work, fifo) + 1e-9 else fifo
