"""How graphs are compiled for OpenVINO's CPU device so that their integers are right, and whether they then run in INT8."""

from functools import cache

import numpy as np
import openvino as ov
from openvino import opset13 as op

from shadowattn.graphs.core import core
from shadowattn.graphs.estimation import INT8_MAX, quantised

# Long enough for a sum of pairs to leave 16 bits.
_DIM = 64


def cpu_hints() -> dict[str, str | bool]:
    """Exact integer products: in INT8 where this processor's are, else in float32, whose sums of integers are exact, too.

    Without the first hint the CPU plugin would round scores to bfloat16 on processors that have it.
    """
    hints = {"INFERENCE_PRECISION_HINT": "f32"}
    return hints if multiplies_exactly() else hints | {"LP_TRANSFORMS_MODE": False}


@cache
def multiplies_exactly() -> bool:
    """Whether INT8 products of the CPU plugin are exact on this processor: the largest integers, multiplied once.

    Without VNNI they are not. Pairs of products are added in 16 bits there, which saturate.
    """
    parameters = [op.parameter([1, 1, 16, _DIM], ov.Type.f32) for _ in range(2)]
    product = op.matmul(*(quantised(x, 1.0) for x in parameters), False, True)
    model = core().compile_model(ov.Model([op.result(product)], parameters), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    largest = np.full((1, 1, 16, _DIM), INT8_MAX, np.float32)
    products = [model([a * largest, b * largest])[0] for a, b in ((1, 1), (1, -1), (-1, 1), (-1, -1))]
    expected = _DIM * INT8_MAX**2
    return all((np.abs(scores) == expected).all() for scores in products)


def multiplies_in_bfloat16() -> bool:
    """Whether the CPU plugin has products in bfloat16 on this processor; elsewhere it would multiply in float32, unsaid."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def runs_in_int8(compiled: ov.CompiledModel) -> bool:
    """Whether the compiled product really is an INT8 primitive, read from the runtime model.

    Meaningful for OpenVINO's CPU plugin, which names its primitives; others leave the name out, and the answer is False.
    """
    for node in compiled.get_runtime_model().get_ordered_ops():
        info = node.get_rt_info()
        if "layerType" in info and info["layerType"].astype(str) == "MatMul":
            types = {value.get_element_type().get_type_name() for value in node.inputs()}
            return info["primitiveType"].astype(str).lower().endswith("_i8") and types <= {"i8", "u8"}
    return False
