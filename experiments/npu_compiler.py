"""Sets up Intel's NPU compiler in a cache folder: `make npu-compile`, about 5 minutes and 2 GB, by pip and apt-get alone.

OpenVINO's wheel for Linux has no NPU compiler and its wheel for Windows has one, which wine runs. Nothing is installed in the
system: packages of Debian are unpacked into the folder. The same command goes on where it was interrupted.

python -m experiments.npu_compiler
"""

import json
import platform
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from filelock import FileLock

from experiments.progress import say
from shadowattn.artifacts import sha256, write_json
from shadowattn.errors import InputError
from shadowattn.graphs.npu import compiler
from shadowattn.graphs.npu.compiler import MANIFEST, SETUP, compiler_folder

_HOST = Path(compiler.__file__).with_name("host.c")
_DEBIAN = ("wine64", "libwine", "libz-mingw-w64", "libunwind8")


def install(folder: Path) -> Path:
    """The folder with a compiler in it. Each step's result appears whole, by a rename, or not at all.

    Raises `InputError` where this is no Linux on x86-64, where apt-get or dpkg is missing, and where a download fails.
    """
    host, openvino = sha256(_HOST), version("openvino")
    before = _installed(folder)
    if (before.get("host"), before.get("openvino")) == (host, openvino) and all((folder / name).is_dir() for name in _STEPS):
        return folder
    _check_system()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"npu compiler: {folder} cannot be made ({error}); set SHADOWATTN_CACHE to a folder that can") from error
    with FileLock(folder.with_suffix(".lock")):
        if (folder / MANIFEST).is_file():  # by another version of our program, or of another OpenVINO
            (folder / MANIFEST).unlink()
            for name in ("app", *(["wheels"] if before.get("openvino") != openvino else [])):
                shutil.rmtree(folder / name, ignore_errors=True)
        for name, step in _STEPS.items():
            if not (folder / name).is_dir():
                say(f"npu compiler: {step.__doc__.splitlines()[0]}")
                _staged(folder, name, step)
        versions = {"openvino": openvino, "host": host, **dict(_deb_versions(folder / "debs"))}
        write_json(folder / MANIFEST, versions)
    return folder


def _installed(folder: Path) -> dict:
    """What a setup wrote here; nothing where none did, or where it cannot be read."""
    try:
        found = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _check_system() -> None:
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise InputError(
            f"npu compiler: expected Linux on x86-64, where wine runs it, got {platform.system()} on {platform.machine()}; run "
            f"{SETUP} on such a machine"
        )
    missing = [tool for tool in ("apt-get", "dpkg") if shutil.which(tool) is None]
    if missing:
        raise InputError(
            f"npu compiler: expected {' and '.join(missing)} for Debian's wine, found none; run {SETUP} on Debian or Ubuntu, a "
            "container of one will do"
        )


def _staged(folder: Path, name: str, step: Callable[[Path, Path], None]) -> None:
    staging = folder / f".{name}.part"
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    step(staging, folder)
    staging.rename(folder / name)


def _wheels(into: Path, folder: Path) -> None:
    """downloading OpenVINO's wheel for Windows, and the C++ runtime that it needs"""
    _pip("download", "--no-deps", "--only-binary", ":all:", "--platform", "win_amd64", "--python-version", "3.11", "--dest",
         str(into), f"openvino=={version('openvino')}", "msvc-runtime")  # fmt: skip


def _zig(into: Path, folder: Path) -> None:
    """downloading a C compiler for Windows programs"""
    _pip("install", "--no-deps", "--target", str(into), "ziglang")


def _debs(into: Path, folder: Path) -> None:
    """downloading Debian's wine"""
    _run(
        ["apt-get", "download", "-qq", *_DEBIAN],
        f"apt-get could not download {', '.join(_DEBIAN)}",
        "bring its lists up to date with: apt-get update, then the same command",
        cwd=into,
    )


def _wine(into: Path, folder: Path) -> None:
    """unpacking wine"""
    for package in sorted((folder / "debs").glob("*.deb")):
        _run(["dpkg", "-x", str(package), str(into)], f"dpkg could not unpack {package.name}", f"rm -r {folder / 'debs'}")
    libraries = into / "usr" / "lib" / "x86_64-linux-gnu" / "wine" / "x86_64-windows"
    shutil.copy(into / "usr" / "x86_64-w64-mingw32" / "lib" / "zlib1.dll", libraries)
    # Debian's is a script that looks in the system's own folders.
    server = into / "usr" / "lib" / "wine"
    shutil.copy(server / "wineserver64", server / "wineserver")


def _app(into: Path, folder: Path) -> None:
    """building the program that asks the compiler"""
    for wheel in sorted((folder / "wheels").glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for member in archive.namelist():
                # Of OpenVINO what it ships as libraries, of the C++ runtime what belongs to Visual C++ 14.
                if member.endswith(".dll") and (member.startswith("openvino/libs/") or "140" in Path(member).stem):
                    (into / Path(member).name).write_bytes(archive.read(member))
    zig = folder / "zig" / "ziglang" / "zig"
    command = [str(zig), "cc", "-target", "x86_64-windows-gnu", "-O1", str(_HOST), "-o", str(into / "host.exe")]
    _run(command, f"zig could not compile {_HOST.name}", f"rm -r {folder / 'zig'}")


_STEPS = {"wheels": _wheels, "zig": _zig, "debs": _debs, "wine": _wine, "app": _app}


def _pip(*arguments: str) -> None:
    _run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments],
        "pip could not download what it was asked for",
        "give the same command online, which goes on from what is there",
    )


def _run(command: list[str], problem: str, remedy: str, *, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        errors = [line for line in lines if line.lower().startswith(("error", "e:"))] or lines
        raise InputError(f"npu compiler: {problem} ({' '.join(errors[-1].split())[:200]}); {remedy}")


def _deb_versions(folder: Path) -> list[tuple[str, str]]:
    return [tuple(path.stem.split("_")[:2]) for path in sorted(folder.glob("*.deb"))]


def main() -> None:
    """The command line: sets the compiler up and prints its folder."""
    try:
        folder = install(compiler_folder())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        sys.exit(130)
    say("npu compiler: ready; python -m experiments.run +exp=npu_compile")
    print(folder)


if __name__ == "__main__":
    main()
