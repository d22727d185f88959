"""Schedulers: the order of launches and heads. One file each (section 3.4).

To add one: a frozen dataclass with a `plan` method in a file of its own name, and a YAML of that name in `conf/scheduler/`.
"""

from typing import Protocol, runtime_checkable

from shadowattn.online.plan import Plan, Work


@runtime_checkable
class Scheduler(Protocol):
    def plan(self, work: Work) -> Plan:
        """An order for the launches, and one for the heads in selection and attention.

        Raises `InputError` where a head is in no launch or in two, or a cost is negative or not finite.
        """
        ...
