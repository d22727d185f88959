"""Surgery on a whole decoder's graph, as passes of OpenVINO (`openvino.passes`).

Each is a `MatcherPass`: a `GraphRewrite` takes it beside others (`add_matcher`), a `Manager` takes it alone (`register_pass`).
`Rewrite` makes one `ModelPass` of several, and `rewritten` runs them over a graph. Each counts in `changed` what it changed.
"""

from collections.abc import Iterable

import openvino as ov
from openvino.passes import GraphRewrite, Manager, MatcherPass, ModelPass

from shadowattn.graphs.decoder.passes.last_token import LastTokenSlice
from shadowattn.graphs.decoder.passes.state import MakeStateful
from shadowattn.graphs.decoder.passes.weights import ReplaceWeights

__all__ = ["LastTokenSlice", "MakeStateful", "ReplaceWeights", "Rewrite", "rewritten"]


class Rewrite(ModelPass):
    """Passes of this package one after another over a whole graph, as one `ModelPass`; `changed` is the sum of theirs.

    Each in a `GraphRewrite` of its own: the nodes that one makes are then seen by the next.
    """

    def __init__(self, matchers: Iterable[MatcherPass]):
        super().__init__()
        self.matchers = list(matchers)

    @property
    def changed(self) -> int:
        """How many places of the graph were changed so far."""
        return sum(matcher.changed for matcher in self.matchers)

    def run_on_model(self, model: ov.Model) -> bool:
        """Whether anything was changed."""
        before = self.changed
        for matcher in self.matchers:
            rewrite = GraphRewrite()
            rewrite.add_matcher(matcher)
            rewrite.run_on_model(ov.Model(model))  # what a pass is given is the graph without its wrapper
        return self.changed > before


def rewritten(model: ov.Model, *matchers: MatcherPass) -> ov.Model:
    """The graph itself, after these passes. Raises `InputError` where one of them cannot do what it was asked for."""
    manager = Manager()
    manager.register_pass(Rewrite(matchers))
    manager.run_passes(model)
    for matcher in matchers:
        matcher.check()
    model.validate_nodes_and_infer_types()
    return model
