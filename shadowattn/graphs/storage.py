"""A bank on disk: graphs with a manifest that vouches for every file, and compiled blobs for the devices it ran on."""

import glob
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import openvino as ov

from shadowattn import checks
from shadowattn.artifacts import content_hash, sha256, write_json
from shadowattn.errors import InputError
from shadowattn.graphs.buckets import DISTANCES, GraphShape
from shadowattn.graphs.estimation import GraphForm, form_of
from shadowattn.types import ScaleGrid

try:
    import fcntl
except ImportError:  # Windows: what was left behind cannot be told from what is being written, and stays
    fcntl = None

SCHEMA_VERSION = 4  # 3 did not say which scales, of which model
MANIFEST = "manifest.json"

Key = tuple[GraphShape, int]


@dataclass(frozen=True)
class BuiltFor:
    """The profile that a bank was built for: its scales, and whose model's they are."""

    scales: ScaleGrid
    fingerprint: str
    model: str


@dataclass(frozen=True)
class Saved:
    """What a folder holds. `files` are the `.xml` of each (shape, slot)."""

    built_for: BuiltFor
    shapes: tuple[GraphShape, ...]
    form: GraphForm
    distance: str
    files: dict[Key, Path]


def save(folder: Path, built_for: BuiltFor, form: GraphForm, distance: str, models: dict[Key, ov.Model]) -> Path:
    """Writes all or nothing. An existing bank is replaced; any other folder that is not empty is refused with `InputError`."""
    pairs = built_for.scales.pairs
    with staged_folder(folder, "bank") as staged:
        graphs = []
        for key, model in models.items():
            name = graph_name(key)
            ov.save_model(model, staged / f"{name}.xml", compress_to_fp16=False)
            files = {file: sha256(staged / file) for file in sorted(_files(key))}
            graphs.append(_entry(key, pairs, form) | {"files": files})
        manifest = {"schema_version": SCHEMA_VERSION, "openvino": ov.get_version(), "form": asdict(form), "lookup": distance}
        manifest |= {"built_for": asdict(built_for), "pairs": pairs, "graphs": graphs}
        write_json(staged / MANIFEST, manifest | {"content_hash": content_hash(manifest)})
    return folder


def load(folder: Path) -> Saved:
    """Reads the manifest and checks itself and every file it names. Raises `InputError` on what is not as it was written."""
    remedy = f"rebuild it with: rm -r {folder}, then the same command, or GraphBank.build(profile, shapes).save in Python"
    if not (folder / MANIFEST).is_file():
        raise InputError(
            f"bank {folder}: expected a folder that a run or GraphBank.save wrote, found no {MANIFEST} in it; give another, "
            "or rebuild it with GraphBank.build(profile, shapes).save in Python"
        )
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        version, digest = manifest["schema_version"], manifest.pop("content_hash", None)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"bank {folder}: no readable {MANIFEST} ({error}); {remedy}") from error
    if platform := manifest.get("platform"):
        raise InputError(f"bank {folder}: compiled ahead for NPU {platform}; give the saved bank that it was compiled from")
    if version != SCHEMA_VERSION:
        raise InputError(f"bank {folder}: expected schema version {SCHEMA_VERSION}, got {version}; {remedy}")
    if digest != content_hash(manifest):
        raise InputError(f"bank {folder}: {MANIFEST} is altered; {remedy}")
    if manifest["openvino"] != ov.get_version():
        raise InputError(f"bank {folder}: built with OpenVINO {manifest['openvino']}, here is {ov.get_version()}; {remedy}")
    try:
        form = form_of(manifest["form"])
        profile = manifest["built_for"]
        built_for = BuiltFor(ScaleGrid(**profile["scales"]), profile["fingerprint"], profile["model"])
        pairs = built_for.scales.pairs
        entries = {
            (GraphShape(g["heads"], g["M"], g["K"], g["N"], g["group"], g["top_k"]), g["pair"] or 0): g
            for g in manifest["graphs"]
        }
        shapes = tuple({shape for shape, _ in entries})
        expected = {(shape, slot) for shape in shapes for slot in range(len(pairs) if form.bakes_scales else 1)}
        missing, excess = sorted(expected - set(entries)), sorted(set(entries) - expected)
        if missing or excess or len(entries) != len(manifest["graphs"]):
            faults = [f"{word} {graph_name(keys[0])}" for word, keys in (("misses", missing), ("has no use for", excess)) if keys]
            raise InputError(f"it {' and '.join(faults) or 'names a graph twice'}, of {len(expected)} graphs")
        for key, entry in entries.items():
            if entry != _entry(key, pairs, form) | {"files": entry["files"]} or set(entry["files"]) != _files(key):
                raise InputError(f"{graph_name(key)} is not the graph of its shape and scales")
        graphs = {key: entry["files"] for key, entry in entries.items()}
        checks.one_of("lookup", manifest["lookup"], DISTANCES)
    except (KeyError, TypeError, ValueError, InputError) as error:
        raise InputError(f"bank {folder}: {MANIFEST} does not hold what it should ({error}); {remedy}") from error
    for files in graphs.values():
        check_files(folder, files, f"bank {folder}", remedy)
    return Saved(built_for, shapes, form, manifest["lookup"], {key: folder / f"{graph_name(key)}.xml" for key in graphs})


