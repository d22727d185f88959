"""The files of the authors' artifact, read and written: perplexities, retentions, and the measurement's checkpoint.

heads.txt            MODEL LAYER HEAD PERPLEXITY            a line each; `#` begins a comment
layers.txt           MODEL LAYER PERPLEXITY
head-retention.txt   a line a layer, a value a head, a space after every value, the last one too
measurements.json    both tables, null where a measurement is pending, and what they were calibrated on
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from shadowattn.artifacts import read_json, write_json, write_text
from shadowattn.errors import InputError
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.types import Importance, RetentionProfile, ScaleGrid

MEASUREMENTS_VERSION = 1
_REMEDY = "give the file as the artifact wrote it"

Table = tuple[tuple[float, ...], ...]


def write_importance(importance: Importance, heads: Path, layers: Path, *, model: str) -> None:
    """Writes heads.txt and layers.txt. White space in the model's name becomes `_`: the formats separate by it."""
    label = "_".join(model.split()) or "model"
    table = importance.head_ppl
    lines = [f"{label} {layer} {head} {ppl!r}\n" for layer, row in enumerate(table) for head, ppl in enumerate(row)]
    write_text(Path(heads), "".join(lines))
    write_text(Path(layers), "".join(f"{label} {layer} {ppl!r}\n" for layer, ppl in enumerate(importance.layer_ppl)))


def read_importance(heads: Path, layers: Path, *, base_ppl: float, ablation: str, model: str | None = None) -> Importance:
    """Perplexities from heads.txt and layers.txt; what the files do not say is given.

    Raises `InputError` on a line that cannot be read, an index twice or missing, perplexities that are none, several
    models or another than `model`.
    """
    head_ppl = _grid(_entries(Path(heads), 2, model), Path(heads))
    layer_entries = _entries(Path(layers), 1, model)
    layer_ppl = _sequence({key[0]: value for key, value in layer_entries.items()}, Path(layers))
    if len(head_ppl) != len(layer_ppl):
        raise InputError(f"{layers}: expected {len(head_ppl)} layers as in {heads}, got {len(layer_ppl)}; {_REMEDY}")
    return Importance(head_ppl, layer_ppl, base_ppl, ablation, tokens=0)


def write_retention(retention: Sequence[Sequence[float]], path: Path) -> None:
    """Writes head-retention.txt: Python's shortest exact decimals, so that reading gives the same numbers."""
    write_text(Path(path), "".join("".join(f"{float(value)!r} " for value in layer) + "\n" for layer in retention))


def read_retention(path: Path) -> Table:
    """Retentions [L][H] from head-retention.txt. Raises `InputError` on ragged lines and on values outside (0, 1]."""
    rows = [line.split() for line in _text(Path(path)).splitlines() if line.strip()]
    values = tuple(tuple(_number(path, n + 1, word) for word in row) for n, row in enumerate(rows))
    if not values or len({len(row) for row in values}) != 1:
        raise InputError(
            f"{path}: expected a line a layer with as many values each, got {[len(row) for row in values][:8]} values; {_REMEDY}"
        )
    wrong = [value for row in values for value in row if not 0 < value <= 1]
    if wrong:
        raise InputError(f"{path}: expected retentions in (0, 1], got {wrong[0]}; {_REMEDY}")
    return values


def import_profile(path: Path, model: PreTrainedModel, *, scales: ScaleGrid, name: str) -> RetentionProfile:
    """A retention file as a profile of `model`, which it is bound to from now on by the fingerprint.

    The file itself names no model. `scales` are those to build graphs for, calibrated on this model. Raises `InputError`
    where the file does not have the model's layers and heads.
    """
    retention, shape = read_retention(path), model_shape(model)
    check_shape(path, retention, shape.layers, shape.heads)
    return RetentionProfile(retention, scales, shape.head_dim, fingerprint(model), name, "file")


def check_shape(path: Path | str, retention: Table, layers: int, heads: int) -> None:
    """Raises `InputError` where a table is not [layers][heads]."""
    if (len(retention), len(retention[0])) != (layers, heads):
        raise InputError(
            f"{path}: it is for {len(retention)} layers × {len(retention[0])} heads, the model has {layers} × {heads}; "
            "give a profile of this model"
        )


def write_measurements(importance: Importance, path: Path, *, model: str, calibration: Mapping[str, Any]) -> None:
    """Writes measurements.json, complete."""
    content = {
        "schema_version": MEASUREMENTS_VERSION,
        "method": f"ablation-{importance.ablation}",
        "artifact": "shadowattn",
        "model": model,
        "head_perplexity": [list(layer) for layer in importance.head_ppl],
        "layer_perplexity": list(importance.layer_ppl),
        "base_perplexity": importance.base_ppl,  # an addition: the artifact never subtracts it
        "calibration": {"ablation_mode": importance.ablation, "tokens": importance.tokens} | dict(calibration),
    }
    write_json(Path(path), content)


