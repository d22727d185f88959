"""The bank: every static graph of a profile, compiled ahead, looked up by measured scales and by length."""

import io
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cached_property
from pathlib import Path

import openvino as ov

from shadowattn import checks
from shadowattn.artifacts import content_hash
from shadowattn.errors import InputError
from shadowattn.exclusive import Exclusive, current_work, working_for
from shadowattn.graphs import storage
from shadowattn.graphs.buckets import DISTANCES, GraphShape, nearest_pair
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints, multiplies_exactly, runs_in_int8
from shadowattn.graphs.estimation import GraphForm, estimation_graph, inputs_for
from shadowattn.graphs.graph import Arena, Graph
from shadowattn.graphs.npu.blobs import read_ahead, write_ahead
from shadowattn.graphs.npu.compiler import NpuCompiler
from shadowattn.graphs.storage import BuiltFor, graph_name
from shadowattn.machine import return_freed_memory
from shadowattn.threads import compile_hints, current_budget
from shadowattn.types import KeyOffset, RetentionProfile, ScaleGrid

_REBUILD = (
    "build one that fits: GraphBank.build(profile, plan_shapes(...)), or calibration.bank(max_tokens=...) of "
    "shadowattn.calibrate(model, tokenizer, text)"
)
# What graphs may hold of their own all at once. A graph that got its memory back takes longer by a few milliseconds, once.
_MOST_OWN_BYTES = 100_000_000


