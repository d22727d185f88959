"""One core for all graphs."""

import ctypes
import gc
from pathlib import Path

from shadowattn import Engine
from shadowattn.graphs.core import core
from tests.tiny import tiny_model


def signal_stack() -> bytes:
    """Where this thread handles signals, as the system describes it."""
    described = ctypes.create_string_buffer(64)
    assert ctypes.CDLL(None).sigaltstack(None, described) == 0
    return described.raw


def test_graphs_that_end_in_the_order_of_their_beginning_leave_the_stack_of_signals_in_place():
    assert "CPU" in core().available_devices  # its plugin is loaded
    before, engines = signal_stack(), []
    for _ in range(2):
        engines.append(Engine(tiny_model(), chunk_tokens=16))
        engines[-1].forward(engines[-1].cache(), [1, 2])
    while engines:
        engines.pop(0)
        gc.collect()
    assert signal_stack() == before


def test_no_other_module_makes_a_core():
    root = Path(__file__).parents[2]
    modules = [path for folder in ("shadowattn", "experiments", "tests") for path in (root / folder).rglob("*.py")]
    makers = [path for path in modules if "Core()" in path.read_text()]
    assert makers == [root / "shadowattn" / "graphs" / "core.py", Path(__file__)]
