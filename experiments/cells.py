"""One method at one retention, measured: loss on every window, fidelity on the first few, and what the task's questions score."""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.lab import Lab, MethodSettings
from experiments.part_building import build, part_name
from shadowattn.errors import InputError
from shadowattn.evaluation.divergence import DenseLogits, window_divergences
from shadowattn.evaluation.fidelity import Fidelity, OutputError
from shadowattn.evaluation.generation import DenseContinuations, divergence
from shadowattn.evaluation.intervals import mean_interval
from shadowattn.evaluation.perplexity import by_octave, token_losses
from shadowattn.evaluation.tasks import scores
from shadowattn.method import Method
from shadowattn.models.place import place_label
from shadowattn.online.attention import Counters
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.full_int8 import AttentionRanges, FullInt8
from shadowattn.online.selection import Rule
from shadowattn.reporting.rows import Row
from shadowattn.reporting.style import ALL_KEYS
from shadowattn.types import RetentionProfile

R = TypeVar("R", bound=Row)


@dataclass(frozen=True)
class Cell:
    """What one method measured at one retention. `fidelity` is empty where all attention was dense."""

    loss: float
    window_losses: list[float]
    density: float
    sparse_density: float
    sparse_rows: int
    fidelity: dict[str, float]
    scores: list[float]  # of the questions of the run's task; empty where it has none
    generation: dict[str, float] = field(default_factory=dict)  # empty where nothing was generated
    counts: dict[str, float] = field(default_factory=dict)  # `Estimator.counts`; empty where nothing ranked keys
    layer_errors: list[tuple[int, float]] = field(default_factory=list)  # layers and their output errors
    window_divergences: list[float] = field(default_factory=list)  # from dense attention, nat, of the first windows
    octave_losses: list[tuple[int, list[float]]] = field(default_factory=list)  # of each window, as `perplexity.by_octave`


@dataclass(frozen=True)
class Attachment:
    """What a cell of a sparse method attaches to the model."""

    profile: RetentionProfile
    estimator: Estimator
    rule: Rule = field(default_factory=Rule)

    def observer(self) -> Fidelity:
        """What measures the fidelity of its attention."""
        return Fidelity()

    def attached(self, lab: Lab, observers: tuple) -> AbstractContextManager:
        """The lab's model with the method, as the lab's settings have it run."""
        return self.method(lab, observers)(lab.loaded.model)

    def method(self, lab: Lab, observers: tuple = ()) -> Method:
        """The method as one value."""
        options = {"pipeline": lab.pipeline} if "pipeline" in lab.needs else {}
        options |= {"decode": lab.of("decode")} if "decode" in lab.needs else {}
        return Method(
            self.profile,
            estimator=self.estimator,
            chunk_tokens=lab.of("graphs").chunk_tokens,
            kernel=lab.kernel,
            dense_above=lab.dense_above(self.rule, self.estimator.look),
            query_block=self.rule.query_block,
            block_score=self.rule.block_score,
            sinks=self.rule.sinks,
            recent=self.rule.recent,
            min_budget=self.rule.min_budget,
            observers=observers,
            **options,
        )

    def check(self, lab: Lab, counters: Counters) -> None:
        """Raises `RuntimeError` where what ran is not what the profile asks for."""
        limit = lab.dense_above(self.rule, self.estimator.look)
        expected = any(value < limit for layer in self.profile.retention for value in layer)
        if expected != bool(counters.sparse_rows):
            raise RuntimeError(f"the sparse path ran on {counters.sparse_rows} head rows, which its profile does not explain")


@dataclass(frozen=True)
class FullAttachment:
    """What a cell attaches whose method attends to every key, in INT8."""

    full: FullInt8
    ranges: AttentionRanges

    def observer(self) -> OutputError:
        """What measures the fidelity of its attention."""
        return OutputError()

    def attached(self, lab: Lab, observers: tuple) -> AbstractContextManager:
        """The lab's model with the method."""
        return self.full(lab.loaded.model, self.ranges, chunk_tokens=lab.of("graphs").chunk_tokens, observers=observers)

    def check(self, lab: Lab, counters: Counters) -> None:
        """Raises `RuntimeError` where it did not run."""
        if not counters.dense_rows:
            raise RuntimeError("attention in INT8 ran on no row")


