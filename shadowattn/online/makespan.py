"""When the last head is done, for an order: the model that every scheduler optimises (section 3.4).

Three machines: the device runs launches one after the other; selection takes a head when its launch is done and the head before
it is selected; attention takes it when it is selected and the head before it is attended to. Two machines: selection and
attention share one processor, as with the paper's default of one core, which does both for a head before it takes the next.
"""

import math
from collections.abc import Sequence

from shadowattn.errors import InputError
from shadowattn.online.plan import Plan, Work

MACHINES = (2, 3)


def makespan(work: Work, plan: Plan, *, machines: int = 3) -> float:
    """Microseconds from the start to the end of the last head. Raises `InputError` where the plan is not one of this work."""
    check_machines(machines)
    check_plan(work, plan)
    return finish(released(work, plan.launches), work.select_us, work.attend_us, plan.heads, machines)


def released(work: Work, launches: Sequence[int]) -> list[float]:
    """When each head's launch is done, [H], with the launches in this order."""
    release = [0.0] * len(work.select_us)
    device = 0.0
    for launch in launches:
        device += work.launches[launch].estimate_us
        for head in work.launches[launch].heads:
            release[head] = device
    return release


def finish(
    release: Sequence[float], select_us: Sequence[float], attend_us: Sequence[float], heads: Sequence[int], machines: int
) -> float:
    """The end of the last of `heads`, taken in this order. The inner loop of every scheduler, hence without checks."""
    selected = attended = 0.0
    if machines == 2:
        for head in heads:
            start = release[head]
            selected = (start if start > selected else selected) + select_us[head] + attend_us[head]
        return selected
    for head in heads:
        start = release[head]
        selected = (start if start > selected else selected) + select_us[head]
        attended = (selected if selected > attended else attended) + attend_us[head]
    return attended


def check_work(work: Work) -> None:
    """Raises `InputError` unless every head is in one launch and every cost a finite number that is not negative."""
    heads = sorted(head for launch in work.launches for head in launch.heads)
    if heads != list(range(len(work.select_us))) or len(work.select_us) != len(work.attend_us):
        raise InputError(
            f"work: expected each of {len(work.select_us)} heads in exactly one launch and as many attention costs, got heads "
            f"{heads} and {len(work.attend_us)} costs"
        )
    if any(not launch.heads for launch in work.launches):
        raise InputError("work: expected at least one head in every launch, got an empty one")
    costs = [*(launch.estimate_us for launch in work.launches), *work.select_us, *work.attend_us]
    if any(not (0 <= cost < math.inf) for cost in costs):
        raise InputError("work: expected finite costs of at least 0 µs; measure the latency profile again")


def check_plan(work: Work, plan: Plan) -> None:
    """Raises `InputError` unless the plan orders each launch and each head of the work once."""
    check_work(work)
    for name, order, count in (("launches", plan.launches, len(work.launches)), ("heads", plan.heads, len(work.select_us))):
        if sorted(order) != list(range(count)):
            raise InputError(f"plan: expected an order of {count} {name}, got {list(order)}")


def check_machines(machines: int) -> None:
    """Raises `InputError` unless there are two or three."""
    if machines not in MACHINES:
        raise InputError(f"machines: expected 2, selection and attention on one processor, or 3, got {machines!r}")
