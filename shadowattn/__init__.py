"""shadowAttn: dynamic sparse attention for NPU-centric LLM inference (arXiv 2508.16703)."""

from shadowattn.models.patch import attach
from shadowattn.online.path import sparse_attention

__all__ = ["attach", "sparse_attention"]
