"""The settings of a part: the parameters of plain types of the class or function that its `_target_` names.

They are read from its source, and nothing is imported: a misspelt setting is answered before torch is, and a class is written
once, without a schema beside it. Types and defaults are those of the source; what has another type (a bank, a tensor) is built
by a run and is no setting.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any, Optional, Union

import omegaconf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.part_targets import Definition, definition
from shadowattn.errors import InputError

_PLAIN = {
    **{"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "Any": Any, "Sequence": list},
    **{"tuple": Any, "Literal": Any, "Path": str, "Optional": Optional, "Union": Union},
}
# A parameter that has to be given; one whose default only running the source tells, which is not passed unless it is set.
_REQUIRED, _UNREAD = object(), object()


@dataclass(frozen=True)
class Settings:
    """`schema` a dataclass of the settings whose defaults are known; `others` may be set too, to any value, `parts` to parts."""

    schema: type
    others: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


def complete(config: DictConfig) -> None:
    """Gives every part of a configuration all of its settings, typed. Raises `InputError` on one that the part has not, and on a
    value of another type.
    """
    for parent, name, key in list(_parts(config, "")):
        settings = settings_of(parent[name]._target_)
        if settings is not None:
            part = _typed(parent[name], settings, key)
            with omegaconf.open_dict(parent):
                parent[name] = part


@cache
def settings_of(target: str) -> Settings | None:
    """What a part can be set to; None where the source does not tell (a method, a function with `**options`)."""
    source = definition(target)
    if source is None:
        return None
    parameters = dict(_parameters(source))
    if "**" in parameters:
        return None
    entries, others, parts = [("_target_", str, field(default=target))], [], []
    for name, (annotation, default, where) in parameters.items():
        kind = _type(annotation, where)
        if kind is None:
            if _is_part(annotation, where):
                parts.append(name)
            continue
        value = _value(default, where)
        if value is _REQUIRED and _optional(annotation):
            value = None
        if value is _UNREAD:
            others.append(name)
        elif isinstance(value, str) and value == _NESTED:
            entries.append((name, kind, field(default_factory=kind)))
        elif isinstance(value, list | dict):
            entries.append((name, _storable(kind, value), field(default_factory=lambda value=value: value)))
        else:
            value = "???" if value is _REQUIRED else value
            entries.append((name, _storable(kind, value), field(default=value)))
    return Settings(make_dataclass(target.rsplit(".", 1)[-1], entries), tuple(others), tuple(parts))


def schema_of(target: str) -> type:
    """A dataclass of the settings of a class, for a group of the configuration that says more than them."""
    return _without_target(settings_of(target).schema)


def _without_target(schema: type) -> type:
    entries = []
    for one in fields(schema):
        if is_dataclass(one.type):
            nested = _without_target(one.type)
            entries.append((one.name, nested, field(default_factory=nested)))
        elif one.name != "_target_":
            entries.append((one.name, one.type, field(default=one.default, default_factory=one.default_factory)))
    return make_dataclass(schema.__name__, entries)


def _storable(kind: Any, value: Any) -> Any:
    """The type, or any where a configuration cannot hold it, or where the default is of another."""
    try:
        OmegaConf.structured(make_dataclass("Probe", [("x", kind, field(default_factory=lambda: value))]))
    except (OmegaConfBaseException, ValueError, TypeError):
        return Any
    return kind


def declared(target: str, name: str) -> Any:
    """The literal value of a class's attribute, its own or inherited; None where the source does not tell."""
    source = definition(target)
    while source is not None and isinstance(source.node, ast.ClassDef):
        for statement in source.node.body:
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
                if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                    value = _literal(statement.value, source)
                    return None if value is _UNREAD else value
        source = next(_bases(source), None)
    return None


def _parts(node: DictConfig, key: str) -> Iterator[tuple[DictConfig, str, str]]:
    """Every part below a node: what holds it, its name there, and its whole key."""
    for name in node:
        if OmegaConf.is_missing(node, name) or not OmegaConf.is_dict(node[name]) or node[name] is None:
            continue
        whole = f"{key}{name}"
        yield from _parts(node[name], f"{whole}.")
        if node[name].get("_target_"):
            yield node, name, whole


