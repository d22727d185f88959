"""One bucket, one static OpenVINO model: Q·Kᵀ in INT8, and what may follow it on the device.

No 1/√D and no softmax: neither changes the order of one row's scores (section 2.2).

What makes the CPU plugin run the product in INT8 is the FakeQuantize on *both* inputs; without one it computes in float32 and
says nothing (`cpu.runs_in_int8` looks).
"""

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as op

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape
from shadowattn.types import Requant

# Symmetric: −127 … 127, as the authors clip. 255 levels make FakeQuantize's zero exact.
INT8_MAX = 127
_LEVELS = 2 * INT8_MAX + 1
INPUTS = ("static", "unit", "runtime", "int8")
# Below every score; what an NPU makes of it in 16 bits, −infinity or −65504, still is no larger than any score there.
MASKED = float(np.finfo(np.float32).min)
_MASKED_HALF = float(np.finfo(np.float16).min)
# What a step of the integer product is in the scores of `int8`: largest magnitudes are 1, so a score is at most D.
INT8_STEP = 1 / INT8_MAX**2


@dataclass(frozen=True)
class GraphForm:
    """What a graph takes in, and what it gives out.

    `inputs`: `static`, float32 with the bucket's scales built in, the paper's form; `unit`, int8 on the grid of the
    integers, one graph for all buckets and the fastest on a CPU; `runtime`, float32 with scales as inputs, one graph too;
    `int8`, int8 taken for −1 … 1 with scores in float16, the form for an NPU, one graph for all buckets.
    `requant`: scores as INT8 instead of floats. `mask`: keys after a row score lowest, and where rows are pooled so do
    the first (block of) keys that holds one of the block's own and all after it, which its list holds anyway; where the
    rows stand is an input.
    `pool`: the maximum over blocks of (rows, keys), after the mask. `indices`: the graph also selects, and returns the
    shape's `top_k` best (blocks of) keys of a (block of) row in falling order, ties to the lower index.
    """

    inputs: str = "static"
    requant: Requant | None = None
    mask: bool = False
    pool: tuple[int, int] = (1, 1)
    indices: bool = False

    def __post_init__(self):
        if self.inputs not in INPUTS:
            raise InputError(f"graphs.inputs: expected one of {', '.join(INPUTS)}, got {self.inputs!r}")
        if min(self.pool) < 1:
            raise InputError(f"graphs.pool: expected blocks of at least one row and one key, got {self.pool}")
        if (self.indices or self.pool != (1, 1)) and not self.mask:
            raise InputError("graphs: pooling and selection on the device need mask=True, or later keys would take part")

    @property
    def bakes_scales(self) -> bool:
        """Whether each scale pair needs a graph of its own."""
        return self.inputs == "static"

    @property
    def needs_multiplier(self) -> bool:
        """Whether the requantisation is an input: its multiplier depends on the bucket, and the bucket is not built in."""
        return self.requant is not None and self.requant.mode == "fixed_output" and not self.bakes_scales

    @property
    def score_dtype(self) -> type:
        """numpy's type of the output."""
        if self.indices:
            return np.int32
        if self.requant is not None:
            return np.int8
        return np.float16 if self.inputs == "int8" else np.float32

    def output_bytes(self, shape: GraphShape) -> int:
        """Of what a graph of this shape puts out."""
        rows, keys = shape.rows // self.pool[0], shape.top_k if self.indices else shape.keys // self.pool[1]
        return shape.heads * rows * keys * np.dtype(self.score_dtype).itemsize

    @property
    def takes_int8(self) -> bool:
        """Whether q and k are given as integers of 8 bits."""
        return self.inputs in ("unit", "int8")

    @property
    def score_steps(self) -> float:
        """A score of 1 in steps of the integer product, of forms that build no scales in."""
        return float(INT8_MAX**2) if self.inputs == "int8" else 1.0

    @property
    def masked(self) -> float:
        """The score of keys that a row does not see."""
        return _MASKED_HALF if self.inputs == "int8" else MASKED


FLOAT = GraphForm()


def inputs_for(setting: str, device: str) -> str:
    """The inputs that a setting, `auto` or one of `INPUTS`, stands for on a device as OpenVINO names it: int8 on an NPU."""
    if setting != "auto":
        return setting
    return "int8" if device.split(".")[0] == "NPU" else "static"


