"""The optimum, by constraint programming (OR-tools' CP-SAT): what the others are measured against, too slow to plan with.

It searches over what a `Plan` can say, which loses nothing: with launches in some order, there is an optimal order of heads that
selection and attention share.
"""

from dataclasses import dataclass

from shadowattn.errors import InputError
from shadowattn.online.makespan import check_machines, check_work, makespan
from shadowattn.online.plan import Plan, Work
from shadowattn.online.schedulers.bounds import lower_bound
from shadowattn.online.schedulers.local_search import LocalSearch

# CP-SAT counts in integers.
_STEPS_PER_US = 1000


@dataclass(frozen=True)
class Solution:
    """A plan, how long it takes and a bound that no plan beats; `proven` where the two are one."""

    plan: Plan
    makespan_us: float
    bound_us: float
    proven: bool


@dataclass(frozen=True)
class Optimal:
    """`limit_s`: the search ends there; what it has proven until then is in `solve`."""

    machines: int = 3
    limit_s: float = 10.0
    workers: int = 1

    def __post_init__(self):
        check_machines(self.machines)
        if not self.limit_s > 0:
            raise InputError(f"scheduler.limit_s: expected a time above 0 s, got {self.limit_s}")

    def plan(self, work: Work) -> Plan:
        return self.solve(work).plan

    def solve(self, work: Work) -> Solution:
        """The best plan found, beginning from that of the local search, and its bound."""
        check_work(work)
        start = LocalSearch(self.machines, limit_us=5000).plan(work)
        length, bound = makespan(work, start, machines=self.machines), lower_bound(work, machines=self.machines)
        if length <= bound * (1 + 1e-12):
            return Solution(start, length, length, True)
        return self._search(work, start, length, bound)

    def _search(self, work: Work, start: Plan, length: float, bound: float) -> Solution:
        from ortools.sat.python import cp_model  # half a second to import, and only for this

        model, horizon = cp_model.CpModel(), _steps(length) + len(work.select_us) + len(work.launches) + 1

        def task(us: float, name: str):
            begin = model.new_int_var(0, horizon, name)
            return begin, begin + _steps(us), model.new_fixed_size_interval_var(begin, _steps(us), name)

        device = [task(launch.estimate_us, f"launch {i}") for i, launch in enumerate(work.launches)]
        of_head = {head: device[i][1] for i, launch in enumerate(work.launches) for head in launch.heads}
        if self.machines == 2:
            chain = [task(s + a, f"head {h}") for h, (s, a) in enumerate(zip(work.select_us, work.attend_us, strict=True))]
            first, last, stages = chain, chain, [device, chain]
        else:
            first, last = ([task(us, f"{n} {h}") for h, us in enumerate(costs)] for n, costs in _stages(work))
            stages = [device, first, last]
        for head, (begin, _, _) in enumerate(first):
            model.add(begin >= of_head[head])
            if first is not last:
                model.add(last[head][0] >= first[head][1])
        for stage in stages:
            model.add_no_overlap([interval for _, _, interval in stage])
        end = model.new_int_var(_steps(bound * (1 - 1e-9)), horizon, "end")
        model.add_max_equality(end, [finished for _, finished, _ in last])
        model.minimize(end)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = self.limit_s
        solver.parameters.num_workers = self.workers
        status = solver.solve(model)
        found = start
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            found = Plan(*(_in_order(solver, *stage) for stage in ((device,), (first, last))))
        better = makespan(work, found, machines=self.machines)
        if better > length:  # by rounding, or because the search found nothing in its time
            found, better = start, length
        # Costs were rounded to steps: a bound in steps can be off by half of one for each task of the longest chain.
        slack = (2 * len(work.select_us) + len(work.launches)) / (2 * _STEPS_PER_US)
        proven = status == cp_model.OPTIMAL
        return Solution(
            found, better, better if proven else max(bound, solver.best_objective_bound / _STEPS_PER_US - slack), proven
        )


def _in_order(solver, *stages) -> tuple[int, ...]:
    """Items by when they begin and end in each stage: one that takes no time comes before one that begins with it."""
    return tuple(sorted(range(len(stages[0])), key=lambda i: [solver.value(at) for tasks in stages for at in tasks[i][:2]]))


def _stages(work: Work):
    return ("select", work.select_us), ("attend", work.attend_us)


def _steps(us: float) -> int:
    return round(us * _STEPS_PER_US)
