"""Weights of a graph from elsewhere: a file of another format, a fine-tuned copy."""

from collections.abc import Mapping

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.passes import Matcher, MatcherPass, WrapType
from openvino.utils import replace_node

from shadowattn.errors import InputError


class ReplaceWeights(MatcherPass):
    """Puts `weights`, arrays by the names of constants, in their places. The shapes and types stay.

    Precondition: a name is that of one constant. An array has the constant's shape and type. For a type that numpy lacks
    (bfloat16, INT4, UINT4 and others of less than a byte) it is the packed values as uint8, as many bytes as the constant has: of
    two 4-bit values in a byte the first is the lower half. Raises `InputError` at `check` on names that no constant has, and on
    arrays that do not fit; the graph is then of no use.
    """

    def __init__(self, weights: Mapping[str, np.ndarray]):
        super().__init__()
        self.changed = 0
        self._weights, self._seen, self._wrong = dict(weights), {}, []
        pattern = WrapType("opset1.Constant", lambda output: output.get_node().get_friendly_name() in self._weights)
        self.register_matcher(Matcher(pattern, "ReplaceWeights"), self._replace)

    def check(self) -> None:
        """Raises `InputError` on what could not be replaced."""
        wrong = list(self._wrong)
        if missing := sorted(set(self._weights) - set(self._seen)):
            wrong.append(f"{', '.join(missing)}: the graph has no constant of that name")
        wrong += [f"{name}: {count} constants of that name" for name, count in self._seen.items() if count > 1]
        if wrong:
            raise InputError(f"ReplaceWeights: {'; '.join(wrong)}; the names are those of Node.get_friendly_name")

    def _replace(self, matcher: Matcher) -> bool:
        old = matcher.get_match_root()
        name = old.get_friendly_name()
        self._seen[name] = self._seen.get(name, 0) + 1
        tensor = self._tensor(old, np.ascontiguousarray(self._weights[name]))
        if tensor is None:
            return False
        new = op.constant(tensor, shared_memory=False)
        new.set_friendly_name(name)
        replace_node(old, new)
        self.changed += 1
        return True

    def _tensor(self, old: ov.Node, array: np.ndarray) -> ov.Tensor | None:
        name, kind, shape = old.get_friendly_name(), old.get_output_element_type(0), old.get_output_shape(0)
        if _is_packed(kind):
            size = -(-int(np.prod(shape)) * kind.bitwidth // 8)
            if array.dtype == np.uint8 and array.nbytes == size:
                return ov.Tensor(array.reshape(-1), shape, kind)
            expected = f"{size} bytes as uint8, {kind.get_type_name()} {list(shape)} packed"
        else:
            if array.dtype == kind.to_dtype() and array.shape == tuple(shape):
                return ov.Tensor(array)
            expected = f"{kind.get_type_name()} {list(shape)}"
        self._wrong.append(f"{name}: expected {expected}, got {array.dtype} {list(array.shape)}")
        return None


def _is_packed(kind: ov.Type) -> bool:
    return kind.bitwidth < 8 or kind == ov.Type.bf16