def _typed(part: DictConfig, settings: Settings, key: str) -> DictConfig:
    schema = settings.schema
    names = [*(name for name in schema.__dataclass_fields__ if name != "_target_"), *settings.others, *settings.parts]
    typed_part, entries = OmegaConf.structured(schema), OmegaConf.to_container(part)
    for name in part:
        if name in settings.parts and not (isinstance(entries[name], dict) and "_target_" in entries[name]):
            raise InputError(
                f"{key}.{name}: expected a part with settings of its own, got {entries[name]}; name it by "
                f"{key}.{name}._target_=CLASS"
            )
        if name in (*settings.others, *settings.parts) or str(name).startswith("_"):
            with omegaconf.open_dict(typed_part):
                typed_part[name] = entries[name]
            continue
        if name not in names:
            near = get_close_matches(str(name), names, n=1)
            meant = f"did you mean {key}.{near[0]}?" if near else f"{schema.__name__} takes {', '.join(names) or 'none'}"
            raise InputError(f"{key}.{name}: there is no such setting; {meant}")
        try:
            typed_part = OmegaConf.merge(typed_part, {name: entries[name]})
        except OmegaConfBaseException as error:
            raise InputError(_mistyped(f"{key}.{name}", entries[name], typed_part[name], str(error))) from error
        if isinstance(entries[name], int) and entries[name] not in (0, 1) and typed_part[name] is True:  # so OmegaConf reads it
            raise InputError(f"{key}.{name}: expected true or false, got {entries[name]}")
    return typed_part


def _mistyped(key: str, value: Any, default: Any, message: str) -> str:
    """What OmegaConf's `message` on a setting, or on one within it, says in our words where it is not plain."""
    if "is not a ListConfig" in message:
        return f"{key}: expected a list, such as {key}=[{value}], got {value}"
    reason, _, within = " ".join(message.split()).partition(" full_key: ")
    parent = key.rpartition(".")[0]
    full = f"{parent}.{within.split()[0]}" if within else key
    if re.match(r"Key '\w+' not in", reason):
        near = get_close_matches(full.rpartition(".")[2], list(default), n=1)
        meant = f"did you mean {key}.{near[0]}?" if near else f"{key} takes {', '.join(one for one in default if one[0] != '_')}"
        return f"{full}: there is no such setting; {meant}"
    return f"{full}: {reason}"


