"""The settings of a part: the parameters of plain types of the class or function that its `_target_` names.

They are read from its source, and nothing is imported: a misspelt setting is answered before torch is, and a class is written
once, without a schema beside it. Types and defaults are those of the source; what has another type (a bank, a tensor) is built
by a run and is no setting.
"""

import ast
from collections.abc import Iterator
from dataclasses import MISSING, field, is_dataclass, make_dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

import omegaconf
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.targets import Definition, definition
from shadowattn.errors import InputError

_PLAIN = {"int": int, "float": float, "str": str, "bool": bool, "list": list, "dict": dict, "Any": Any, "Sequence": list}
# A parameter without a default that may be None is None; another has to be given.
_REQUIRED = object()


def complete(config: DictConfig) -> None:
    """Gives every part of a configuration all of its settings, typed. Raises `InputError` on one that the part has not, and on a
    value of another type.
    """
    for parent, name, key in list(_parts(config, "")):
        schema = settings_of(parent[name]._target_)
        if schema is not None:
            made = _typed(parent[name], schema, key)
            with omegaconf.open_dict(parent):
                parent[name] = made


@cache
def settings_of(target: str) -> type | None:
    """A dataclass of a part's settings; None where the source does not tell (a method, a function with `**options`)."""
    found = definition(target)
    if found is None:
        return None
    parameters = dict(_parameters(found))
    if "**" in parameters:
        return None
    fields = [("_target_", str, field(default=target))]
    for name, (annotation, default, where) in parameters.items():
        kind = _type(annotation, where)
        if kind is None:
            continue
        value = _value(default, where, optional=_optional(annotation))
        if value is _REQUIRED and is_dataclass(kind):
            made = field(default_factory=kind)
        elif isinstance(value, list | dict):
            made = field(default_factory=lambda value=value: value)
        else:
            made = field(default="???" if value is _REQUIRED else value)
        fields.append((name, kind, made))
    return make_dataclass(target.rsplit(".", 1)[-1], fields)


def declared(target: str, name: str) -> Any:
    """The literal value of a class's attribute, its own or inherited; None where the source does not tell."""
    found = definition(target)
    while found is not None and isinstance(found.node, ast.ClassDef):
        for statement in found.node.body:
            if isinstance(statement, ast.AnnAssign | ast.Assign) and statement.value is not None:
                targets = [statement.target] if isinstance(statement, ast.AnnAssign) else statement.targets
                if any(isinstance(one, ast.Name) and one.id == name for one in targets):
                    return _literal(statement.value)
        found = next(_bases(found), None)
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


def _typed(part: DictConfig, schema: type, key: str) -> DictConfig:
    known = [name for name in schema.__dataclass_fields__ if name != "_target_"]
    for name in part:
        if name not in known and not str(name).startswith("_"):
            near = get_close_matches(str(name), known, n=1)
            meant = f"did you mean {key}.{near[0]}?" if near else f"{schema.__name__} takes {', '.join(known) or 'none'}"
            raise InputError(f"{key}.{name}: there is no such setting; {meant}")
    made, given = OmegaConf.structured(schema), OmegaConf.to_container(part)
    for name in part:
        if str(name).startswith("_"):
            with omegaconf.open_dict(made):
                made[name] = part[name]
            continue
        try:
            made = OmegaConf.merge(made, {name: given[name]})
        except OmegaConfBaseException as error:
            raise InputError(f"{key}.{name}: {' '.join(str(error).split('full_key')[0].split())}") from error
    return made


def _parameters(found: Definition) -> Iterator[tuple[str, tuple[ast.expr, ast.expr | None, Definition]]]:
    """Name, annotation, default and place of every parameter; `**` where any name is taken. Later ones replace earlier ones."""
    if isinstance(found.node, ast.ClassDef):
        for base in _bases(found):
            yield from _parameters(base)
        made = next((part for part in found.node.body if isinstance(part, ast.FunctionDef) and part.name == "__init__"), None)
        if made is None:
            for part in found.node.body:
                if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) and not _is_no_argument(part):
                    yield part.target.id, (part.annotation, part.value, found)
            return
    else:
        made = found.node
    arguments = made.args
    if arguments.kwarg is not None:
        yield "**", (ast.Constant(None), None, found)
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    both = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for argument, default in both:
        if argument.annotation is not None:
            yield argument.arg, (argument.annotation, default, found)


def _is_no_argument(field: ast.AnnAssign) -> bool:
    return "ClassVar" in _text(field.annotation) or "init=False" in (_text(field.value) if field.value else "")


def _bases(found: Definition) -> Iterator[Definition]:
    for base in found.node.bases:
        resolved = found.resolve(_text(base)) if isinstance(base, ast.Name | ast.Attribute) else None
        if resolved is not None and isinstance(resolved.node, ast.ClassDef):
            yield resolved


def _type(annotation: ast.expr, where: Definition) -> Any:
    """The type that an annotation of plain types, or of dataclasses beside it, stands for; None for any other."""
    if isinstance(annotation, ast.Constant):
        return None
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.Attribute) for node in ast.walk(annotation)):
        return None
    known = {}
    for name in names:
        if name in _PLAIN:
            known[name] = _PLAIN[name]
            continue
        nested = None if _optional(annotation) else where.resolve(name)  # an optional one is what a run builds
        if nested is None or not isinstance(nested.node, ast.ClassDef) or not nested.node.decorator_list:
            return None
        known[name] = settings_of(nested.name)
    return eval(compile(ast.Expression(annotation), "<annotation>", "eval"), {"__builtins__": {}}, known)


def _optional(annotation: ast.expr) -> bool:
    return any(isinstance(node, ast.Constant) and node.value is None for node in ast.walk(annotation))


def _value(default: ast.expr | None, where: Definition, *, optional: bool) -> Any:
    if default is None:
        return None if optional else _REQUIRED
    if isinstance(default, ast.Call) and _text(default.func) == "field":
        given = {keyword.arg: keyword.value for keyword in default.keywords}
        if "default" in given:
            return _literal(given["default"], where)
        made = given.get("default_factory")
        if isinstance(made, ast.Lambda):
            return _literal(made.body, where)
        return {"list": [], "dict": {}, "tuple": []}.get(_text(made), _REQUIRED) if made is not None else _REQUIRED
    return _literal(default, where)


def _literal(node: ast.expr, where: Definition | None = None) -> Any:
    if isinstance(node, ast.Tuple) and any(isinstance(one, ast.Starred) for one in node.elts):
        parts = [_literal(one.value) if isinstance(one, ast.Starred) else (_literal(one),) for one in node.elts]
        return tuple(value for part in parts for value in part)
    try:
        value = ast.literal_eval(node)
    except ValueError:
        if where is None or not isinstance(node, ast.Name):
            return _REQUIRED if where is not None else None
        value = where.constant(node.id)
        return _REQUIRED if value is MISSING else value
    return list(value) if isinstance(value, tuple) and where is not None else value


def _text(node: ast.AST) -> str:
    return ast.unparse(node)
