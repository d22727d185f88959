"""The parts that a configuration names by `_target_`: whether they can be imported, and which files they are in."""

import ast
import sysconfig
import traceback
from collections.abc import Iterator
from dataclasses import MISSING, dataclass
from difflib import get_close_matches
from functools import cache
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf

from shadowattn.errors import InputError

# What a checkout and a wheel hold of this project.
PACKAGES = ("shadowattn", "experiments")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))


def named_targets(settings: Any, key: str = "") -> dict[str, str]:
    """Every `_target_` in resolved settings, by the key that holds it."""
    if isinstance(settings, DictConfig):
        settings = OmegaConf.to_container(settings, resolve=True)
    if isinstance(settings, list):
        settings = dict(enumerate(settings))
    if not isinstance(settings, dict):
        return {}
    targets = {f"{key}_target_": settings["_target_"]} if "_target_" in settings else {}
    for name, value in settings.items():
        targets |= named_targets(value, f"{key}{name}.")
    return targets


def check_modules(settings: Any) -> None:
    """Raises `InputError` where a part's module, or its name within that, is not there. Imports nothing."""
    for key, target in named_targets(settings).items():
        if not isinstance(target, str) or not target:
            raise InputError(f"{key}: expected MODULE.NAME, got {target!r}")
        names = target.split(".")
        if not all(name.isidentifier() for name in names):
            raise _unknown(key, target, "that is no dotted name")
        source, rest = _source(names)
        if source is None:
            raise _unknown(key, target, f"there is no module {names[0]!r}")
        defined = _defined(source) if source.suffix == ".py" and rest else None
        if defined is not None and rest[0] not in defined:
            near = get_close_matches(rest[0], defined, n=1)
            meant = f"; did you mean {near[0]}?" if near else ""
            raise _unknown(key, target, f"{_shown_path(source)} defines no {rest[0]}{meant}")


@dataclass(frozen=True)
class Definition:
    """A class or function as its source defines it; `name` is its whole dotted name."""

    path: Path
    name: str
    node: ast.ClassDef | ast.FunctionDef

    def resolve(self, name: str) -> "Definition | None":
        """What a name, or MODULE.NAME, stands for in the same module: defined there, or imported."""
        first, _, rest = name.partition(".")
        if not rest:
            return definition(f"{self._module}.{name}")
        for statement in _tree(self.path).body:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == first:
                        base = "" if isinstance(statement, ast.Import) else f"{_origin(statement, self._module, self.path)}."
                        return definition(f"{base}{alias.name}.{rest}")
        return None

    def constant(self, name: str) -> Any:
        """The literal value of a name of the same module; `MISSING` where there is none."""
        for statement in _tree(self.path).body:
            plain, typed = isinstance(statement, ast.Assign), isinstance(statement, ast.AnnAssign)
            targets = statement.targets if plain else [statement.target] if typed and statement.value else []
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                try:
                    return ast.literal_eval(statement.value)
                except ValueError:
                    break
        return MISSING

    @property
    def _module(self) -> str:
        return self.name.rsplit(".", 1)[0]


@cache
def definition(target: str) -> Definition | None:
    """Where a target is defined, found without importing it; None where its source does not tell."""
    source, rest = _source(target.split("."))
    if source is None or source.suffix != ".py" or len(rest) != 1:
        return None
    module, (name,) = target.rsplit(".", 1)[0], rest
    for statement in _tree(source).body:
        if isinstance(statement, ast.ClassDef | ast.FunctionDef) and statement.name == name:
            return Definition(source, target, statement)
        if isinstance(statement, ast.ImportFrom):
            for alias in statement.names:
                if (alias.asname or alias.name) == name:
                    return definition(f"{_origin(statement, module, source)}.{alias.name}")
    return None


def _origin(statement: ast.ImportFrom, module: str, path: Path) -> str:
    """The module that a statement of `module` imports from."""
    if not statement.level:
        return statement.module
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    return resolve_name("." * statement.level + (statement.module or ""), package)


