"""The compiler as a process of its own, under wine: one graph after the other, started again where it dies.

Compiled is not run: numbers on the device, launch cost and import of the blob are not seen here.
"""

import os
import selectors
import subprocess
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

import openvino as ov

from shadowattn.artifacts import Units, cache_folder, content_hash, read_json, sha256
from shadowattn.errors import InputError
from shadowattn.graphs.npu import log as log_reader
from shadowattn.graphs.npu.content import save_by_order
from shadowattn.graphs.npu.log import CompiledGraph, compiler_version, read_log

SETUP = "make npu-compile"
# The generations of Intel's NPU that the compiler takes, by what OpenVINO calls their architecture.
PLATFORMS = {
    "3720": "Core Ultra series 1 (Meteor Lake, Arrow Lake)",
    "4000": "Core Ultra series 2 (Lunar Lake)",
    "5010": "Core Ultra series 3 (Panther Lake)",
    "5020": "Core Ultra series 3, one tile in what was compiled",
}
MANIFEST = "installed.json"
_TIMEOUT_S = 900.0
# Wine's own implementations of these lack what OpenVINO calls; a browser and .NET, which wine would fetch, nobody needs.
_NATIVE = "msvcp140,msvcp140_1,msvcp140_2,vcruntime140,vcruntime140_1,msvcp140_atomic_wait,msvcp140_codecvt_ids,concrt140"
_OVERRIDES = f"mscoree,mshtml=;{_NATIVE}=n,b"


def compiler_folder() -> Path:
    """Where `make npu-compile` puts it."""
    return cache_folder() / "npu_compiler"


@dataclass
class NpuCompiler:
    """The compiler in `folder`, as a context manager that ends its process. Raises `InputError` where it was not set up."""

    folder: Path = field(default_factory=compiler_folder)
    version: str = field(default="", init=False)
    _tiles: int = field(default=0, init=False, repr=False)
    _process: subprocess.Popen | None = field(default=None, init=False, repr=False)

    def __post_init__(self):
        if not (self.folder / MANIFEST).is_file():
            raise InputError(f"npu compiler: expected it in {self.folder}, found none; set it up with: {SETUP}")
        again = f"set it up again with: rm -r {self.folder}, then {SETUP}"
        self.installed = read_json(self.folder / MANIFEST, again)
        missing = [path for path in (self._wine, self.folder / "app") if not path.exists()]
        if missing or not isinstance(self.installed, dict):
            what = missing[0] if missing else f"an object in {self.folder / MANIFEST}"
            raise InputError(f"npu compiler: expected {what}, found none; {again}")
        if (of := self.installed.get("openvino")) != version("openvino"):
            raise InputError(
                f"npu compiler: it is that of OpenVINO {of}, here is {version('openvino')}, whose compiler may make other "
                f"blobs; set it up anew with: {SETUP}"
            )

    @property
    def _wine(self) -> Path:
        return self.folder / "wine" / "usr" / "lib" / "wine" / "wine64"

    def __enter__(self) -> "NpuCompiler":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def compile(self, model: ov.Model, platform: str, blob: Path | None = None, *, tiles: int = 0) -> CompiledGraph:
        """What came of `model` on a platform; the compiled graph goes to the file `blob`, where one is given.

        `tiles` of the matrix engine that it may use; 0: the compiler's own choice, which knows no device here.

        A graph that the compiler refuses, dies of twice or does not finish within a quarter of an hour, is an outcome with an
        `error`.
        Without `blob` what the compiler itself answered is kept in its folder, and found again for the same graph, whatever code
        built it, as long as its log is read by the same code. Raises `InputError` where the compiler does not start.
        """
        if platform not in PLATFORMS:
            raise InputError(f"npu platform: expected one of {', '.join(PLATFORMS)}, got {platform!r}")
        if tiles != self._tiles:
            self._end()
            self._tiles = tiles
        with tempfile.TemporaryDirectory() as folder:
            path, made = Path(folder) / "graph.xml", Path(folder) / "graph.blob"
            graph = [*save_by_order(model, path), platform, tiles, self.installed, sha256(Path(log_reader.__file__))]
            known = Units(self.folder / "outcomes")
            if blob is None and known.has(content_hash(graph)):
                record = known.read(content_hash(graph))
                self.version = record.pop("compiler")
                return CompiledGraph(**record)
            line = f"{_windows(path)}\t{_windows(made)}\t{platform}\t{tiles}\n"
            log, finished = self._ask(line)
            if not finished:  # killed by another, perhaps, or short of memory
                log, finished = self._ask(line)
            self.version = self.version or compiler_version(log)
            outcome = read_log(log, blob_bytes=made.stat().st_size if made.is_file() else None)
            if not self.version:
                raise InputError(
                    f"npu compiler: it does not start ({outcome.error}); set it up again with: rm -r {self.folder}, then {SETUP}"
                )
            if blob is None and finished:
                known.put(content_hash(graph), asdict(outcome) | {"compiler": self.version})
            elif not outcome.error:
                blob.write_bytes(made.read_bytes())
        return outcome

    def _ask(self, line: str) -> tuple[str, bool]:
        """What the process prints for one line of input, and whether it came to a result; else it died, or was late."""
        process = self._started()
        try:
            process.stdin.write(line.encode())
            process.stdin.flush()
        except BrokenPipeError:
            self._end()
            return "", False
        read, deadline = b"", time.monotonic() + _TIMEOUT_S
        with selectors.DefaultSelector() as ready:
            ready.register(process.stdout, selectors.EVENT_READ)
            while not _is_done(read):
                if not ready.select(max(0.0, deadline - time.monotonic())):
                    self._end()
                    late = f"\n@result\t8\t{_TIMEOUT_S}\tno answer within {_TIMEOUT_S:.0f} s\n"
                    return read.decode(errors="replace") + late, False
                if not (part := os.read(process.stdout.fileno(), 1 << 16)):
                    self._end()
                    return read.decode(errors="replace"), False
                read += part
        return read.decode(errors="replace"), True

    def _started(self) -> subprocess.Popen:
        if self._process is None:
            wine = self._wine.parents[1]
            libraries = wine / "x86_64-linux-gnu"
            environment = os.environ | {
                "WINEPREFIX": str(self.folder / "prefix"), "WINEDEBUG": "-all", "WINEDLLOVERRIDES": _OVERRIDES,
                "WINESERVER": str(wine / "wine" / "wineserver"), "WINEDLLPATH": str(libraries / "wine"),
                "LD_LIBRARY_PATH": str(libraries),
            }  # fmt: skip
            self._process = subprocess.Popen(
                [str(self._wine), "host.exe"], cwd=self.folder / "app", env=environment,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            with suppress(BrokenPipeError):  # what it did not read any more
                self._process.stdin.close()
            self._process.stdout.close()
            self._process = None


def _is_done(read: bytes) -> bool:
    read = b"\n" + read
    at = read.rfind(b"\n@result\t")
    return at >= 0 and read.find(b"\n", at + 1) >= 0


def _windows(path: Path) -> str:
    """A path as wine's drive Z has it."""
    return "Z:" + str(path.resolve()).replace("/", "\\")