def read_measurements(path: Path, *, base_ppl: float | None = None, model: str | None = None) -> Importance:
    """Perplexities from measurements.json; `base_ppl` is needed where the file has none, as the artifact's do.

    Raises `InputError` on another schema version or model, on pending measurements and on what is no perplexity.
    """
    path = Path(path)
    content = read_json(path, _REMEDY)
    if not isinstance(content, dict) or content.get("schema_version") != MEASUREMENTS_VERSION:
        raise InputError(f"{path}: expected schema_version {MEASUREMENTS_VERSION}; {_REMEDY}")
    if model is not None and content.get("model") != model:
        raise InputError(f"{path}: expected measurements of {model!r}, got {content.get('model')!r}; {_REMEDY}")
    heads, layers = content.get("head_perplexity"), content.get("layer_perplexity")
    base_ppl = content.get("base_perplexity") if base_ppl is None else base_ppl
    try:
        pending = sum(value is None for row in heads for value in row) + sum(value is None for value in layers)
        if pending:
            raise InputError(f"{path}: {pending} measurements are pending; finish it with the program that began it")
        table = {(i, h): _positive(path, value) for i, row in enumerate(heads) for h, value in enumerate(row)}
        layer_ppl = tuple(_positive(path, value) for value in layers)
    except TypeError as error:
        raise InputError(f"{path}: expected tables head_perplexity [L][H] and layer_perplexity [L]; {_REMEDY}") from error
    head_ppl = _grid(table, path)
    if len(head_ppl) != len(layer_ppl):
        raise InputError(f"{path}: expected as many layers in both tables, got {len(head_ppl)} and {len(layer_ppl)}; {_REMEDY}")
    if base_ppl is None:
        raise InputError(f"{path}: it names no base perplexity; give base_ppl, the unchanged model's on the same text")
    calibration = content.get("calibration") or {}
    ablation, tokens = calibration.get("ablation_mode", "unknown"), calibration.get("tokens", 0)
    return Importance(head_ppl, layer_ppl, _positive(path, base_ppl), ablation, tokens)


def _entries(path: Path, indices: int, model: str | None) -> dict[tuple[int, ...], float]:
    """(indices) → perplexity for each line `MODEL index … PERPLEXITY`."""
    entries, labels = {}, set() if model is None else {"_".join(model.split())}
    for number, line in enumerate(_text(path).splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        if len(words) != indices + 2 or not all(word.isdecimal() for word in words[1:-1]):
            raise InputError(
                f"{path}, line {number}: expected MODEL, {indices} indices and a perplexity, got {line!r}; {_REMEDY}"
            )
        labels.add(words[0])
        if len(labels) > 1:
            raise InputError(f"{path}, line {number}: expected one model, got {' and '.join(sorted(labels))}; {_REMEDY}")
        key = tuple(int(word) for word in words[1:-1])
        if key in entries:
            raise InputError(f"{path}, line {number}: {' '.join(words[1:-1])} is there twice; {_REMEDY}")
        entries[key] = _positive(path, _number(path, number, words[-1]))
    return entries


def _grid(entries: Mapping[tuple[int, ...], float], path: Path) -> Table:
    layers = 1 + max((key[0] for key in entries), default=-1)
    heads = 1 + max((key[1] for key in entries), default=-1)
    if not entries or len(entries) != layers * heads:
        raise InputError(f"{path}: expected a value for each of {layers} layers × {heads} heads, got {len(entries)}; {_REMEDY}")
    return tuple(tuple(entries[layer, head] for head in range(heads)) for layer in range(layers))


def _sequence(entries: Mapping[int, float], path: Path) -> tuple[float, ...]:
    if sorted(entries) != list(range(len(entries))):
        raise InputError(f"{path}: expected the layers 0 … {len(entries) - 1}, got {sorted(entries)}; {_REMEDY}")
    return tuple(entries[layer] for layer in range(len(entries)))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}); {_REMEDY}") from error


def _number(path: Path | str, line: int, word: str) -> float:
    try:
        return float(word)
    except ValueError as error:
        raise InputError(f"{path}, line {line}: expected a number, got {word!r}; {_REMEDY}") from error


def _positive(path: Path, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise InputError(f"{path}: expected positive, finite perplexities, got {value!r}; {_REMEDY}")
    return float(value)
