"""The bank: every static graph of a profile, saved with a manifest, compiled ahead, looked up by measured scales."""

import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openvino as ov
from torch import Tensor

from shadowattn.artifacts import sha256
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape, nearest_pair
from shadowattn.graphs.estimation import scaled_graph
from shadowattn.threads import compile_hints, current_budget
from shadowattn.types import RetentionProfile

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
_REBUILD = "delete the folder and run the same command again to rebuild it"


@dataclass(frozen=True)
class _Buffers:
    """Input and output of all graphs of one shape. Shared, because the outputs are what takes memory, not the graphs."""

    q: np.ndarray
    k: np.ndarray
    scores: np.ndarray


class Graph:
    """One compiled graph of the bank."""

    def __init__(self, model: ov.CompiledModel, shape: GraphShape, q_scale: float, k_scale: float, buffers: _Buffers):
        self.model, self.shape, self.q_scale, self.k_scale = model, shape, q_scale, k_scale
        self._buffers = buffers
        self._request = model.create_infer_request()
        for index, array in enumerate((buffers.q, buffers.k)):
            self._request.set_input_tensor(index, ov.Tensor(array, shared_memory=True))
        self._request.set_output_tensor(0, ov.Tensor(buffers.scores, shared_memory=True))

    def run(self, q: Tensor, k: Tensor) -> np.ndarray:
        """Scores float32 [heads, Q, K] for q [heads, Q, D] and k [heads, K, D] of at most the graph's heads, rows and keys.

        The result is a view of a buffer that the next run of any graph of this shape overwrites.
        """
        heads, rows, keys = *q.shape[:2], k.shape[1]
        # Heads, rows and keys past the given ones keep what an earlier run left: their scores are computed, never read.
        self._buffers.q[0, :heads, :rows] = q.float()
        self._buffers.k[0, :heads, :keys] = k.float()
        self._request.infer(share_outputs=True)
        return self._buffers.scores[0, :heads, :rows, :keys]


