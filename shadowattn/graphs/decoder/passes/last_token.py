"""The output head for the last token alone."""

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.passes import Matcher, MatcherPass, WrapType

from shadowattn.errors import InputError

_END = np.iinfo(np.int64).max
# What may stand between the head's product and the result. With constants that are the same for all tokens it acts on each
# token alone.
_BEHIND = frozenset({"Add", "Convert", "Divide", "Multiply", "Tanh"})


class LastTokenSlice(MatcherPass):
    """Slices the head's input [B, T, E] to its last token, so that the logits are [B, 1, V]. A second time it changes nothing.

    The head is the product whose consumers lead to a result of the graph through elementwise nodes alone, whose other inputs are
    constants that are the same for all tokens (a bias, a soft cap, a conversion). Precondition: it multiplies a tensor of three
    dimensions, not transposed, by weights, however they are made (a constant of its own, the embedding's, or compressed values
    and their scales). Logits of a chunk's other tokens are lost: no graph that checks drafts or measures a loss can do with it.
    """

    def __init__(self):
        super().__init__()
        self.changed = 0
        self._found = 0
        pattern = WrapType("opset1.MatMul", _is_head)
        self.register_matcher(Matcher(pattern, "LastTokenSlice"), self._slice)

    def check(self) -> None:
        """Raises `InputError` where the graph has no head."""
        if not self._found:
            raise InputError(
                "LastTokenSlice: expected a product [B, T, E] × weights that leads to a result through elementwise nodes with "
                "constants that are the same for all tokens, found none; the graph has no output head, transposes its input, or "
                "adds to each token a value of its own"
            )

    def _slice(self, matcher: Matcher) -> bool:
        self._found += 1
        product = matcher.get_match_root()
        hidden = product.input_value(0)
        if _is_sliced(hidden):
            return False
        last = op.slice(hidden, *(op.constant(np.int64([value])) for value in (-1, _END, 1, 1)))
        last.set_friendly_name(f"{product.get_friendly_name()}/last_token")
        product.input(0).replace_source_output(last.output(0))
        self.changed += 1
        return True


def _is_head(output: ov.Output) -> bool:
    product = output.get_node()
    if product.get_attributes()["transpose_a"] or product.input_value(0).get_partial_shape().rank != ov.Dimension(3):
        return False
    if not _is_made_of_constants(product.input_value(1).get_node()):
        return False
    ahead = [product]
    while ahead:
        consumers = [port for port in ahead.pop().output(0).get_target_inputs() if port.get_node().get_type_name() != "Result"]
        if not all(_acts_on_each_token(port) for port in consumers):
            return False
        ahead += [port.get_node() for port in consumers]
    return True


def _acts_on_each_token(port: ov.Input) -> bool:
    """Whether the node of this input does the same to every token of it."""
    node = port.get_node()
    others = [value for place, value in enumerate(node.input_values()) if place != port.get_index()]
    return node.get_type_name() in _BEHIND and all(_is_one_for_all_tokens(value) for value in others)


def _is_one_for_all_tokens(value: ov.Output) -> bool:
    shape = value.get_partial_shape()
    return (
        _is_made_of_constants(value.get_node())
        and shape.is_static
        and len(shape) <= 3
        and (len(shape) < 2 or shape[len(shape) - 2].get_length() == 1)
    )


def _is_made_of_constants(node: ov.Node) -> bool:
    """Whether no input of the graph goes into it."""
    ahead = [node]
    while ahead:
        one = ahead.pop()
        if one.get_type_name() in ("Parameter", "ReadValue"):
            return False
        ahead += [value.get_node() for value in one.input_values()]
    return True


def _is_sliced(hidden: ov.Output) -> bool:
    """Whether it is one token by its shape, or by a slice like ours, also of a graph that was saved and read."""
    tokens = hidden.get_partial_shape()[1]
    if tokens.is_static:
        return tokens.get_length() == 1
    node = hidden.get_node()
    if node.get_type_name() != "Slice" or node.get_input_size() != 5:
        return False
    constants = [value.get_node() for value in node.input_values()[1:]]
    if any(one.get_type_name() != "Constant" for one in constants):
        return False
    start, stop, _, axis = (one.get_data().tolist() for one in constants)
    return (start, axis) == ([-1], [1]) and stop[0] >= 2**31 - 1
