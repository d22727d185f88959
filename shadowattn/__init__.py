"""shadowAttn: dynamic sparse attention for NPU-centric LLM inference (arXiv 2508.16703)."""

from shadowattn.models.patch import attach
from shadowattn.online.check_estimator import check_estimator
from shadowattn.online.path import sparse_attention

__all__ = ["attach", "check_estimator", "sparse_attention"]
