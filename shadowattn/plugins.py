"""Parts by name: a class is called as its file is, and the file is all that adds one."""

import inspect
from importlib import import_module
from pkgutil import iter_modules
from typing import TypeVar

Part = TypeVar("Part")


def parts_of(package: str, base: type[Part]) -> dict[str, type[Part]]:
    """The classes derived from `base` that the files of a package define, by the files' names; abstract ones are none."""
    parts: dict[str, type[Part]] = {}
    for module in iter_modules(import_module(package).__path__):
        name = f"{package}.{module.name}"
        for value in vars(import_module(name)).values():
            if inspect.isclass(value) and value.__module__ == name and issubclass(value, base) and not inspect.isabstract(value):
                parts[module.name] = value
    return parts


def needs_nothing(part: type) -> bool:
    """Whether a class can be made without any argument."""
    parameters = inspect.signature(part).parameters.values()
    return all(one.default is not one.empty or one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) for one in parameters)