def attachment(lab: Lab, method: MethodSettings, profile: RetentionProfile) -> Attachment:
    """A method with one profile, its estimator built with the bank or the grid that it needs."""
    if method.on_device:
        return Attachment(profile, Int8Device(lab.banks.selecting(method, profile)), method.rule)
    return Attachment(profile, estimator_of(lab, method, profile), method.rule)


def estimator_of(lab: Lab, method: MethodSettings, profile: RetentionProfile | None = None) -> Estimator:
    """A method's estimator, whose selection is made on the host, built with what its class `needs`.

    Raises `InputError`, which names the method, on settings that do not fit.
    """
    try:
        return _estimator(lab, method.estimator, profile, method.rule)
    except InputError as error:
        raise InputError(f"{method.name}: estimator: {error}") from error


def _estimator(lab: Lab, part: DictConfig, profile: RetentionProfile | None, rule: Rule) -> Estimator:
    """With what its class `needs`, and around another estimator where `part` names one."""
    settings, needs = dict(part), get_class(part._target_).needs
    inner = settings.pop("estimator", None)
    built = {"estimator": _estimator(lab, inner, profile, rule)} if inner else {}
    built |= {"bank": lab.banks.bank} if "bank" in needs else {}
    built |= {"grid": profile.scales if profile else lab.offline.grid} if "grid" in needs else {}
    built |= {"key_offset": lab.offline.key_offset} if "key_offset" in needs else {}
    if "first_look" in needs and settings["flat_share"]:
        built["first_look"] = lab.offline.first_look(settings["candidates"], settings["block_rows"])
    built |= {"channels": lab.offline.channels} if "channels" in needs else {}
    built |= {"indexer": lab.offline.indexer(settings["heads"], settings["dims"])} if "indexer" in needs else {}
    if "nncf_graph" in needs:
        built["nncf_graph"] = lab.banks.nncf_graph(max(lab.prompt_tokens), samples=lab.of("graphs").nncf_samples)
    if "top_p" in needs:
        unpruned = build(settings, **built, top_p=1.0)
        built["top_p"] = lab.offline.top_p(unpruned, OmegaConf.to_container(part), profile, rule)
    return build(settings, **built)


def method_row(lab: Lab, row: R, method: MethodSettings, retention: float) -> R:
    """A row about a sparse method at one retention."""
    return replace(
        row,
        method=method.name,
        retention=retention,
        estimator=part_name(method.estimator),
        allocator=part_name(method.allocator),
        estimate_device=lab.device.label if "bank" in method.needs else "none",
        **method.selection,
        dense_above=lab.dense_above(method.rule, method.look),
    )


def full_row(lab: Lab, row: R, name: str) -> R:
    """A row about a method of `full`, which attends to every key."""
    return replace(row, method=name, estimator=part_name(lab.of("full")[name]), allocator=ALL_KEYS)


@dataclass(frozen=True)
class Dense:
    """What dense attention says on the first windows, which methods are held to: on `divergence_windows` of them what comes next,
    on `evaluation.fidelity_windows` of them what it would generate."""

    logits: DenseLogits
    continuations: DenseContinuations | None

    @classmethod
    def of(cls, lab: Lab, windows: Tensor) -> "Dense":
        model, chunk_tokens, evaluation = lab.loaded.model, lab.of("graphs").chunk_tokens, lab.of("evaluation")
        logits = DenseLogits(model, windows[: divergence_windows(lab)], chunk_tokens=chunk_tokens, folder=lab.folder)
        first, tokens = windows[: evaluation.fidelity_windows], evaluation.generated_tokens
        continuations = DenseContinuations(model, first, tokens=tokens, chunk_tokens=chunk_tokens) if tokens else None
        return cls(logits, continuations)

    def check_room(self, lab: Lab) -> None:
        """Raises `InputError` where the disk, or the GPU's memory, has no room for the logits."""
        if lab.place.type == "cpu":
            free, where, remedy = shutil.disk_usage(lab.folder).free, f"the disk of {lab.folder}", "set paths.results elsewhere"
        else:
            free, where, remedy = torch.cuda.mem_get_info(lab.place)[0], place_label(lab.place), "use model.device=cpu"
        if free < self.logits.nbytes:
            asked = lab.of("evaluation").divergence_windows
            name = "evaluation.fidelity_windows" if asked is None else "evaluation.divergence_windows"
            raise InputError(
                f"{name}: the logits of {len(self.logits)} windows take {self.logits.nbytes / 1e9:.3g} GB, and {where} has "
                f"{free / 1e9:.3g} GB left; use fewer, or {remedy}"
            )


