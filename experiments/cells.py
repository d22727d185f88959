"""One method at one retention, measured: loss on every window, fidelity on the first few, accuracy on the task's questions."""

from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from experiments.lab import Lab, MethodSettings
from experiments.parts import build
from shadowattn.evaluation.fidelity import Fidelity
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.evaluation.tasks import exact_match_rate
from shadowattn.method import attach
from shadowattn.online.attention import Counters
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.selection import Rule
from shadowattn.types import RetentionProfile


@dataclass(frozen=True)
class Cell:
    """What one method measured at one retention. `fidelity` is empty where nothing ran sparse."""

    loss: float
    window_losses: list[float]
    density: float
    sparse_density: float
    sparse_rows: int
    fidelity: dict[str, float]
    launches: int
    clipped_heads: int
    accuracy: float | None  # of the run's task; None where it has no questions


@dataclass(frozen=True)
class Attachment:
    """What a cell attaches to the model."""

    profile: RetentionProfile
    estimator: Estimator
    rule: Rule = field(default_factory=Rule)


def attachment(lab: Lab, method: MethodSettings, profile: RetentionProfile) -> Attachment:
    """A method with one profile, its estimator built with the bank or the grid that it needs."""
    if method.on_device:
        return Attachment(profile, Int8Device(lab.banks.selecting(method, profile)), method.rule)
    return Attachment(profile, estimator_of(lab, method, profile), method.rule)


def estimator_of(lab: Lab, method: MethodSettings, profile: RetentionProfile | None = None) -> Estimator:
    """A method's estimator, whose selection is made on the host."""
    built = {"bank": lab.banks.bank} if "bank" in method.needs else {}
    built |= {"grid": profile.scales if profile else lab.offline.grid} if "grid" in method.needs else {}
    return build(method.estimator, **built)


def measure_cell(lab: Lab, windows: Tensor, attached: Attachment | None) -> Cell:
    """`attached` None: dense attention."""
    model, chunk_tokens = lab.loaded.model, lab.of("graphs").chunk_tokens
    fidelity = Fidelity()
    observed = lab.of("evaluation").fidelity_windows if attached else 0
    limit = lab.dense_above(attached.rule.query_block) if attached else 0.0

    def context(observers: tuple):
        if attached is None:
            return nullcontext()
        options = {"pipeline": lab.pipeline} if "pipeline" in lab.needs else {}
        options |= {"decode": lab.of("decode")} if "decode" in lab.needs else {}
        return attach(
            model,
            attached.profile,
            None,
            estimator=attached.estimator,
            chunk_tokens=chunk_tokens,
            kernel=lab.kernel,
            dense_above=limit,
            query_block=attached.rule.query_block,
            block_score=attached.rule.block_score,
            sinks=attached.rule.sinks,
            recent=attached.rule.recent,
            observers=observers,
            **options,
        )

    losses, counters = [], Counters()
    for part, observers in ((windows[:observed], (fidelity,)), (windows[observed:], ())):
        if len(part):
            with context(observers) as sparse:
                losses += window_losses(model, part, chunk_tokens=chunk_tokens).tolist()
                counters += sparse.counters if sparse else Counters()
    accuracy = None
    if lab.questions:
        with context(()) as sparse:
            accuracy = exact_match_rate(model, list(lab.questions), chunk_tokens=chunk_tokens)
    expected = attached is not None and any(value < limit for layer in attached.profile.retention for value in layer)
    if expected != bool(counters.sparse_rows):
        raise RuntimeError(f"the sparse path ran on {counters.sparse_rows} head rows, which its profile does not explain")
    return Cell(
        loss=sum(losses) / len(losses),
        window_losses=losses,
        density=counters.density,
        sparse_density=counters.sparse_density,
        sparse_rows=counters.sparse_rows,
        fidelity=fidelity.metrics(),
        launches=attached.estimator.launched if attached else 0,
        clipped_heads=attached.estimator.clipped if attached else 0,
        accuracy=accuracy,
    )


def paired_error(losses: list[float], dense: list[float]) -> float:
    """Standard error of the loss increase, paired window by window; not a number for a single window."""
    increases = np.subtract(losses, dense)
    return float(increases.std(ddof=1) / len(increases) ** 0.5) if len(increases) > 1 else float("nan")
