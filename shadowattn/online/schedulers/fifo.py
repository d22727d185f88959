"""First in, first out: launches as they are given, their heads behind them."""

from dataclasses import dataclass

from shadowattn.online.makespan import check_work
from shadowattn.online.plan import Plan, Work


@dataclass(frozen=True)
class Fifo:
    def plan(self, work: Work) -> Plan:
        check_work(work)
        return Plan(tuple(range(len(work.launches))), tuple(head for launch in work.launches for head in launch.heads))