def divergence_windows(lab: Lab) -> int:
    """On how many of the first windows the next-token distribution is held to dense attention's."""
    evaluation = lab.of("evaluation")
    asked = evaluation.divergence_windows
    return evaluation.fidelity_windows if asked is None else asked


def measure_cell(lab: Lab, windows: Tensor, attachment: Attachment | FullAttachment | None, dense: Dense | None = None) -> Cell:
    """`attachment` None: dense attention. Fidelity is measured on the first windows; where `dense` is given, what the model says
    next is held to its logits on the windows that these are of, and what it would generate to its continuations.
    """
    model, how = lab.loaded.model, {"chunk_tokens": lab.of("graphs").chunk_tokens}
    observer = attachment.observer() if attachment else None
    observed = min(lab.of("evaluation").fidelity_windows, len(windows)) if attachment else 0
    logits = [dense.logits[index] for index in range(len(dense.logits))] if dense else []  # while the model is dense
    continuations = list(dense.continuations) if dense and dense.continuations and observed else []
    losses, divergences, counters = [], [], Counters()
    for start, stop in pairwise(sorted({0, observed, len(logits), len(windows)})):
        part = windows[start:stop]
        observers = (observer,) if start < observed else ()
        with attachment.attached(lab, observers) if attachment else nullcontext() as run:
            if start < len(logits):
                part_losses, part_divergences = window_divergences(model, part, logits[start:stop], **how)
                divergences += part_divergences
            else:
                part_losses = token_losses(model, part, **how)
            losses.append(part_losses)
            counters += run.counters if run else Counters()
    if attachment:
        attachment.check(lab, counters)
    with attachment.attached(lab, ()) if attachment and lab.questions else nullcontext():
        answered = scores(model, lab.questions, **how)
    generation = {}
    if continuations:
        with attachment.attached(lab, ()):
            generation = divergence(model, continuations, **how).metrics()
    of_tokens = torch.cat(losses)
    of_windows = of_tokens.mean(1).tolist()
    return Cell(
        loss=sum(of_windows) / len(of_windows),
        window_losses=of_windows,
        density=counters.density,
        sparse_density=counters.sparse_density,
        sparse_rows=counters.sparse_rows,
        fidelity=observer.metrics() if observer else {},
        scores=answered,
        generation=generation,
        counts=attachment.estimator.counts() if isinstance(attachment, Attachment) else {},
        layer_errors=list(observer.layers().items()) if observer else [],
        window_divergences=divergences,
        octave_losses=[(first, of.tolist()) for first, of in by_octave(of_tokens).items()],
    )


def divergence_rows(row: Row, divergences: Sequence[float], window_tokens: int) -> list[Row]:
    """The divergence on the windows where it was measured; of two or more with its error and Student's 95 % interval, since a
    bootstrap of few windows is too short.
    """
    if not divergences:
        return []
    rows = [replace(row, metric="kl_divergence", value=float(np.mean(divergences)), n=len(divergences) * window_tokens)]
    if len(divergences) < 2:
        return rows
    interval = mean_interval(divergences)
    ends = {"_low": interval.low, "_high": interval.high, "_error": standard_error(divergences)}
    return rows + [replace(row, metric=f"kl_divergence{end}", value=value, n=interval.n) for end, value in ends.items()]


def paired_error(losses: list[float], dense: list[float]) -> float:
    """Standard error of the loss increase, paired window by window; not a number for a single window."""
    return standard_error(np.subtract(losses, dense))


def standard_error(values: Sequence[float]) -> float:
    """Of a mean over windows; not a number for a single window."""
    return float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else float("nan")