@contextmanager
def staged_folder(folder: Path, what: str) -> Iterator[Path]:
    """A folder beside to write to, which takes the place of `folder` when all is written; the old one goes only then."""
    folder = folder.resolve()  # a link stays one
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and any(folder.iterdir()) and not _is_ours(folder):
            raise InputError(f"{what} {folder}: expected a new folder, an empty one or a bank's, and it holds other things")
        with _scratch(folder) as scratch:
            new, old = scratch / "new", scratch / "old"
            new.mkdir()
            yield new
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        _remove_left_over(folder)
    except OSError as error:
        raise InputError(f"{what} {folder}: cannot be written ({error}); give a folder that can") from error


def _prefix(folder: Path) -> str:
    return f".{folder.name}-shadowattn-staged-"


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A folder beside, locked for as long as this process uses it: a lock ends with its process, however that ends."""
    with ExitStack() as held:
        with _locked(folder.parent):  # or another process could take it for left over before it is locked
            scratch = held.enter_context(tempfile.TemporaryDirectory(dir=folder.parent, prefix=_prefix(folder)))
            held.enter_context(_locked(Path(scratch)))
        yield Path(scratch)


def _remove_left_over(folder: Path) -> None:
    """What saving to this folder left behind where its process was killed: folders of our name that nobody has locked."""
    if fcntl is None:
        return
    with _locked(folder.parent):
        for path in folder.parent.glob(f"{glob.escape(_prefix(folder))}*"):
            with suppress(BlockingIOError, FileNotFoundError), _locked(path, wait=False):
                shutil.rmtree(path)


@contextmanager
def _locked(folder: Path, *, wait: bool = True) -> Iterator[None]:
    """A lock on a folder that leaves no file behind. Raises `BlockingIOError` where another has it and nobody is to wait."""
    if fcntl is None:
        yield
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        yield
    finally:
        os.close(descriptor)


def _is_ours(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(manifest, dict) and not {"graphs", "bank"}.isdisjoint(manifest)


class Blobs:
    """Compiled graphs of one device, driver and OpenVINO version: no other can read them. A thread budget is compiled in, too.

    `bank` is the hash of what the graphs are made from; blobs of another bank count for nothing and are overwritten.
    """

    def __init__(self, root: Path, core: ov.Core, device: str, bank: str, threads: int | None):
        name = device_key(core, device) + (f"-{threads}-threads" if threads else "")
        self.folder, self._bank = root / name, bank
        self._remedy = f"rebuild with: rm -r {self.folder}, then the same command"

    def read(self, keys: list[Key]) -> dict[Key, io.BytesIO]:
        """What is here of these graphs. Raises `InputError` where a file is missing or altered."""
        if not (self.folder / MANIFEST).exists():
            return {}
        try:
            manifest = json.loads((self.folder / MANIFEST).read_text())
            files = dict(manifest["files"])
            if (manifest["schema_version"], manifest["bank"]) != (SCHEMA_VERSION, self._bank):
                return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"blobs {self.folder}: no readable {MANIFEST} ({error}); {self._remedy}") from error
        names = {key: f"{graph_name(key)}.blob" for key in keys if f"{graph_name(key)}.blob" in files}
        check_files(self.folder, {name: files[name] for name in names.values()}, f"blobs {self.folder}", self._remedy)
        return {key: io.BytesIO((self.folder / name).read_bytes()) for key, name in names.items()}

    def write(self, models: dict[Key, ov.CompiledModel]) -> None:
        """Exports all or nothing."""
        with staged_folder(self.folder, "blobs") as staged:
            files = {}
            for key, model in models.items():
                path = staged / f"{graph_name(key)}.blob"
                path.write_bytes(model.export_model().getvalue())
                files[path.name] = sha256(path)
            write_json(staged / MANIFEST, {"schema_version": SCHEMA_VERSION, "bank": self._bank, "files": files})


def device_key(core: ov.Core, device: str) -> str:
    """A folder name that tells devices, drivers and versions apart."""
    parts = [device, core.get_property(device, "FULL_DEVICE_NAME"), ov.get_version()]
    if "DRIVER_VERSION" in core.get_property(device, "SUPPORTED_PROPERTIES") and device != "CPU":
        parts.append(str(core.get_property(device, "DRIVER_VERSION")))
    return re.sub(r"[^A-Za-z0-9.]+", "-", "_".join(parts))


def graph_name(key: Key) -> str:
    shape, slot = key
    folded = f"g{shape.group}" if shape.group > 1 else ""
    selected = f"_k{shape.top_k}" if shape.top_k else ""
    return f"h{shape.heads}{folded}_m{shape.rows}_d{shape.head_dim}_n{shape.keys}{selected}_s{slot}"


def _files(key: Key) -> set[str]:
    return {f"{graph_name(key)}.xml", f"{graph_name(key)}.bin"}


def _entry(key: Key, pairs: tuple[tuple[float, float], ...], form: GraphForm) -> dict:
    shape, slot = key
    scales = {"pair": None, "q_scale": None, "k_scale": None, "output_scale": None}
    if form.bakes_scales:
        q_scale, k_scale = pairs[slot]
        output = form.requant.output_scale(q_scale, k_scale) if form.requant else q_scale * k_scale
        scales = {"pair": slot, "q_scale": q_scale, "k_scale": k_scale, "output_scale": output}
    shapes = {"heads": shape.heads, "M": shape.rows, "K": shape.head_dim, "N": shape.keys}
    return shapes | {"group": shape.group, "top_k": shape.top_k} | scales


def check_files(folder: Path, files: dict[str, str], what: str, remedy: str) -> None:
    for name, digest in files.items():
        if not (folder / name).is_file() or sha256(folder / name) != digest:
            raise InputError(f"{what}: {name} is missing or altered; {remedy}")
