"""A device description from a latency profile: the least squares of what the description can say, and how far off it is."""

from dataclasses import dataclass

import numpy as np
import pandas as pd
from scipy.optimize import nnls

from shadowattn.errors import InputError
from shadowattn.online.latency import Latency, LatencyProfile
from shadowattn.online.simulation.device import ChunkShape, Device, Layer, Number


@dataclass(frozen=True)
class Fitted:
    """A description, and the median relative error of each stage over the profile's points."""

    device: Device
    errors: dict[str, float]


def fit_device(profile: LatencyProfile, layer: Layer, *, name: str, cores: int) -> Fitted:
    """What of `profile` a description holds: of each stage a fixed part and what grows with its work, none negative.

    Relative errors are what is least, so that short launches count as much as long ones. Heads that keep every key have
    nothing to rank and are left out of selection's. Dense costs are not in a profile and stay unknown. Raises `InputError` on
    too few points, and on a profile of lists with a least budget, whose lengths do not follow from retentions.
    """
    if int(profile.binding.get("min_budget", 1)) > 1:
        raise InputError(
            f"latency profile: expected lists whose lengths follow from retentions, got one of min_budget="
            f"{profile.binding['min_budget']}; measure it with selection.min_budget=1"
        )
    rows = int(profile.binding["rows"])

    def estimate(point: Latency) -> dict[str, float]:
        scores = point.heads * rows  # the whole rectangle of the graph that served it, the part with keys copied
        return {"estimate_ns": scores * (point.capacity or point.keys) * layer.head_dim, "copy_ns": scores * point.keys}

    def select(point: Latency) -> dict[str, float]:
        pairs = ChunkShape(rows, point.keys).pairs
        return {"select_ns": pairs, "list_ns": point.retention * pairs}

    def attend(point: Latency) -> dict[str, float]:
        kept = point.retention * ChunkShape(rows, point.keys).pairs
        return {"attend_ns": kept * layer.head_dim, "read_ns": 2 * point.keys * layer.head_dim}

    numbers, errors = {}, {}
    for stage, fixed, work_of in (
        ("estimate", "launch_us", estimate),
        ("select", "select_us", select),
        ("attend", "attend_us", attend),
    ):
        points = [p for p in profile.points if p.stage == stage and (stage != "select" or p.retention < 1)]
        if len({point.keys for point in points}) < 2:
            raise InputError(f"latency profile: expected {stage} at several lengths to fit a device, got {len(points)} points")
        work = pd.DataFrame([{fixed: 1.0} | {unit: 1e-3 * value for unit, value in work_of(point).items()} for point in points])
        values, errors[stage] = _fit(work.to_numpy(), np.array([point.mean_us for point in points]))
        source = f"least squares over this machine's latency profile, median error of {stage} {errors[stage]:.1%}"
        numbers |= {column: Number(float(value), "fitted", source) for column, value in zip(work, values, strict=True)}

    core_count = Number(float(cores), "measured", "the processor's cores")
    return Fitted(Device(name=name, estimate_on="CPU", cores=core_count, **numbers), errors)


def _fit(work: np.ndarray, took: np.ndarray) -> tuple[np.ndarray, float]:
    """(values, median relative error): the least relative squares of `work` [points, parts] × values, none negative."""
    relative = work / took[:, None]
    size = np.linalg.norm(relative, axis=0)  # parts differ by orders of magnitude
    values = nnls(relative / size, np.ones_like(took))[0] / size
    return values, float(np.median(np.abs(relative @ values - 1)))
