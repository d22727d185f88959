"""The optimum of three machines by dynamic programming over sets of heads (after Held and Karp, 1962), for works of few heads.

For an order of heads, launches by their first head are best: no head then waits for a launch that it does not need. So the
device's clock follows from which heads are done, and of the orders of a set only those matter that no other beats in both of
the remaining clocks. Time and memory grow with two to the number of heads: less than half a second for twelve.
"""

from collections.abc import Sequence
from typing import NamedTuple

from shadowattn.online.plan import Plan, Work


class _Clocks(NamedTuple):
    """When selection and attention are done with a set of heads, and how that came about."""

    selected: float
    attended: float
    before: "_Clocks | None" = None
    head: int = -1


def best_order(work: Work, shorter_than: float) -> Plan | None:
    """A plan that no other beats on three machines, or None where none takes less than `shorter_than` µs."""
    count, select, attend = len(work.select_us), work.select_us, work.attend_us
    launch_of = {head: launch for launch in work.launches for head in launch.heads}
    mates = [sum(1 << mate for mate in launch_of[head].heads) for head in range(count)]
    fronts = {0: (0.0, [_Clocks(0.0, 0.0)])}  # by set of heads, a bit each: the device's clock, and those of the other two
    for _ in range(count):
        longer: dict[int, tuple[float, list[_Clocks]]] = {}
        for done, (device, front) in fronts.items():
            left = [head for head in range(count) if not done >> head & 1]
            for head in left:
                released = device if done & mates[head] else device + launch_of[head].estimate_us
                after = [other for other in left if other != head]
                select_left, attend_left = sum(select[other] for other in after), sum(attend[other] for other in after)
                last = min((attend[other] for other in after), default=0.0)
                _, longer_front = longer.setdefault(done | 1 << head, (released, []))
                for clocks in front:
                    selected = max(clocks.selected, released) + select[head]
                    attended = max(clocks.attended, selected) + attend[head]
                    if max(attended + attend_left, selected + select_left + last) < shorter_than:
                        longer_front.append(_Clocks(selected, attended, clocks, head))
        fronts = {done: (device, _unbeaten(longer_front)) for done, (device, longer_front) in longer.items() if longer_front}
    if not fronts:
        return None
    ((_, front),) = fronts.values()
    return plan_of(work, _heads(min(front, key=lambda clocks: clocks.attended)))


def plan_of(work: Work, heads: Sequence[int]) -> Plan:
    """The best plan with heads in this order: launches by the first of their heads."""
    place = {head: at for at, head in enumerate(heads)}
    launches = sorted(range(len(work.launches)), key=lambda index: min(place[head] for head in work.launches[index].heads))
    return Plan(tuple(launches), tuple(heads))


def _unbeaten(front: list[_Clocks]) -> list[_Clocks]:
    """Those that no other is at least as early as on both machines."""
    kept, earliest = [], float("inf")
    for clocks in sorted(front, key=lambda clocks: clocks[:2]):
        if clocks.attended < earliest:
            kept.append(clocks)
            earliest = clocks.attended
    return kept


def _heads(clocks: _Clocks) -> list[int]:
    order = []
    while clocks.before is not None:
        order.append(clocks.head)
        clocks = clocks.before
    return order[::-1]