def _parameters(source: Definition) -> Iterator[tuple[str, tuple[ast.expr | None, ast.expr | None, Definition]]]:
    """Name, annotation, default and place of every parameter; `**` where any name is taken. Later ones replace earlier ones."""
    if isinstance(source.node, ast.FunctionDef):
        yield from _arguments(source.node, source)
        return
    constructor = next((part for part in source.node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
    if constructor is not None:
        built = set(_built_by_a_run(source))
        yield from ((name, how) for name, how in _arguments(constructor, source) if name not in built)
        return
    inherited: dict[str, Any] = {}
    for base in reversed(list(_bases(source))):  # of two, the first counts
        inherited |= dict(_parameters(base))
    for part in source.node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            if _is_no_argument(part):
                inherited.pop(part.target.id, None)
            else:
                inherited[part.target.id] = (part.annotation, part.value, source)
    for built in _built_by_a_run(source):
        inherited.pop(built, None)
    yield from inherited.items()


def _arguments(function: ast.FunctionDef, source: Definition) -> Iterator[tuple[str, tuple]]:
    if function.args.kwarg is not None:
        yield "**", (None, None, source)
    positional = [*function.args.posonlyargs, *function.args.args]
    if isinstance(source.node, ast.ClassDef):
        positional = positional[1:]  # self
    defaults = [None] * (len(positional) - len(function.args.defaults)) + function.args.defaults
    both = [*zip(positional, defaults, strict=True), *zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)]
    for argument, default in both:
        yield argument.arg, (argument.annotation, default, source)


def _is_no_argument(field: ast.AnnAssign) -> bool:
    return "ClassVar" in _text(field.annotation) or "init=False" in (_text(field.value) if field.value else "")


def _built_by_a_run(source: Definition) -> Iterator[str]:
    """What the class itself says that it `needs`: parameters that a run builds."""
    for part in source.node.body:
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and part.target.id == "needs" and part.value:
            yield from (node.value for node in ast.walk(part.value) if isinstance(node, ast.Constant))


def _bases(source: Definition) -> Iterator[Definition]:
    for base in source.node.bases:
        resolved = source.resolve(_text(base)) if isinstance(base, ast.Name | ast.Attribute) else None
        if resolved is not None and isinstance(resolved.node, ast.ClassDef):
            yield resolved


def _type(annotation: ast.expr | None, where: Definition) -> Any:
    """The type that an annotation of plain types, or of dataclasses, stands for; None where it names any other class."""
    if annotation is None:
        return Any
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):  # in quotes
        annotation = ast.parse(annotation.value, mode="eval").body
    if isinstance(annotation, ast.Subscript) and _text(annotation.value).split(".")[-1] in ("Literal", "tuple", "Tuple"):
        return Any
    if any(isinstance(node, ast.Attribute) for node in ast.walk(annotation)):
        return None
    types = {}
    for name in {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}:
        if name in _PLAIN:
            types[name] = _PLAIN[name]
            continue
        nested = None if _optional(annotation) else where.resolve(name)  # an optional one is what a run builds
        if nested is None or not isinstance(nested.node, ast.ClassDef) or not nested.node.decorator_list:
            return None
        types[name] = settings_of(nested.name).schema
    return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), {"__builtins__": {}}, types)


def _is_part(annotation: ast.expr, where: Definition) -> bool:
    """Whether a parameter is a part of its own, to be named by `_target_`: of a class of this project that others derive from."""
    named = where.resolve(annotation.id) if isinstance(annotation, ast.Name) else None
    return named is not None and isinstance(named.node, ast.ClassDef) and any(_text(base) == "ABC" for base in named.node.bases)


def _optional(annotation: ast.expr | None) -> bool:
    nodes = [] if annotation is None else list(ast.walk(annotation))
    none = any(isinstance(node, ast.Constant) and node.value is None for node in nodes)
    return none or any(isinstance(node, ast.Name) and node.id == "Optional" for node in nodes)


# In place of a default: the dataclass of the parameter's own type, as it is by default.
_NESTED = "<its own>"


def _value(default: ast.expr | None, where: Definition) -> Any:
    if default is None:
        return _REQUIRED
    if isinstance(default, ast.Call) and _text(default.func).split(".")[-1] == "field":
        options = {keyword.arg: keyword.value for keyword in default.keywords}
        if "default" in options:
            return _literal(options["default"], where)
        factory = options.get("default_factory")
        if factory is None:
            return _REQUIRED
        if isinstance(factory, ast.Lambda):
            return _literal(factory.body, where)
        if _text(factory) in ("list", "dict", "tuple"):
            return {} if _text(factory) == "dict" else []
        return _NESTED if isinstance(factory, ast.Name) and where.resolve(factory.id) is not None else _UNREAD
    return _literal(default, where)


def _literal(node: ast.expr, where: Definition) -> Any:
    """The value of a literal, or of a name of the module that stands for one; `_UNREAD` for any other expression."""
    if isinstance(node, ast.Tuple) and any(isinstance(one, ast.Starred) for one in node.elts):
        parts = [_literal(one.value, where) if isinstance(one, ast.Starred) else (_literal(one, where),) for one in node.elts]
        values = [value for part in parts for value in (part if isinstance(part, tuple | list) else (_UNREAD,))]
        return _UNREAD if any(value is _UNREAD for value in values) else tuple(values)
    if isinstance(node, ast.Name):
        value = where.constant(node.id)
        return _UNREAD if value is MISSING else value
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return _UNREAD


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
