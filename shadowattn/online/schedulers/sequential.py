"""Heads in the order of their numbers, whatever launch they are in; launches by their first head."""

from dataclasses import dataclass

from shadowattn.online.makespan import check_work
from shadowattn.online.plan import Plan, Work


@dataclass(frozen=True)
class Sequential:
    def plan(self, work: Work) -> Plan:
        check_work(work)
        launches = sorted(range(len(work.launches)), key=lambda index: min(work.launches[index].heads))
        return Plan(tuple(launches), tuple(range(len(work.select_us))))
