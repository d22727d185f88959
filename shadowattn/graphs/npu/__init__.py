"""Intel's NPU compiler, run here without an NPU: what it makes of a graph, and blobs compiled ahead for a platform."""