class GraphBank:
    """Static INT8 Q·K graphs for every scale pair of a profile and every shape asked for.

    Where the form takes scales as inputs, one graph of a shape serves all pairs. Graphs share the memory of their inputs and
    outputs, which `exclusive` guards: of several threads one at a time uses the bank, the others wait.
    """

    def __init__(
        self,
        built_for: BuiltFor,
        shapes: tuple[GraphShape, ...],
        device: str,
        form: GraphForm,
        distance: str,
        read: Callable[[GraphShape, int], ov.Model],
    ):
        self.built_for, self.pairs = built_for, built_for.scales.pairs
        self.shapes, self.device = tuple(sorted(set(shapes))), device
        self.form, self.distance = form, distance
        self._read = read
        self.exclusive = Exclusive()
        self._graphs: dict[tuple[GraphShape, int, int | None], Graph] = {}  # by thread budget too
        self._length = 0  # of the graphs that hold memory

    @classmethod
    def build(
        cls,
        profile: RetentionProfile,
        shapes: tuple[GraphShape, ...],
        *,
        device: str = "CPU",
        form: GraphForm | None = None,
        distance: str = "raw",
    ) -> "GraphBank":
        """Graphs of one form for the profile's scale pairs and each shape. `device` as OpenVINO names it. `form` None: int8
        inputs on an NPU, the paper's form elsewhere.

        Raises `InputError` on any argument of a wrong type, on no shapes, and on an unknown `distance` or device.
        """
        checks.instance("profile", profile, RetentionProfile, "run the offline stage, or read one with load_profile")
        check_device(device)
        form = GraphForm(inputs_for("auto", device)) if form is None else form
        checks.instance("form", form, GraphForm, "see shadowattn.graphs.GraphForm")
        checks.one_of("lookup", distance, DISTANCES)
        shapes = tuple(checks.sequence("shapes", shapes))
        if not shapes:
            raise InputError("shapes: expected at least one GraphShape, got none; see shadowattn.graphs.planner.plan_shapes")
        for shape in shapes:
            checks.instance("shapes", shape, GraphShape, "see shadowattn.graphs.planner.plan_shapes")
        pairs = profile.scales.pairs
        slots = range(len(pairs) if form.bakes_scales else 1)
        models = {(shape, slot): estimation_graph(shape, form, *pairs[slot]) for shape in shapes for slot in slots}
        built_for = BuiltFor(profile.scales, profile.fingerprint, profile.model)
        return cls(built_for, shapes, device, form, distance, lambda shape, slot: models[shape, slot])

    @classmethod
    def load(cls, folder: str | Path, *, device: str = "CPU") -> "GraphBank":
        """Reads a saved bank. A missing, altered or foreign file is refused with the reason."""
        saved = storage.load(_folder(folder))
        check_device(device)
        return cls(
            saved.built_for, saved.shapes, device, saved.form, saved.distance,
            lambda shape, slot: core().read_model(saved.files[shape, slot]),
        )  # fmt: skip

    def save(self, folder: str | Path) -> Path:
        """Writes every graph (`.xml`, `.bin`) and `manifest.json`, all or nothing. An existing bank is replaced.

        Raises `InputError` where the folder holds anything else, or cannot be written.
        """
        models = {key: self._read(*key) for key in self.keys}
        return storage.save(_folder(folder), self.built_for, self.form, self.distance, models)

    def check_profile(self, profile: RetentionProfile) -> None:
        """Raises `InputError` where the bank was built for other scales than the profile's: its integers would clip or vanish.

        So it does where they are scales of other keys: of K less another key offset.
        """
        checks.instance("profile", profile, RetentionProfile, "run the offline stage, or read one with load_profile")
        if self.built_for.scales == profile.scales:
            return
        bank, profile_grid = (
            f"{x.model or 'a model'} ({x.fingerprint[:12]}), {_shown_scales(x.scales)}" for x in (self.built_for, profile)
        )
        raise InputError(
            f"bank: it was built for the scales of {bank}, and the profile's are those of {profile_grid}; build a bank for this "
            "profile: GraphBank.build(profile, bank.shapes)"
        )

    def compile(
        self,
        *,
        blobs: str | Path | None = None,
        ahead: str | Path | None = None,
        threads: int | None = None,
        progress: Callable[[Iterable], Iterable] = iter,
    ) -> int:
        """Compiles every graph now and runs it once, so that no prompt waits; returns how many were read from blobs instead.

        `blobs`: a folder of compiled graphs, kept apart by device, driver and version; what is not there yet for this device
        is exported to it. `ahead`: a folder that `compile_ahead` wrote for this device's platform, or one of several such;
        nothing is compiled then, and what is of another platform or of other graphs is refused with `InputError`. `threads`
        compile at once, None for as many as there are cores. `progress` may wrap the iterable in a progress bar.
        """
        threads = None if threads is None else checks.integer("threads", threads, least=1)
        blobs = None if blobs is None else _folder(blobs)
        imported = {} if ahead is None else self._read_ahead(_folder(ahead))
        with self.exclusive.use():
            return self._compile(blobs, imported, threads, progress)

    def compile_ahead(
        self, platform: str, folder: str | Path, compiler: NpuCompiler, *, progress: Callable[[Iterable], Iterable] = iter
    ) -> Path:
        """Compiles every graph for an NPU platform, such as 4000, into a folder that `compile(ahead=…)` takes there.

        No NPU is needed, and nothing runs. Raises `InputError` where a graph does not compile.
        """
        return write_ahead(_folder(folder), platform, self._models_by_name(), compiler, progress)

    def _read_ahead(self, folder: Path) -> dict[tuple[GraphShape, int], io.BytesIO]:
        is_npu = self.device.split(".")[0] == "NPU"
        architecture = str(core().get_property(self.device, "DEVICE_ARCHITECTURE")) if is_npu else None
        read = read_ahead(folder, architecture, self._models_by_name())
        return {key: read[graph_name(key)] for key in self.keys}

    def _models_by_name(self) -> dict[str, ov.Model]:
        return {graph_name(key): self._read(*key) for key in self.keys}

    def _compile(
        self,
        blobs: Path | None,
        imported: dict[tuple[GraphShape, int], io.BytesIO],
        threads: int | None,
        progress: Callable[[Iterable], Iterable],
    ) -> int:
        budget, work = self._budget, current_work()
        store = storage.Blobs(blobs, core(), self.device, self._identity, budget) if blobs is not None else None
        todo = [key for key in self.keys if (*key, budget) not in self._graphs]
        hints, _ = self._hints, self._arena  # of the calling thread's budget; made before the threads need it
        cached_blobs = (store.read(todo) if store else {}) | {key: blob for key, blob in imported.items() if key in todo}

        def compiled(key: tuple[GraphShape, int]) -> Graph:
            if key in cached_blobs:
                model = core().import_model(cached_blobs[key], self.device, hints)
            else:
                model = core().compile_model(self._model(key), self.device, hints)
            graph = self._bound(key, model)
            with working_for(work):
                graph.infer()  # allocates, and frees most of what compiling took
            if self._is_large:
                graph.release()
            return graph

        with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
            graphs = dict(zip(todo, progress(pool.map(compiled, todo)), strict=True))
        self._arena.renew_outputs()  # the runs wrote to them, and launches may write their scores elsewhere
        self._graphs |= {(*key, budget): graph for key, graph in graphs.items()}
        if store and len(cached_blobs) < len(todo):
            store.write({key: self._graphs[*key, budget].model for key in self.keys})
        return_freed_memory()
        return len(cached_blobs)

    def lookup(self, q_scale: float, k_scale: float, *, heads: int, rows: int, keys: int, head_dim: int, top_k: int = 0) -> Graph:
        """The graph of the nearest scale pair and of the smallest shape with exactly `heads` heads that holds the rest.

        Raises `InputError` where the bank was not built for such a head dimension, head count, length or number of indices.
        """
        for name, value in (("heads", heads), ("rows", rows), ("keys", keys), ("head_dim", head_dim)):
            checks.integer(name, value, least=1)
        checks.integer("top_k", top_k)
        shape = self.shape_for(heads=heads, rows=rows, keys=keys, head_dim=head_dim, top_k=top_k)
        return self._graph((shape, self.slot(self.nearest(q_scale, k_scale))))

    def nearest(self, q_scale: float, k_scale: float) -> int:
        """Index of the scale pair nearest to measured scales."""
        return nearest_pair(self.pairs, q_scale, k_scale, distance=self.distance)

    def slot(self, pair: int) -> int:
        """Heads of one slot can share a launch: those of one scale pair, or all, where scales are inputs."""
        return pair if self.form.bakes_scales else 0

    def shape_for(self, *, heads: int, rows: int, keys: int, head_dim: int, top_k: int = 0) -> GraphShape:
        """The smallest shape of the bank that serves such a launch."""
        dims = sorted({shape.head_dim for shape in self.shapes})
        if head_dim not in dims:
            raise InputError(f"head_dim: the bank was built for {dims}, got {head_dim}; {_REBUILD}")
        fitting = [s for s in self.shapes if s.head_dim == head_dim and s.heads == heads]
        if not fitting:
            sizes = sorted({s.heads for s in self.shapes if s.head_dim == head_dim})
            raise InputError(f"heads: the bank launches {sizes} heads at once, got {heads}; {_REBUILD}")
        built = {(s.rows, s.keys) for s in fitting}
        built = sorted(b for b in built if not any(b != c and b[0] <= c[0] and b[1] <= c[1] for c in built))
        fitting = [s for s in fitting if s.rows >= rows and s.keys >= keys]
        if not fitting:
            sizes = ", ".join(f"{most_rows} rows on {most_keys} keys" for most_rows, most_keys in built)
            raise InputError(
                f"length: the bank was built for up to {sizes}, got {rows} on {keys}; {_REBUILD}, or use a shorter prompt"
            )
        shortest = min(s.keys for s in fitting)
        fitting = [s for s in fitting if s.top_k >= top_k]
        if not fitting:
            most_k = max(s.top_k for s in self.shapes if s.keys == shortest)
            raise InputError(f"top_k: the bank's graphs return up to {most_k} indices a row, {top_k} are needed; {_REBUILD}")
        return min(fitting, key=lambda s: (s.keys, s.top_k, s.rows))

    @property
    def key_offset(self) -> KeyOffset | None:
        """What is to be subtracted from K before a graph takes it: the scales were calibrated on such keys."""
        return self.built_for.scales.key_offset

    @property
    def launch_heads(self) -> list[int]:
        """The numbers of heads that can share a launch."""
        return sorted({shape.heads for shape in self.shapes})

    def launch_heads_for(self, rows: int, keys: int, head_dim: int) -> list[int]:
        """Those for which there is a graph of so many rows and keys; all where there is none, which `lookup` refuses."""
        fitting = (s.heads for s in self.shapes if s.rows >= rows and s.keys >= keys and s.head_dim == head_dim)
        return sorted(set(fitting)) or self.launch_heads

    @property
    def group(self) -> int:
        """Query heads of one key head that its largest launch folds; 1: every head of a launch brings its own keys."""
        return max(shape.group for shape in self.shapes)

    @property
    def keys(self) -> list[tuple[GraphShape, int]]:
        """(shape, slot) of every graph."""
        return [(shape, slot) for shape in self.shapes for slot in range(len(self.pairs) if self.form.bakes_scales else 1)]

    @property
    def buffer_bytes(self) -> int:
        """Memory of the inputs and outputs that all graphs share."""
        with self.exclusive.use():
            return self._arena.bytes

    @cached_property
    def _arena(self) -> Arena:
        return Arena((estimation_graph(shape, self.form) for shape in self.shapes), self.exclusive)

    @property
    def _identity(self) -> str:
        shapes = [asdict(shape) for shape in self.shapes]
        return content_hash({"pairs": self.pairs, "shapes": shapes, "form": asdict(self.form), "hints": self._hints})

    @property
    def _budget(self) -> int | None:
        """The threads that graphs are compiled for; another device than the CPU knows none, and its graphs serve every budget."""
        return current_budget() if self.device == "CPU" else None

    @property
    def _hints(self) -> dict[str, str | int | bool]:
        return cpu_hints() | compile_hints() if self.device == "CPU" else {}

    def _graph(self, key: tuple[GraphShape, int]) -> Graph:
        compiled = *key, self._budget
        with self.exclusive.use():
            if compiled not in self._graphs:
                self._graphs[compiled] = self._bound(key, core().compile_model(self._model(key), self.device, self._hints))
            self._release_others(key[0].keys)
            return self._graphs[compiled]

    def _model(self, key: tuple[GraphShape, int]) -> ov.Model:
        """What is compiled: the graph itself, but where INT8 products are not exact, the one whose float32 product is."""
        if self.device != "CPU" or multiplies_exactly():
            return self._read(*key)
        shape, slot = key
        return estimation_graph(shape, self.form, *self.pairs[slot], whole=True)

    def _bound(self, key: tuple[GraphShape, int], model: ov.CompiledModel) -> Graph:
        if self.device == "CPU" and multiplies_exactly() and not runs_in_int8(model):
            raise RuntimeError(f"the CPU plugin compiled {key[0]} in floating point; an INT8 estimate was expected")
        shape, slot = key
        scales = self.pairs[slot] if self.form.bakes_scales else (None, None)
        return Graph(model, shape, self.form, scales, self._arena)

    @cached_property
    def _is_large(self) -> bool:
        """Whether the graphs' own memory counts: one with float32 inputs holds its keys again as integers."""
        key_bytes = sum(shape.kv_heads * shape.keys * shape.head_dim for shape, _ in self.keys)
        return not self.form.takes_int8 and key_bytes > _MOST_OWN_BYTES

    def _release_others(self, keys: int) -> None:
        """In a large bank only graphs of one length hold memory of their own: a prompt uses one length at a time."""
        if self._is_large and keys != self._length:
            for graph in self._graphs.values():
                if graph.shape.keys == self._length:
                    graph.release()
            return_freed_memory()
            self._length = keys

    def __len__(self) -> int:
        return len(self.keys)


def check_device(device: str) -> None:
    """Raises `InputError` on a device that OpenVINO does not list here."""
    checks.instance("device", device, str, "give a device as OpenVINO names it, such as CPU")
    devices = core().available_devices
    if device not in devices and device.split(".")[0] not in devices:
        raise InputError(f"device: expected one of {', '.join(devices)}, got {device!r}; OpenVINO lists no other device here")


def _folder(folder: str | Path) -> Path:
    if not isinstance(folder, str | Path) or not str(folder):
        raise InputError(f"folder: expected a path, got {checks.shown(folder)}")
    return Path(folder)


def _shown_scales(scales: ScaleGrid) -> str:
    q, k = (", ".join(f"{scale:.4g}" for scale in values) for values in (scales.q_scales, scales.k_scales))
    return f"Q {q} and K {k} ({scales.pattern}, {scales.key_offset or 'no key offset'})"