@cache
def _tree(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_bytes())
    except SyntaxError:  # importing it says where
        return ast.Module([], [])


def check_targets(settings: Any) -> None:
    """Imports every part that settings name. Raises `InputError` where one is missing or its module cannot be imported."""
    for key, target in named_targets(settings).items():
        try:
            get_object(target)
        except ImportError as error:  # what Hydra makes of whatever a module raises
            cause = error.__cause__ or error
            at = traceback.extract_tb(cause.__traceback__)[-1]
            place = f" ({Path(at.filename).name}:{at.lineno})" if not _is_installed(Path(at.filename)) else ""
            raise _unknown(key, target, f"{type(cause).__name__}: {' '.join(str(cause).split())}{place}") from error


def source_files(target: str) -> list[Path]:
    """The file that defines a target outside of this project, and what it imports of its own neighbours, however deep."""
    files: dict[Path, None] = {}
    _follow(_module(target), files)
    return sorted(files)


def _unknown(key: str, target: str, reason: str) -> InputError:
    return InputError(
        f"{key}: expected MODULE.NAME that can be imported, got {target!r}: {reason}; check the spelling, and start from the "
        "folder that holds the module or name that folder in PYTHONPATH"
    )


def _source(names: list[str]) -> tuple[Path | None, list[str]]:
    """The file of the longest part of a dotted name that is a module, found without importing its packages; and the rest."""
    spec = find_spec(names[0])
    if spec is None:
        return None, names
    at, folders = spec.origin, spec.submodule_search_locations
    for count, name in enumerate(names[1:], start=1):
        inner = PathFinder.find_spec(name, folders) if folders else None
        if inner is None:
            return Path(at or "built-in"), names[count:]
        at, folders = inner.origin, inner.submodule_search_locations
    return Path(at or "built-in"), []


def _defined(path: Path) -> set[str] | None:
    """The names that a module has, without those local to its functions and classes; None where only running it tells."""
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:  # importing it says where
        return None
    if any(isinstance(node, ast.Global) or (isinstance(node, ast.Name) and node.id == "globals") for node in ast.walk(tree)):
        return None
    names: set[str] = set()
    for node in _module_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, _SCOPES):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return None if names & {"*", "__getattr__"} else names


def _module_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes below one that are not within a function or a class."""
    for inner in ast.iter_child_nodes(node):
        yield inner
        if not isinstance(inner, _SCOPES):
            yield from _module_nodes(inner)


def _shown_path(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _module(target: str) -> str:
    """The longest part of a target that is a module."""
    names = target.split(".")
    ends = range(len(names) - 1, 0, -1)
    return next((name for end in ends if _spec(name := ".".join(names[:end])) is not None), names[0])


def _spec(name: str) -> ModuleSpec | None:
    try:
        return find_spec(name)
    except ModuleNotFoundError:  # a name within something that is no package
        return None


def _follow(name: str, files: dict[Path, None]) -> None:
    """Adds a module's file, and those of all modules that it imports."""
    spec = _spec(name)
    if name.split(".")[0] in PACKAGES or spec is None or not spec.origin or not spec.origin.endswith(".py"):
        return
    path = Path(spec.origin)
    if path in files:
        return
    if not _is_installed(path):
        files[path] = None
        for imported in _imports(path, spec.name if spec.submodule_search_locations else spec.parent):
            _follow(imported, files)
    elif not files:  # an installed package's part: its own file stands for it
        files[path] = None


def _imports(path: Path, package: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if _is_local_package(base))


def _is_local_package(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and bool(spec.submodule_search_locations) and not _is_installed(Path(spec.origin or "/"))


def _is_installed(path: Path) -> bool:
    return path.is_relative_to(_STANDARD_LIBRARY) or not {"site-packages", "dist-packages"}.isdisjoint(path.parts)
