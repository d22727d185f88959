"""A bank compiled ahead for one NPU platform: blobs and a manifest that names the platform; refused everywhere else.

Written on any machine that has the compiler (`make npu-compile`), read on the machine with the NPU, which then compiles nothing.
Blobs are for one version of OpenVINO. No NPU has read one of ours yet.
"""

import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import openvino as ov

from shadowattn.artifacts import content_hash, sha256, write_json
from shadowattn.errors import InputError
from shadowattn.graphs.npu.compiler import NpuCompiler
from shadowattn.graphs.npu.content import graph_content
from shadowattn.graphs.storage import MANIFEST, check_files, staged_folder

_WHAT = "compiled bank"
_REMEDY = "compile the bank of this form with: python -m experiments.npu_bank BANK PLATFORM; an NPU's form is graphs.inputs=int8"
_SCHEMA = 6  # 5 had no hash of itself


def write_ahead(
    folder: Path, platform: str, models: Mapping[str, ov.Model], compiler: NpuCompiler, progress: Callable = iter
) -> Path:
    """Compiles graphs, by the names of their files, for a platform; writes all or nothing.

    Raises `InputError` where a graph does not compile, with the reason.
    """
    with staged_folder(folder, _WHAT) as staged:
        files, graphs = {}, {}
        for name, model in progress(list(models.items())):
            blob = staged / f"{name}.blob"
            outcome = compiler.compile(model, platform, blob)
            if outcome.error:
                raise InputError(
                    f"{_WHAT}: {name} does not compile for NPU {platform} ({outcome.error}); use another form, see docs/graphs.md"
                )
            files[blob.name], graphs[name] = sha256(blob), graph_content(model)
        manifest = {"schema_version": _SCHEMA, "platform": platform, "openvino": ov.get_version(), "compiler": compiler.version}
        manifest |= {"graphs": graphs, "files": files}
        write_json(staged / MANIFEST, manifest | {"content_hash": content_hash(manifest)})
    return folder


def read_ahead(folder: Path, architecture: str | None, models: Mapping[str, ov.Model]) -> dict[str, io.BytesIO]:
    """The blobs of graphs, by the names of their files. `architecture`: of the device that is to run them, None for no NPU.

    `folder`: one that `write_ahead` wrote, or one of several of them, of which that of these graphs and this platform is read.
    Raises `InputError` where they were compiled for another platform, from other graphs or for another OpenVINO, and where a
    file is missing or altered.
    """
    here = "is no NPU" if architecture is None else f"is NPU {architecture.removeprefix('NPU')}"
    contents = {name: graph_content(model) for name, model in models.items()}
    several = [folder] if (folder / MANIFEST).exists() else [path.parent for path in sorted(folder.glob(f"*/{MANIFEST}"))]
    problems = []
    for one in several or [folder]:
        try:
            files = _fitting(one, here, contents)
        except InputError as error:
            problems.append(error)
            continue
        check_files(one, files, f"{_WHAT} {one}", _REMEDY)
        return {name.removesuffix(".blob"): io.BytesIO((one / name).read_bytes()) for name in files}
    if len(problems) == 1:
        raise problems[0]
    raise InputError(
        f"{_WHAT} {folder}: of {len(problems)} there none is of these graphs and of this device, which {here}; {_REMEDY}"
    )


def _fitting(folder: Path, here: str, contents: Mapping[str, str]) -> dict[str, str]:
    """The SHA-256 of every blob of these graphs, by its file; `InputError` where the folder is of something else."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        schema, platform, version = (manifest[key] for key in ("schema_version", "platform", "openvino"))
        files, graphs = (dict(manifest.get(key, {})) for key in ("files", "graphs"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{_WHAT} {folder}: no readable {MANIFEST} ({error}); {_REMEDY}") from error
    if schema != _SCHEMA:
        raise InputError(f"{_WHAT} {folder}: expected schema version {_SCHEMA}, got {schema}; {_REMEDY}")
    if manifest.pop("content_hash", None) != content_hash(manifest):
        raise InputError(f"{_WHAT} {folder}: {MANIFEST} is altered; {_REMEDY}")
    if here != f"is NPU {platform}":
        raise InputError(f"{_WHAT} {folder}: compiled for NPU {platform}, and the device {here}; {_REMEDY}")
    if version != ov.get_version():
        raise InputError(f"{_WHAT} {folder}: compiled with OpenVINO {version}, here is {ov.get_version()}; {_REMEDY}")
    other = [name for name, content in contents.items() if graphs.get(name) != content]
    if other:
        what = f"{len(other)} of {len(contents)}, such as {other[0]}"
        raise InputError(f"{_WHAT} {folder}: compiled from other graphs than this bank's ({what}); {_REMEDY}")
    return {f"{name}.blob": files.get(f"{name}.blob", "") for name in sorted(contents)}
