"""A device description from a latency profile: the least squares of what the description can say, and how far off it is."""

from dataclasses import dataclass

import numpy as np

from shadowattn.errors import InputError
from shadowattn.online.latency import Latency, LatencyProfile
from shadowattn.online.simulation.device import ChunkShape, Device, Layer, Number


@dataclass(frozen=True)
class Fitted:
    """A description, and the median relative error of each stage over the profile's points."""

    device: Device
    errors: dict[str, float]


def fit_device(profile: LatencyProfile, layer: Layer, *, name: str, cores: int) -> Fitted:
    """What of `profile` a description holds: of each stage a fixed part and one that grows with its work, neither negative.

    Relative errors are what is least, so that short launches count as much as long ones. Dense costs are not in a profile; they are
    set to 0 and `methods.full` must not be asked of such a device. Raises `InputError` on a profile with too few points.
    """
    rows = int(profile.binding["rows"])

    def products(point: Latency) -> float:  # the whole rectangle of the graph that served it
        return point.heads * rows * (point.capacity or point.keys) * layer.head_dim

    def scores(point: Latency) -> float:
        return ChunkShape(rows, point.keys).pairs

    def kept(point: Latency) -> float:
        return point.retention * ChunkShape(rows, point.keys).pairs * layer.head_dim

    fixed, slope, errors = {}, {}, {}
    for stage, work_of in (("estimate", products), ("select", scores), ("attend", kept)):
        points = [point for point in profile.points if point.stage == stage]
        if len({work_of(point) for point in points}) < 2:
            raise InputError(f"latency profile: expected {stage} at several lengths to fit a device, got {len(points)} points")
        fixed[stage], slope[stage], errors[stage] = _line([(work_of(p), p.median_us) for p in points])

    def number(value: float, stage: str) -> Number:
        source = f"least squares over this machine's latency profile, median error of {stage} {errors[stage]:.1%}"
        return Number(float(value), "fitted", source)

    unknown = Number(0.0, "assumed", "not in a latency profile")
    return Fitted(
        Device(
            name=name,
            estimate_on="CPU",
            cores=Number(float(cores), "measured", "the processor's cores"),
            launch_us=number(fixed["estimate"], "estimate"),
            estimate_ns=number(slope["estimate"] * 1e3, "estimate"),
            select_us=number(fixed["select"], "select"),
            select_ns=number(slope["select"] * 1e3, "select"),
            attend_us=number(fixed["attend"], "attend"),
            attend_ns=number(slope["attend"] * 1e3, "attend"),
            dense_ns=unknown,
            score_ns=unknown,
        ),
        errors,
    )


def _line(points: list[tuple[float, float]]) -> tuple[float, float, float]:
    """(fixed, slope, median relative error) of the line with the least relative squares, neither part negative."""
    x, y = np.array(points, dtype=np.float64).T
    fixed, slope = np.linalg.lstsq(np.stack([1 / y, x / y], 1), np.ones_like(y), rcond=None)[0]
    if fixed < 0:
        fixed, slope = 0.0, float((x / y).sum() / ((x / y) ** 2).sum())
    elif slope < 0:
        fixed, slope = float((1 / y).sum() / ((1 / y) ** 2).sum()), 0.0
    return float(fixed), float(slope), float(np.median(np.abs((fixed + slope * x) / y - 1)))
