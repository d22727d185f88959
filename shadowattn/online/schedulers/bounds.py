"""What no order can beat: optima of easier problems, where all but two machines have room for everything at once."""

from collections.abc import Sequence

from shadowattn.online.makespan import check_machines, check_work
from shadowattn.online.plan import Work
from shadowattn.online.schedulers.johnson import johnson_order


def lower_bound(work: Work, *, machines: int = 3) -> float:
    """Microseconds. On two machines the optimum itself (see `johnson`); on three the largest of the optima of each two.

    The machine left out still takes its least before, between or after the others.
    """
    check_machines(machines)
    check_work(work)
    if not work.select_us:
        return 0.0
    estimate = [launch.estimate_us for launch in work.launches]
    select, attend = ([sum(costs[head] for head in launch.heads) for launch in work.launches] for costs in _stages(work))
    if machines == 2:
        return two_machines(estimate, [s + a for s, a in zip(select, attend, strict=True)])
    return max(
        two_machines(estimate, select) + min(work.attend_us),
        two_machines(estimate, attend) + min(work.select_us),
        two_machines(work.select_us, work.attend_us) + min(estimate),
    )


def two_machines(first: Sequence[float], second: Sequence[float]) -> float:
    """The shortest that jobs with these times on two machines, one after the other, can take."""
    done = finished = 0.0
    for job in johnson_order(range(len(first)), first, second):
        done += first[job]
        finished = max(finished, done) + second[job]
    return finished


def _stages(work: Work) -> tuple[Sequence[float], Sequence[float]]:
    return work.select_us, work.attend_us
