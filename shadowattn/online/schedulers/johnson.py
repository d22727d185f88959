"""Johnson's rule for two machines: short first stages first, then long second stages last (Johnson, 1954).

Launches are jobs of the device and of all that follows; in a launch, heads are jobs of selection and attention. Where selection
and attention share one processor this is the optimum: the heads of a launch become ready together, so that the order among them
does not matter, and for two machines the rule is exact.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shadowattn.online.makespan import check_work
from shadowattn.online.plan import Plan, Work


@dataclass(frozen=True)
class Johnson:
    def plan(self, work: Work) -> Plan:
        check_work(work)
        after = [sum(work.select_us[head] + work.attend_us[head] for head in launch.heads) for launch in work.launches]
        launches = johnson_order(range(len(work.launches)), [launch.estimate_us for launch in work.launches], after)
        heads = [head for i in launches for head in johnson_order(work.launches[i].heads, work.select_us, work.attend_us)]
        return Plan(tuple(launches), tuple(heads))


def johnson_order(jobs: Iterable[int], first: Sequence[float], second: Sequence[float]) -> list[int]:
    """Jobs by Johnson's rule for their times on the first and on the second machine; ties by number."""
    jobs = sorted(jobs)
    early = sorted((job for job in jobs if first[job] < second[job]), key=lambda job: first[job])
    return early + sorted((job for job in jobs if first[job] >= second[job]), key=lambda job: -second[job])
