"""In which order, and how much at once, a layer's heads go through the three stages: the four pictures of the paper's Fig. 9."""

from dataclasses import dataclass, field

import torch

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.online.executor import Pool, Ran, Threads, run_batched, run_listed, run_overlapped, run_serial
from shadowattn.online.latency import REMEDY, LatencyProfile
from shadowattn.online.latency_profiler import binding
from shadowattn.online.makespan import check_plan
from shadowattn.online.plan import Group, Plan, Work
from shadowattn.online.schedulers import Scheduler
from shadowattn.online.stages import Stages
from shadowattn.types import Selection

MODES = ("batched", "serial", "overlap", "grouped", "planned")
_MOST_SCORE_BYTES = 128 << 20  # of the heads of a chunk, which an order of the scheduler may keep all at once


@dataclass
class Pipeline:
    """`mode` is one of

    - `batched`: no pipeline; each stage takes as many heads at once as fit, on all cores (`executor.run_batched`);
    - `serial`: head by head, one stage after the other, on all cores;
    - `overlap`: head by head, the stages at the same time on different heads;
    - `grouped`: the same, and heads of one scale bucket share a launch of the estimate;
    - `planned`: the same with heads in the order that `scheduler` finds best for the latencies of `profile` (`plan`).

    None of them changes which keys are selected. `threads` left open: all of torch's where one stage runs at a time, an equal
    share where several do. At most `queue_heads` heads wait between two stages.
    """

    mode: str = "batched"
    queue_heads: int = 2
    threads: Threads = field(default_factory=Threads)
    scheduler: Scheduler | None = None
    profile: LatencyProfile | None = None
    _pool: Pool = field(default_factory=Pool, init=False, repr=False)  # of scores
    _list_pool: Pool = field(default_factory=Pool, init=False, repr=False)

    def __post_init__(self):
        checks.one_of("pipeline", self.mode, MODES)
        self.queue_heads = checks.integer("pipeline.queue_heads", self.queue_heads, least=1)
        checks.instance("pipeline.threads", self.threads, Threads, "make it with shadowattn.online.executor.Threads(…)")
        if self.mode == "planned" and self.profile is None:
            raise InputError(f"pipeline=planned: expected a latency profile, got none; {REMEDY}, then set pipeline.profile=FILE")
        if self.mode == "planned" and self.scheduler is None:
            raise InputError("pipeline=planned: expected a scheduler, got none; set scheduler=local_search")

    def check_place(self, device: torch.device) -> None:
        """Raises `InputError` where a mode has no meaning: on a GPU a stage is not over when its call is."""
        if self.mode != "batched" and device.type != "cpu":
            raise InputError(
                f"pipeline={self.mode}: takes heads and stages apart on the CPU, got a model on {device}; use pipeline=batched"
            )

    def run(self, stages: Stages, *, keep_lists: bool, lists: Selection | None = None) -> Ran:
        """Output, lists (or how many pairs they hold) and timeline of a chunk; attention alone where its `lists` are given."""
        if lists is not None:
            return run_listed(stages, lists, threads=self.threads)
        if self.mode in ("grouped", "planned") and stages.selects_in_estimate:
            raise InputError(
                f"pipeline={self.mode}: {type(stages.estimator).__name__} selects while it estimates, so that there are no "
                "scores to launch for; use pipeline=batched, serial or overlap, or estimator=int8_graph"
            )
        if self.mode == "batched":
            return run_batched(stages, threads=self.threads, keep_lists=keep_lists)
        threads = self.budgets(stages.estimator.device, stages=3 - stages.selects_in_estimate)
        launches, order = self._arrange(stages, threads)
        if self.mode == "serial":
            return run_serial(stages, launches, threads=threads, keep_lists=keep_lists)
        return run_overlapped(
            stages, launches, order, threads=threads, queue_heads=self.queue_heads, keep_lists=keep_lists, pool=self._pool,
            list_pool=self._list_pool,
        )  # fmt: skip

    def budgets(self, device: str, *, stages: int = 3) -> Threads:
        """The threads of each stage; what was left open is an equal share where `stages` overlap, the estimate on `device`."""
        if self.mode in ("batched", "serial"):
            return self.threads
        share = max(1, torch.get_num_threads() // (stages - (device != "CPU")))
        return Threads(*(threads or share for threads in vars(self.threads).values()))

    def plan(self, stages: Stages, work: Work) -> Plan:
        """The order of `planned`: the scheduler's, with launches as their heads are wanted.

        Heads of a launch stay together where the scores of all heads would take more than 128 MiB: an order that takes them apart
        may keep all of them.
        """
        plan, (rows, keys) = self.scheduler.plan(work), stages.scores_of_head
        check_plan(work, plan)
        plan = plan.launched_as_wanted(work)
        return plan.launch_by_launch(work) if 4 * rows * keys * len(stages.chunk.heads) > _MOST_SCORE_BYTES else plan

    def _arrange(self, stages: Stages, threads: Threads) -> tuple[list[Group], list[int]]:
        """The launches in their order, and the order of the heads behind them."""
        chunk = stages.chunk
        if self.mode == "planned":
            (heads, rows, head_dim), kv_heads = chunk.q.shape, chunk.k.shape[0]
            parts = stages.estimator, stages.kernels, stages.rule, threads
            shape = {"heads": heads, "kv_heads": kv_heads, "rows": rows, "head_dim": head_dim}
            self.profile.check(binding(*parts, **shape, dtype=chunk.q.dtype))
        heads = range(len(chunk.heads))
        groups = [Group((head,)) for head in heads] if stages.selects_in_estimate else stages.launches()
        if self.mode in ("serial", "overlap"):
            groups = sorted((Group((head,), group.bucket) for group in groups for head in group.heads), key=lambda g: g.heads)
        if self.mode != "planned":
            return groups, [head for group in groups for head in group.heads]
        plan = self.plan(stages, self.profile.work(groups, chunk.retention.tolist(), keys=chunk.keys))
        return [groups[launch] for launch in plan.launches], list(plan.heads)
