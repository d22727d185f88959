"""Keys and values that stay in the graph from one call to the next."""

from collections.abc import Mapping

import numpy as np
import openvino as ov
from openvino import opset13 as op
from openvino.op import assign, read_value
from openvino.op.util import Variable, VariableInfo
from openvino.passes import Matcher, MatcherPass, WrapType

from shadowattn.errors import InputError


class MakeStateful(MatcherPass):
    """Makes a state of every pair of an input and the output that is to come in its place at the next call.

    `pairs`: names of outputs by names of inputs, such as `whole.cache_names`; the state's name is the input's and then the
    output's, without anything between them. A state is empty at first (every dimension of the input that is not static counts as
    none, the first as one), and again after `reset_state`. Precondition: an input and its output have the same type, and shapes
    that one tensor can have. Raises `InputError` at `check` on names that the graph lacks. OpenVINO has a pass of this name too
    (`openvino.passes.MakeStateful`); this one says what it cannot do, and counts.
    """

    def __init__(self, model: ov.Model, pairs: Mapping[str, str]):
        super().__init__()
        self.changed = 0
        self._model, self._pairs, self._done, self._wrong = model, dict(pairs), set(), []
        pattern = WrapType("opset1.Parameter", lambda output: bool(output.get_names() & self._pairs.keys()))
        self.register_matcher(Matcher(pattern, "MakeStateful"), self._make)

    def check(self) -> None:
        """Raises `InputError` on pairs of which no state was made."""
        wrong = list(self._wrong)
        if missing := sorted(set(self._pairs) - self._done):
            wrong.append(f"{', '.join(missing)}: the graph has no input of that name")
        if wrong:
            raise InputError(f"MakeStateful: {'; '.join(wrong)}; name inputs and outputs as the graph does")

    def _make(self, matcher: Matcher) -> bool:
        given = matcher.get_match_root()
        (name,) = given.output(0).get_names() & self._pairs.keys()
        self._done.add(name)
        result = next((one for one in self._model.results if self._pairs[name] in one.input_value(0).get_names()), None)
        if result is None:
            self._wrong.append(f"{self._pairs[name]}: the graph has no output of that name")
            return False
        value, shape, kind = result.input_value(0), given.get_partial_shape(), given.get_element_type()
        if value.get_element_type() != kind or not value.get_partial_shape().compatible(shape):
            self._wrong.append(
                f"{name}: expected {kind.get_type_name()} {shape} at {self._pairs[name]}, got "
                f"{value.get_element_type().get_type_name()} {value.get_partial_shape()}"
            )
            return False
        empty = [dim.get_length() if dim.is_static else int(at == 0) for at, dim in enumerate(shape)]
        first = op.convert(op.constant(np.zeros(empty, np.float32)), kind.get_type_name())  # numpy has no bfloat16
        info = VariableInfo()
        info.data_shape, info.data_type, info.variable_id = shape, kind, name + self._pairs[name]
        variable = Variable(info)
        read = read_value(first, variable)
        read.set_friendly_name(name)
        for port in given.output(0).get_target_inputs():
            port.replace_source_output(read.output(0))
        self._model.add_variables([variable])
        # `assign` takes a node, not one of its outputs; a conversion to the same type is none.
        node = value.get_node() if value.get_node().get_output_size() == 1 else op.convert(value, kind.get_type_name())
        self._model.add_sinks([assign(node, variable)])
        self._model.remove_result(result)
        self._model.remove_parameter(given)
        self.changed += 1
        return True
