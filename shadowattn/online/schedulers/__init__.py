"""Schedulers: the order of launches and heads. One file each (section 3.4)."""

from typing import Protocol

from shadowattn.online.plan import Plan, Work


class Scheduler(Protocol):
    def plan(self, work: Work) -> Plan:
        """An order for the launches, and one for the heads in selection and attention."""
        ...
