"""What makes two graphs the same to a compiler: the bytes that OpenVINO saves, with nodes named by their order."""

import tempfile
from pathlib import Path

import openvino as ov

from shadowattn.artifacts import content_hash, sha256


def save_by_order(model: ov.Model, path: Path) -> list[str]:
    """Writes the graph's `.xml` to `path` and its `.bin` beside it; returns the SHA-256 of both, equal in every process.

    Names its nodes anew, in place: OpenVINO numbers them per process.
    """
    for index, node in enumerate(model.get_ordered_ops()):
        node.set_friendly_name(f"n{index}")
    ov.save_model(model, path, compress_to_fp16=False)
    return [sha256(path), sha256(path.with_suffix(".bin"))]


def graph_content(model: ov.Model) -> str:
    """The hash of a graph, one of a saved and loaded graph too. Names its nodes anew, in place."""
    with tempfile.TemporaryDirectory() as folder:
        return content_hash(save_by_order(model, Path(folder) / "graph.xml"))
