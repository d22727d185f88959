"""shadowAttn: dynamic sparse attention for NPU-centric LLM inference (arXiv 2508.16703).

Names are imported when they are first used: the command line answers a typing error before torch is loaded.
"""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadowattn.calibration import Calibration, calibrate
    from shadowattn.engine.engine import Engine
    from shadowattn.method import Method, attach
    from shadowattn.online.check_estimator import check_estimator
    from shadowattn.online.chunk import Chunk
    from shadowattn.online.estimators import Estimator
    from shadowattn.online.functional import sparse_attention
    from shadowattn.runs import Run, load_run

__all__ = [
    "Calibration",
    "Chunk",
    "Engine",
    "Estimator",
    "Method",
    "Run",
    "__version__",
    "attach",
    "calibrate",
    "check_estimator",
    "load_run",
    "sparse_attention",
]

# Where each public name is defined; one line here and in the two lists above adds another.
_MODULES = {
    "Calibration": "shadowattn.calibration",
    "Chunk": "shadowattn.online.chunk",
    "Engine": "shadowattn.engine.engine",
    "Estimator": "shadowattn.online.estimators",
    "Method": "shadowattn.method",
    "Run": "shadowattn.runs",
    "attach": "shadowattn.method",
    "calibrate": "shadowattn.calibration",
    "check_estimator": "shadowattn.online.check_estimator",
    "load_run": "shadowattn.runs",
    "sparse_attention": "shadowattn.online.functional",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return version("shadowattn")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
