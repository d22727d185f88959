"""Inference end to end: chunked prefill."""
