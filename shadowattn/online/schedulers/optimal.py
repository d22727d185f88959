"""The optimum: what the others are measured against, too slow to plan with.

On two machines it is Johnson's rule. On three, works of few heads are solved by dynamic programming, exactly; others by
constraint programming (OR-tools' CP-SAT), which ends in a plan and a bound. Both search over what a `Plan` can say, which loses
nothing: with launches in some order, there is an optimal order of heads that selection and attention share.
"""

from dataclasses import dataclass

from shadowattn.errors import InputError
from shadowattn.online.makespan import check_machines, check_work, makespan
from shadowattn.online.plan import Plan, Work
from shadowattn.online.schedulers.bounds import lower_bound
from shadowattn.online.schedulers.johnson import Johnson
from shadowattn.online.schedulers.local_search import LocalSearch
from shadowattn.online.schedulers.subsets import best_order, plan_of

# Up to here dynamic programming takes less than a second.
_FEW_HEADS = 12
# CP-SAT counts in integers: so many steps to the length of the plan that it begins with.
_STEPS = 10_000_000


@dataclass(frozen=True)
class Solution:
    """A plan, how long it takes, and a bound that no plan beats, both up to the rounding of floats.

    `proven` where nothing is left to search. The two are then one, except that CP-SAT leaves the bound below the makespan by what
    it rounds: less than (heads + launches + 1) / 10 000 000 of it.
    """

    plan: Plan
    makespan_us: float
    bound_us: float
    proven: bool


@dataclass(frozen=True)
class Optimal:
    """`limit_s`: CP-SAT, for more than twelve heads, ends there; what it has proven until then is in `solve`."""

    machines: int = 3
    limit_s: float = 10.0
    workers: int = 8  # of CP-SAT: each searches in another way, which proves more even on fewer cores

    def __post_init__(self):
        check_machines(self.machines)
        if not self.limit_s > 0:
            raise InputError(f"scheduler.limit_s: expected a time above 0 s, got {self.limit_s}")
        if self.workers < 1:
            raise InputError(f"scheduler.workers: expected at least 1, got {self.workers}")

    def plan(self, work: Work) -> Plan:
        return self.solve(work).plan

    def solve(self, work: Work) -> Solution:
        """The best plan found, and its bound."""
        check_work(work)
        if self.machines == 2:
            return _exact(work, Johnson().plan(work), machines=2)
        start = LocalSearch(limit_us=5000).plan(work)
        length, bound = makespan(work, start), lower_bound(work)
        if length <= bound * (1 + 1e-12):
            return _exact(work, start)
        if len(work.select_us) <= _FEW_HEADS:
            return _exact(work, best_order(work, length) or start)
        return self._search(work, start, length, bound)

    def _search(self, work: Work, start: Plan, length: float, bound: float) -> Solution:
        """By CP-SAT, with costs rounded down to steps: what bounds them bounds the costs themselves."""
        from ortools.sat.python import cp_model  # half a second to import, and only for this

        model, horizon = cp_model.CpModel(), _STEPS + 1
        step_us = length / _STEPS

        def task(us: float, name: str):
            begin = model.new_int_var(0, horizon, name)
            return begin, int(us / step_us), model.new_fixed_size_interval_var(begin, int(us / step_us), name)

        device = [task(launch.estimate_us, f"launch {i}") for i, launch in enumerate(work.launches)]
        select, attend = (
            [task(us, f"{stage} {head}") for head, us in enumerate(costs)]
            for stage, costs in (("select", work.select_us), ("attend", work.attend_us))
        )
        for (begin, steps, _), launch in zip(device, work.launches, strict=True):
            for head in launch.heads:
                model.add(select[head][0] >= begin + steps)
        for (begin, steps, _), (then, _, _) in zip(select, attend, strict=True):
            model.add(then >= begin + steps)
        for stage in (device, select, attend):
            model.add_no_overlap([interval for _, _, interval in stage])
        end = model.new_int_var(int(bound / step_us), horizon, "end")
        model.add_max_equality(end, [begin + steps for begin, steps, _ in attend])
        model.minimize(end)
        _hint(model, start, work, device, select, attend)
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = self.limit_s
        solver.parameters.num_workers = self.workers
        solver.parameters.catch_sigint_signal = False  # it would leave SIGINT to end the process, not to interrupt Python
        status = solver.solve(model)
        plan, better = start, length
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            tried = plan_of(work, _in_order(solver, select, attend))
            if makespan(work, tried) < length:  # unless by rounding
                plan, better = tried, makespan(work, tried)
        bound = max(bound, solver.best_objective_bound * step_us)
        return Solution(plan, better, min(bound, better), status == cp_model.OPTIMAL)


def _exact(work: Work, plan: Plan, machines: int = 3) -> Solution:
    length = makespan(work, plan, machines=machines)
    return Solution(plan, length, length, True)


def _in_order(solver, *stages) -> list[int]:
    """Heads by when they begin and end in each stage: one that takes no time comes before one that begins with it."""

    def when(head: int) -> list[int]:
        return [at for tasks in stages for begin in [solver.value(tasks[head][0])] for at in (begin, begin + tasks[head][1])]

    return sorted(range(len(stages[0])), key=when)


def _hint(model, plan: Plan, work: Work, device, select, attend) -> None:
    """Gives CP-SAT this plan to begin with: when each task of it begins, in steps."""
    clock, released = 0, {}
    for index in plan.launches:
        model.add_hint(device[index][0], clock)
        clock += device[index][1]
        released |= dict.fromkeys(work.launches[index].heads, clock)
    selected = attended = 0
    for head in plan.heads:
        begin = max(released[head], selected)
        selected = begin + select[head][1]
        model.add_hint(select[head][0], begin)
        begin = max(selected, attended)
        attended = begin + attend[head][1]
        model.add_hint(attend[head][0], begin)
