"""The graph builder: static INT8 Q·K graphs, one per scale pair and shape, built ahead as a bank.

These graphs are all that runs on the NPU (`devices` chooses it): the INT8 product, and with `selection=device` the top-k too.
"""

from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import GraphForm

__all__ = ["GraphBank", "GraphForm", "GraphShape"]