def form_of(content: dict) -> GraphForm:
    """The form that `asdict` and JSON made `content` of."""
    requant = content["requant"]
    return GraphForm(**content | {"pool": tuple(content["pool"]), "requant": Requant(**requant) if requant else None})


def estimation_graph(
    shape: GraphShape, form: GraphForm = FLOAT, q_scale: float = 1.0, k_scale: float = 1.0, *, whole: bool = False
) -> ov.Model:
    """The static graph of one shape and form; `q_scale` and `k_scale` matter where the form builds them in.

    Inputs, by name, G = shape.kv_heads and M = group · rows: `q` [1, G, M, D] and `k` [1, G, keys, D], float32, or int8 for
    `unit` and `int8`; for runtime scales `q_steps` [1, G, M, 1] and `k_steps` [1, G, 1, 1], float32, the inverse scales;
    `multiplier` [1, G, M, 1], M pooled, where the form needs it; for a mask `positions` int32 [2], of the first row and of the
    last: rows past the last count as the last. Output `scores` [1, G, M, keys], float32 (the integer product, for static scales
    times q_scale · k_scale), float16 (for `int8`, the product / 127², rounded) or int8; or int32 `indices` [1, G, M, top_k]; M
    and keys divided by the pool, and heads by themselves again where the graph pools or selects. Inputs beyond ±127 steps are
    clipped.

    `whole`: static scales multiply the product instead of its factors, which then are whole numbers. The same scores, but a
    product in float32 is exact, too; one in 16-bit floats would overflow.
    """
    _check(shape, form)
    batch, rows = shape.kv_heads, shape.group * shape.rows
    dtype = ov.Type.i8 if form.takes_int8 else ov.Type.f32
    inputs = [
        named_input("q", [1, batch, rows, shape.head_dim], dtype),
        named_input("k", [1, batch, shape.keys, shape.head_dim], dtype),
    ]
    q, k = inputs
    step = 1.0
    if form.inputs == "static":
        q, k, step = quantised(q, q_scale, whole=whole), quantised(k, k_scale, whole=whole), q_scale * k_scale
    elif form.inputs == "unit":
        q, k = (quantised(op.convert(x, ov.Type.f32), 1.0) for x in (q, k))
    elif form.inputs == "int8":
        largest = INT8_MAX if whole else 1.0
        q, k = (quantised(op.convert(x, ov.Type.f32), 1.0, largest=largest) for x in (q, k))
        step = INT8_STEP
    else:
        steps = [named_input("q_steps", [1, batch, rows, 1], ov.Type.f32), named_input("k_steps", [1, batch, 1, 1], ov.Type.f32)]
        inputs += steps
        q, k = (quantised(op.multiply(x, inverse), 1.0) for x, inverse in zip((q, k), steps, strict=True))
    out = op.matmul(q, k, transpose_a=False, transpose_b=True)
    if whole and step != 1.0:
        # Rounding changes nothing here, and keeps the plugin from moving the step in front of the product.
        out = op.multiply(op.round(out, "half_to_even"), op.constant(np.float32(step)))
    if form.mask:
        inputs.append(named_input("positions", [2], ov.Type.i32))
        out = _mask(out, inputs[-1], shape, form)
    lead = [batch, rows]
    if shape.group > 1 and (form.pool != (1, 1) or form.indices):
        # By head again: the CPU plugin spreads pooling and TopK over that axis alone.
        lead = [shape.heads, shape.rows]
        out = op.reshape(out, op.constant(np.int64([1, *lead, shape.keys])), False)
    if form.pool != (1, 1):
        out = op.max_pool(out, list(form.pool), [1, 1], [0, 0], [0, 0], list(form.pool), "floor", "explicit").output(0)
    if form.needs_multiplier:
        inputs.append(named_input("multiplier", [1, lead[0], lead[1] // form.pool[0], 1], ov.Type.f32))
        out = _requantise(op.multiply(out, inputs[-1]), 1.0 / step)
    elif form.requant is not None:
        out = _requantise(out, form.requant.multiplier(q_scale, k_scale) / step)
    if form.indices:
        # An NPU's compiler fails on TopK directly behind a pooling, and on that of many keys for some numbers of heads; of rows
        # without heads it takes both. In this axis the CPU plugin spreads them over threads.
        rows, keys = lead[1] // form.pool[0], shape.keys // form.pool[1]
        out = op.reshape(out, op.constant(np.int64([1, lead[0] * rows, 1, keys])), False)
        out = op.topk(out, op.constant(np.int64(shape.top_k)), -1, "max", "value", ov.Type.i32, stable=True).output(1)
        out = op.reshape(out, op.constant(np.int64([1, lead[0], rows, shape.top_k])), False)
    elif form.score_dtype is np.float16:
        out = op.convert(out, ov.Type.f16)
    return _model(out, inputs, "indices" if form.indices else "scores")


def _check(shape: GraphShape, form: GraphForm) -> None:
    rows, keys = form.pool
    if shape.rows % rows or shape.keys % keys:
        raise InputError(f"graphs.pool: expected blocks that divide {shape.rows} rows and {shape.keys} keys, got {form.pool}")
    most = shape.keys // keys
    if form.indices and not 0 < shape.top_k <= most:
        raise InputError(f"top_k: expected 1 … {most}, as many as the graph has (blocks of) keys, got {shape.top_k}")
    if not form.indices and shape.top_k:
        raise InputError(f"top_k: {shape.top_k} indices are asked of a form that returns scores; set indices=True")


def named_input(name: str, shape: list[int], dtype: ov.Type):
    """A parameter with a name of its own."""
    parameter = op.parameter(shape, dtype)
    parameter.output(0).set_names({name})
    return parameter


def quantised(x, scale: float, *, whole: bool = False, largest: float | None = None):
    """x clipped to ±127 steps and rounded to whole ones: what makes a plugin take the product for one of INT8.

    FakeQuantize rounds x / scale + 127 half to even, so a value midway between two steps goes to the odd one. `largest`: what 127
    steps become, where that is another value than they are.
    """
    ends = [op.constant(np.float32([sign * INT8_MAX * scale])) for sign in (-1, 1)]
    largest = INT8_MAX if whole else largest
    output_ends = ends if largest is None else [op.constant(np.float32([sign * largest])) for sign in (-1, 1)]
    steps = op.fake_quantize(x, *ends, *output_ends, _LEVELS)
    return op.round(steps, "half_to_even") if whole else steps  # FakeQuantize's own are off by a few units in the last place


def _requantise(x, multiplier: float):
    """INT8 of x · multiplier, half to even, clipped to −128 … 127. The CPU plugin fuses it into the product."""
    low, high = (op.constant(np.float32([bound / multiplier])) for bound in (-128, 127))
    steps = op.fake_quantize(x, low, high, op.constant(np.float32([-128])), op.constant(np.float32([127])), 256)
    return op.convert(steps, ov.Type.i8)


def _mask(scores, positions, shape: GraphShape, form: GraphForm):
    """As `GraphForm.mask` says. In integers: in 16-bit floats, positions beyond 2048 would be rounded."""
    row_block, key_block = form.pool
    first, last = op.split(positions, op.constant(np.int64(0)), 2).outputs()
    row = np.arange(shape.rows, dtype=np.int32) // row_block * row_block
    rows = op.constant(np.tile(row, shape.group)[:, None])
    keys = op.constant(np.arange(shape.keys, dtype=np.int32)[None])
    row_positions = op.minimum(op.add(rows, first), last)  # of each row, or of the first row of its block
    if row_block == 1:
        visible = op.less_equal(keys, row_positions)
    elif key_block == 1:
        visible = op.less(keys, row_positions)
    else:
        size = op.constant(np.int32(key_block))
        visible = op.less(keys, op.multiply(op.divide(row_positions, size), size))
    return op.select(visible, scores, op.constant(np.float32(form.masked)))


def _model(out, inputs: list, name: str) -> ov.Model:
    result = op.result(out)
    model = ov.Model([result], inputs, "estimate")
    model.output(0).set_names({name})
    # OpenVINO numbers nodes per process; fixed names keep a saved graph byte-identical and its compile cache warm.
    for index, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"n{index}")
    return model
