"""Event simulation: what the executor would run when, for given costs (section 3.4).

It follows `online.executor`: the device runs launches in their order and hands over each head whose turn has come, at most
`queue_heads` of which wait between two stages; a full queue holds up the stage before it.
"""

import math
from collections import deque
from dataclasses import dataclass

from shadowattn.errors import InputError
from shadowattn.online.makespan import check_plan
from shadowattn.online.plan import Plan, Work
from shadowattn.online.timeline import STAGES, Span, Timeline

MODES = ("serial", "overlap")


def simulate(
    work: Work,
    plan: Plan,
    *,
    mode: str = "overlap",
    queue_heads: float = 2,
    cores: float = math.inf,
    device: str = "NPU",
    wakeup_latency_us: float = 0.0,
    task_overhead_us: float = 0.0,
) -> Timeline:
    """The timeline of one layer's chunk, marked as simulated.

    `serial` runs one stage at a time, launch by launch and head by head; `overlap` all three at once (grouped and planned runs
    too, with their launches and order in `work` and `plan`). Selection and attention take a core each, and so does the
    estimate where `device` is `CPU`; with fewer `cores` than stages at work, all slow down alike. `queue_heads` may be
    infinite: the end is then `makespan` on three machines. That long chunks leave no room in a queue
    (`executor.run_overlapped`) is not simulated. A stage that had to wait for its head takes `wakeup_latency_us` longer, where
    stages have threads; every launch and head of a stage takes `task_overhead_us` longer, which is what the executor itself
    costs. Raises `InputError` where the plan is not one of the work.
    """
    check_plan(work, plan)
    if mode not in MODES:
        raise InputError(f"mode: expected one of {', '.join(MODES)}, got {mode!r}")
    if not queue_heads >= 1 or not cores > 0:
        raise InputError(f"expected queue_heads of at least 1 and cores above 0, got {queue_heads} and {cores}")
    for name, us in (("wakeup_latency_us", wakeup_latency_us), ("task_overhead_us", task_overhead_us)):
        if not 0 <= us < math.inf:
            raise InputError(f"{name}: expected a time of at least 0 µs, got {us}")
    alone = mode == "serial"
    events = _Events(
        work, plan, 1 if alone else math.inf, queue_heads, cores, device, 0.0 if alone else wakeup_latency_us, task_overhead_us
    )
    return Timeline(tuple(sorted(events.run(), key=lambda span: span.start_us)), "simulated")


@dataclass
class _Task:
    stage: str
    heads: tuple[int, ...]
    start_us: float
    left_us: float


class _Events:
    def __init__(
        self,
        work: Work,
        plan: Plan,
        at_once: float,
        queue_heads: float,
        cores: float,
        device: str,
        wakeup_latency_us: float,
        task_overhead_us: float,
    ):
        self._work, self._at_once, self._room, self._cores = work, at_once, queue_heads, cores
        self._device = device
        self._launches, self._order = deque(plan.launches), deque(plan.heads)
        self._estimated: set[int] = set()  # done on the device, not handed over yet
        self._queues = {"select": deque(), "attend": deque()}
        self._selected: int | None = None  # selected, but the queue behind is full
        self._wakeup_latency_us, self._task_overhead_us, self._ended = (
            wakeup_latency_us,
            task_overhead_us,
            dict.fromkeys(STAGES, -1.0),
        )
        self._running: dict[str, _Task] = {}
        self._now = 0.0

    def run(self) -> list[Span]:
        spans, left = [], len(self._work.launches) + 2 * len(self._work.select_us)
        while left:
            self._begin()
            rates = self._rates()
            step = min(task.left_us / rates[stage] for stage, task in self._running.items())
            self._now += step
            for stage, task in list(self._running.items()):
                task.left_us -= step * rates[stage]
                if task.left_us <= 1e-9 * max(1.0, self._now):
                    spans.append(self._end(task))
                    left -= 1
        return spans

    def _begin(self) -> None:
        """Hands over what can be, and starts what can start, from the last stage to the first, until nothing moves."""
        moved = True
        while moved:
            moved = self._hand_over()
            for stage in ("attend", "select"):
                if self._queues[stage] and self._may_start(stage) and not (stage == "select" and self._selected is not None):
                    head = self._queues[stage].popleft()
                    costs = self._work.attend_us if stage == "attend" else self._work.select_us
                    woken = self._wakeup_latency_us if self._ended[stage] < self._now else 0.0
                    self._running[stage] = _Task(stage, (head,), self._now, woken + self._task_overhead_us + costs[head])
                    moved = True
            waiting = self._order and self._order[0] in self._estimated  # a head that its queue has no room for
            if self._launches and not waiting and self._may_start("estimate") and not self._must_drain():
                launch = self._work.launches[self._launches.popleft()]
                self._running["estimate"] = _Task(
                    "estimate", launch.heads, self._now, self._task_overhead_us + launch.estimate_us
                )
                moved = True

    def _hand_over(self) -> bool:
        moved = False
        if self._selected is not None and len(self._queues["attend"]) < self._room:
            self._queues["attend"].append(self._selected)
            self._selected, moved = None, True
        while self._order and self._order[0] in self._estimated and len(self._queues["select"]) < self._room:
            head = self._order.popleft()
            self._estimated.remove(head)
            self._queues["select"].append(head)
            moved = True
        return moved

    def _may_start(self, stage: str) -> bool:
        return stage not in self._running and len(self._running) < self._at_once

    def _must_drain(self) -> bool:
        """One stage at a time: what is estimated goes all the way before the next launch."""
        busy = self._queues["select"] or self._queues["attend"] or self._selected is not None
        return self._at_once == 1 and bool(busy)

    def _end(self, task: _Task) -> Span:
        del self._running[task.stage]
        self._ended[task.stage] = self._now
        if task.stage == "estimate":
            self._estimated.update(task.heads)
        elif task.stage == "select":
            self._selected = task.heads[0]
        device = self._device if task.stage == "estimate" else "CPU"
        return Span(task.stage, task.heads, task.start_us, self._now, device, 0)

    def _rates(self) -> dict[str, float]:
        """Progress per microsecond of each stage at work."""
        on_cpu = [stage for stage in self._running if stage != "estimate" or self._device == "CPU"]
        shared = min(1.0, self._cores / len(on_cpu)) if on_cpu else 1.0
        return {stage: shared if stage in on_cpu else 1.0 for stage in STAGES if stage in self._running}