class GraphBank:
    """Static INT8 Q·K graphs for every scale pair of a profile and every shape asked for."""

    def __init__(self, pairs: tuple[tuple[float, float], ...], shapes: tuple[GraphShape, ...], device: str, models: dict):
        self.pairs, self.shapes, self.device = pairs, tuple(sorted(shapes)), device
        self._models: dict[tuple[GraphShape, int], ov.Model] = models
        self._buffers: dict[GraphShape, _Buffers] = {}
        self._graphs: dict[tuple[GraphShape, int, int | None], Graph] = {}  # by thread budget too
        self._core = ov.Core()

    @classmethod
    def build(cls, profile: RetentionProfile, shapes: tuple[GraphShape, ...], *, device: str = "CPU") -> "GraphBank":
        """One graph for each of the profile's scale pairs and each shape. `device` as OpenVINO names it."""
        if not shapes:
            raise InputError("shapes: expected at least one GraphShape, got none; see shadowattn.graphs.buckets.plan_shapes")
        pairs = profile.scales.pairs
        models = {(shape, i): scaled_graph(shape, *pair) for shape in shapes for i, pair in enumerate(pairs)}
        return cls(pairs, tuple(shapes), device, models)

    def compile(self, progress=lambda graphs: graphs) -> None:
        """Compiles every graph now, so that no prompt waits for one. `progress` may wrap the iterable in a bar."""
        for shape, pair in progress(list(self._models)):
            self._graph(shape, pair)

    def lookup(self, q_scale: float, k_scale: float, *, heads: int, rows: int, keys: int, head_dim: int) -> Graph:
        """The graph of the nearest scale pair and of the smallest shape with exactly `heads` heads that holds rows and keys.

        Raises `InputError` where the bank was not built for such a head dimension, head count or length.
        """
        return self._graph(self.shape_for(heads=heads, rows=rows, keys=keys, head_dim=head_dim), self.nearest(q_scale, k_scale))

    def nearest(self, q_scale: float, k_scale: float) -> int:
        """Index of the scale pair nearest to measured scales."""
        return nearest_pair(self.pairs, q_scale, k_scale)

    def shape_for(self, *, heads: int, rows: int, keys: int, head_dim: int) -> GraphShape:
        """The smallest shape of the bank that serves such a launch."""
        dims = sorted({shape.head_dim for shape in self.shapes})
        if head_dim not in dims:
            raise InputError(f"head_dim: the bank was built for {dims}, got {head_dim}; build a bank for this model")
        fitting = [s for s in self.shapes if s.head_dim == head_dim and s.heads == heads]
        if not fitting:
            raise InputError(f"heads: the bank launches {self.launch_heads} heads at once, got {heads}; build a bank for it")
        fitting = [s for s in fitting if s.rows >= rows and s.keys >= keys]
        if not fitting:
            most = max((s.rows, s.keys) for s in self.shapes)
            raise InputError(
                f"length: the bank was built for up to {most[0]} rows on {most[1]} keys, got {rows} on {keys}; "
                "build a bank for a longer context or use a shorter prompt"
            )
        return min(fitting, key=lambda s: (s.keys, s.rows))

    @property
    def launch_heads(self) -> list[int]:
        """The numbers of heads that can share a launch."""
        return sorted({shape.heads for shape in self.shapes})

    def save(self, folder: str | Path) -> Path:
        """Writes every graph (`.xml`, `.bin`) and `manifest.json`, all or nothing; an existing folder is replaced."""
        folder = Path(folder)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
            staged = Path(scratch) / "bank"
            staged.mkdir()
            graphs = []
            for (shape, pair), model in self._models.items():
                q_scale, k_scale = self.pairs[pair]
                name = f"h{shape.heads}_m{shape.rows}_d{shape.head_dim}_n{shape.keys}_s{pair}"
                ov.save_model(model, staged / f"{name}.xml", compress_to_fp16=False)
                graphs.append(
                    {
                        "heads": shape.heads,
                        "M": shape.rows,
                        "K": shape.head_dim,
                        "N": shape.keys,
                        "q_scale": q_scale,
                        "k_scale": k_scale,
                        "output_scale": q_scale * k_scale,
                        "pair": pair,
                        "files": {f"{name}{end}": sha256(staged / f"{name}{end}") for end in (".xml", ".bin")},
                    }
                )
            manifest = {"schema_version": SCHEMA_VERSION, "openvino": ov.get_version(), "graphs": graphs}
            manifest |= {"pairs": self.pairs}
            (staged / MANIFEST).write_text(json.dumps(manifest, indent=1))
            if folder.exists():
                shutil.rmtree(folder)
            staged.replace(folder)
        return folder

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "CPU") -> "GraphBank":
        """Reads a saved bank. A missing, altered or foreign file is refused with the reason."""
        folder = Path(folder)
        try:
            manifest = json.loads((folder / MANIFEST).read_text())
            version = manifest["schema_version"]
            pairs = tuple((float(q), float(k)) for q, k in manifest["pairs"])
            graphs = [(GraphShape(g["heads"], g["M"], g["K"], g["N"]), g["pair"], dict(g["files"])) for g in manifest["graphs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"bank {folder}: no readable {MANIFEST} ({error}); {_REBUILD}") from error
        if version != SCHEMA_VERSION:
            raise InputError(f"bank {folder}: expected schema version {SCHEMA_VERSION}, got {version}; {_REBUILD}")
        core, models = ov.Core(), {}
        for shape, pair, files in graphs:
            for name, digest in files.items():
                if not (folder / name).is_file() or sha256(folder / name) != digest:
                    raise InputError(f"bank {folder}: {name} is missing or altered; {_REBUILD}")
            xml = next(name for name in files if name.endswith(".xml"))
            models[shape, pair] = core.read_model(folder / xml)
        return cls(pairs, tuple({shape for shape, _, _ in graphs}), device, models)

    def _graph(self, shape: GraphShape, pair: int) -> Graph:
        key = shape, pair, current_budget()
        if key not in self._graphs:
            # The CPU plugin's default on BF16 machines would round the scores to bfloat16.
            hints = {"INFERENCE_PRECISION_HINT": "f32"} | compile_hints() if self.device == "CPU" else {}
            compiled = self._core.compile_model(self._models[shape, pair], self.device, hints)
            self._graphs[key] = Graph(compiled, shape, *self.pairs[pair], self._buffers_for(shape))
        return self._graphs[key]

    def _buffers_for(self, shape: GraphShape) -> _Buffers:
        if shape not in self._buffers:
            lead = (1, shape.heads)
            self._buffers[shape] = _Buffers(
                np.zeros((*lead, shape.rows, shape.head_dim), np.float32),
                np.zeros((*lead, shape.keys, shape.head_dim), np.float32),
                np.empty((*lead, shape.rows, shape.keys), np.float32),
            )
        return self._buffers[shape]

    def __len__(self) -> int:
        return len(self._models)
