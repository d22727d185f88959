"""shadowAttn: dynamic sparse attention for NPU-centric LLM inference (arXiv 2508.16703).

Names are imported when they are first used: the command line answers a typing error before torch is loaded.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadowattn.models.patch import attach
    from shadowattn.online.check_estimator import check_estimator
    from shadowattn.online.path import sparse_attention

__all__ = ["attach", "check_estimator", "sparse_attention"]

# Where each public name is defined; one line here and in the two lists above adds another.
_MODULES = {
    "attach": "shadowattn.models.patch",
    "check_estimator": "shadowattn.online.check_estimator",
    "sparse_attention": "shadowattn.online.path",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
