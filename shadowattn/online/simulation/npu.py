"""A device described from what Intel's NPU compiler predicts of our graphs, beside a processor that was measured.

What the compiler does not say, the cost of a launch, is no number of the description: it is added as a range by who simulates.
"""

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from shadowattn.errors import InputError
from shadowattn.online.simulation.device import Device, Layer, Number

ESTIMATE = "compiler estimate"
_SOURCE = "least squares over rows of experiments.run +exp=npu_compile"


@dataclass(frozen=True)
class Line:
    """A time that grows with the work: `fixed_us` and `ns` of each unit. `error`: the mean relative error of the points."""

    fixed_us: float
    ns: float
    error: float

    @classmethod
    def through(cls, work: np.ndarray, us: np.ndarray) -> "Line":
        """By least squares of relative errors; neither part is negative. Raises `InputError` on fewer than two points."""
        if len(work) < 2:
            raise InputError(
                f"npu: expected at least two compiled graphs of different size, got {len(work)}; see +exp=npu_compile"
            )
        weights = 1 / us
        columns = np.stack([np.ones_like(work), work * 1e-3], 1)
        fixed, ns = np.linalg.lstsq(columns * weights[:, None], us * weights, rcond=None)[0]
        if fixed < 0:
            fixed, ns = 0.0, float((us * weights).sum() / (work * 1e-3 * weights).sum())
        found = fixed + 1e-3 * ns * work
        return cls(float(fixed), float(ns), float(np.abs(found / us - 1).mean()))

    def us(self, work: float) -> float:
        return self.fixed_us + 1e-3 * self.ns * work


def npu_device(platform: str, compiled: pd.DataFrame, measured: pd.DataFrame, layer: Layer, processor: str) -> Device:
    """NPU of `platform` and `processor`, that of `measured`: rows of `+exp=roofline` with stages of one `layer` in a prefill.

    `compiled`: rows of `+exp=npu_compile`; the estimate is a line through its graphs of the form `int8` of D 64, all models. The
    processor's stages were measured on all of its cores, one stage at a time, so that `cores` is 1: stages that run at once share
    them. Selection is from float16 scores, as the NPU returns them.
    """
    graphs = compiled[(compiled.platform == platform) & (compiled.part == "bank") & (compiled.method == "int8")]
    graphs = graphs[graphs.value.notna() & (graphs.head_dim == 64)]
    line = Line.through(graphs.macs.to_numpy(float), graphs.value.to_numpy(float))
    source = f"{_SOURCE}, mean error {line.error:.0%} over {len(graphs)} graphs"
    select, attend, dense = (processor_line(measured, layer, stage) for stage in ("select", "attend sparse", "attend dense"))
    of = f"{processor}: two lengths of experiments.run +exp=roofline, on all cores"
    return Device(
        name=f"Intel NPU {platform} beside {processor}",
        estimate_on="NPU",
        cores=Number(1.0, "measured", "the rates below are of all cores together, one stage at a time"),
        launch_us=Number(line.fixed_us, ESTIMATE, f"{source}; the cost of the launch itself is unknown and not in it"),
        estimate_ns=Number(line.ns, ESTIMATE, source),
        select_us=Number(select.fixed_us, "measured", of),
        select_ns=Number(select.ns, "measured", of),
        attend_us=Number(attend.fixed_us, "measured", of),
        attend_ns=Number(attend.ns, "measured", of),
        dense_ns=Number(dense.ns, "measured", of),
    )


def with_launch(device: Device, launch_us: float) -> Device:
    """The same where each launch takes so much longer, which is assumed."""
    kind = replace(device.launch_us, value=device.launch_us.value + launch_us)
    return replace(device, launch_us=kind)


def processor_line(measured: pd.DataFrame, layer: Layer, stage: str) -> Line:
    """Time of one head of `layer`, through the lengths at which rows of `+exp=roofline` have a stage of a prefill.

    Work: pairs of a row and a key that it sees for `select`, times the head dimension and the share that is kept for attention
    alone, times the head dimension for the `one task` of estimate, selection and attention.
    """
    rows = measured[
        (measured.phase == "prefill") & (measured.metric == "time") & (measured.batch == 1) & (measured.stage == stage)
    ]
    if len(rows) < 2:
        raise InputError(f"npu: expected the stage {stage!r} at two lengths in the rows of +exp=roofline, got {len(rows)}")
    pairs = rows.chunk_rows * rows.context_tokens - rows.chunk_rows * (rows.chunk_rows - 1) / 2
    each = {"select": 1.0, "attend sparse": rows.retention * layer.head_dim}.get(stage, float(layer.head_dim))
    return Line.through((each * pairs).to_numpy(float), rows.value.to_numpy(float) * 1e3 / layer.heads)
