"""The latency profile of the main method on this machine, which several studies measure or plan by."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from experiments.cells import estimator_of
from experiments.lab import Lab
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.artifacts import Stage, sha256
from shadowattn.errors import InputError
from shadowattn.kernels import choose
from shadowattn.online.executor import Pool
from shadowattn.online.latency import SCHEMA_VERSION, Latency, LatencyProfile
from shadowattn.online.latency_profiler import LatencyProfiler
from shadowattn.online.pipeline import Pipeline


@dataclass(frozen=True)
class LatencyStudy(Study):
    """A study that measures latencies of stages that overlap, at these retentions, each so often."""

    retentions: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
    repeats: int = 25
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "method", "estimator", "selection", "calibration", "key_offset", "grid"),
        *("graphs", "device", "kernel", "pipeline", "scheduler"),
        *("threads",),
    )

    def __post_init__(self):
        check_count("study.repeats", self.repeats)
        if not self.retentions or not all(0 < retention <= 1 for retention in self.retentions):
            raise InputError(f"study.retentions: expected at least one value in (0, 1], got {self.retentions or 'none'}")

    def check(self, lab: Lab) -> None:
        mode = lab.of("pipeline").mode
        if mode not in ("overlap", "grouped"):
            raise InputError(f"pipeline: {type(self).__name__} measures stages that overlap, got {mode}; use pipeline=grouped")

    def measure_profile(self, lab: Lab) -> tuple[LatencyProfile, Path]:
        """The latency profile of the main method's parts under the pipeline's thread budgets, and the file that it is in."""
        profiler, retentions = make_profiler(lab, lab.pipeline), sorted(self.retentions)
        lengths, bound = profiler.key_lengths(max(lab.prompt_tokens)), profiler.binding()
        how = {"keys": lengths, "retentions": retentions, "repeats": self.repeats, "schema_version": SCHEMA_VERSION}
        # By the compiled kernels, too: they are what is timed.
        stage = Stage(lab.artifacts, "latency", {"binding": bound} | how, code=lab.code.hash)
        path = stage.folder / "latency_profile.json"
        if not stage.done:
            layouts = len(profiler.layouts(retentions, profiler.sizes(lengths[0])))
            say(f"latency: {layouts} chunks of mixed buckets and {len(retentions)} retentions, up to {lengths[-1]} keys")
            points = []
            for keys in bar(lengths, "measure"):
                measured = stage.units.get(
                    str(keys), lambda keys=keys: [asdict(p) for p in profiler.measure(keys, retentions, repeats=self.repeats)]
                )
                points += [Latency(**point) for point in measured]
            LatencyProfile(bound, tuple(points)).save(path)
            stage.finish({"sha256": sha256(path)})
        stage.read()
        return LatencyProfile.load(path), path


def make_profiler(lab: Lab, pipeline: Pipeline) -> LatencyProfiler:
    """What measures the main method's parts under a pipeline's thread budgets."""
    dtype = lab.loaded.model.dtype
    return LatencyProfiler(
        heads=lab.shape.heads,
        kv_heads=lab.shape.kv_heads,
        head_dim=lab.shape.head_dim,
        rows=min(lab.of("graphs").chunk_tokens, max(lab.prompt_tokens)),
        dtype=dtype,
        estimator=estimator_of(lab, lab.main),
        rule=lab.main.rule,
        kernels=choose(lab.kernel, head_dim=lab.shape.head_dim, dtype=dtype),
        threads=pipeline.budgets(lab.device.name),
        seed=lab.seed,
        pool=None if pipeline.mode == "serial" else Pool(),
    )
