"""A model and its tokenizer from the package, a local folder, the Hugging Face hub or what was fetched. Safetensors only.

`device` says where the weights go: `cpu`, `cuda` or `cuda:N`. A device that is missing is refused before they are read.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from shadowattn.artifacts import cache_folder
from shadowattn.errors import InputError
from shadowattn.models import hub
from shadowattn.models.known import KNOWN_MODELS, KnownModel
from shadowattn.models.linear import widen_linears
from shadowattn.models.place import find_place
from shadowattn.models.shape import fingerprint

BUNDLED = Path(__file__).parent / "bundled"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SOURCES = ("auto", "hub", "fetched")


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    fingerprint: str


def load_bundled(*, dtype: str = "float32", device: str = "cpu") -> LoadedModel:
    """The small reference model that comes with the package; its card is `README.md` beside the weights."""
    return _load(str(BUNDLED), "bundled", dtype, device, local_files_only=True)


def load_local(path: str | None, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False) -> LoadedModel:
    """A folder with `config.json`, safetensors weights and a tokenizer."""
    if not path:
        raise InputError("model=local: expected a folder, got none; set model.path=FOLDER")
    folder = Path(path).expanduser()
    missing = [name for name in ("config.json", "tokenizer_config.json") if not (folder / name).is_file()]
    if not folder.is_dir():
        raise InputError(f"model.path: expected a folder, got {path!r}, which is none; set model.path=FOLDER")
    if missing or not any(folder.glob("*.safetensors")):
        raise InputError(
            f"model.path: expected config.json, tokenizer_config.json and *.safetensors in {path!r}, got "
            f"{sorted(p.name for p in folder.iterdir())[:8]}; convert the checkpoint with save_pretrained"
        )
    options = {"local_files_only": True, "trust_remote_code": trust_remote_code}
    return _load(str(folder), folder.resolve().name, dtype, device, **options)


def load_known(
    name: str, *, source: str = "auto", dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False
) -> LoadedModel:
    """A model of `known.py`, by its name there.

    `source` hub: its local cache, or online, at the pinned revision; fetched: the folder that `python -m experiments.fetch` left,
    whose 4-bit weights are dequantised and slightly worse than the published ones; auto: the hub where it is reached, else that
    folder. The result's `name` is the hub's id, or says how the fetched weights were quantised, and in which narrower dtype than
    `dtype` they are stored. Raises `InputError` on an unknown name or source, where the source lacks the model, and on a model of
    the repository's own code without `trust_remote_code`.
    """
    if name not in KNOWN_MODELS:
        raise InputError(f"model.name: expected one of {', '.join(KNOWN_MODELS)}, got {name!r}")
    if source not in SOURCES:
        raise InputError(f"model.source: expected one of {', '.join(SOURCES)}, got {source!r}")
    find_place(device)
    entry = KNOWN_MODELS[name]
    if source == "fetched":
        return _load_fetched(name, entry, dtype, device)
    if entry.remote_code and not trust_remote_code:
        raise InputError(
            f"model={name}: {entry.hub_id} runs Python of its own, written for an older transformers; allow it with: "
            "model.trust_remote_code=true, or measure its shape with random weights: model=random "
            f"model.shape={name}"
        )
    options = {"revision": entry.revision, "trust_remote_code": trust_remote_code}
    if hub.is_cached(entry.hub_id, entry.revision):
        return _load(entry.hub_id, entry.hub_id, dtype, device, local_files_only=True, **options)
    try:
        hub.check_reached(entry.hub_id, entry.revision)
    except ConnectionError as error:
        if source == "auto" and entry.fetched and _fetched_folder(name).is_dir():
            return _load_fetched(name, entry, dtype, device)
        raise InputError(_not_reached(name, entry, source, error)) from error
    return _load(entry.hub_id, entry.hub_id, dtype, device, **options)


def _fetched_folder(name: str) -> Path:
    return cache_folder() / name


def _load_fetched(name: str, entry: KnownModel, dtype: str, device: str) -> LoadedModel:
    if not entry.fetched:
        fetchable = [f"model={other}" for other, one in KNOWN_MODELS.items() if one.fetched]
        raise InputError(
            f"model={name}: expected a model that can be fetched ({', '.join(fetchable)}), got one of the hub alone; use "
            f"model.source=hub, or a folder of your own: model=local model.path=FOLDER"
        )
    folder = _fetched_folder(name)
    if not folder.is_dir():
        raise InputError(
            f"model={name}: expected the model in {folder}, found nothing; fetch it in a checkout with: python -m "
            f"experiments.fetch {name}; or load a folder of your own: shadowattn.models.load_local(path)"
        )
    loaded = _load(str(folder), entry.fetched, dtype, device, local_files_only=True)
    stored = json.loads((folder / "config.json").read_text()).get("dtype")  # as `fetch` wrote it
    rounded = stored in DTYPES and DTYPES[stored].itemsize < DTYPES[dtype].itemsize
    return replace(loaded, name=f"{entry.fetched}, weights rounded to {stored}") if rounded else loaded


def _not_reached(name: str, entry: KnownModel, source: str, error: ConnectionError) -> str:
    revision = f" at revision {entry.revision}" if entry.revision else ""
    nor, folder = "", "a folder of your own: model=local model.path=FOLDER, in Python shadowattn.models.load_local(FOLDER)"
    remedy = f"use {folder}"
    if entry.fetched and source == "auto":
        nor = f", nor is it in {_fetched_folder(name)}"
        remedy = f"fetch it in a checkout with: python -m experiments.fetch {name}; or use {folder}"
    elif entry.fetched:
        remedy = f"use model.source=fetched after, in a checkout: python -m experiments.fetch {name}; or use {folder}"
    return (
        f"model={name}: {entry.hub_id}{revision} is not in the hub's local cache, and the hub was not reached ({error}){nor}; "
        f"go online for the first run, or {remedy}"
    )


def load_hub(
    id: str | None,
    *,
    revision: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """A Hugging Face id, from the hub or its local cache."""
    if not id:
        raise InputError("model=hub: expected a Hugging Face id, got none; set model.id=ORGANISATION/NAME")
    return _load(id, id, dtype, device, revision=revision, trust_remote_code=trust_remote_code)


def _load(source: str, name: str, dtype: str, device: str, **options) -> LoadedModel:
    place = find_place(device)
    if dtype not in DTYPES:
        raise InputError(f"model.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    expected = (OSError, ValueError, KeyError, SafetensorError)
    if options.get("trust_remote_code"):
        expected += (ImportError, AttributeError, TypeError)  # of a model's own code
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype], use_safetensors=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except expected as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"model {name}: could not be loaded ({reason}); check the id or folder, or use model=bundled") from error
    digest = fingerprint(model)
    return LoadedModel(_moved(model.eval(), place), tokenizer, name, digest)


def _moved(model: PreTrainedModel, place: torch.device) -> PreTrainedModel:
    """The model on a device, its linear layers by products that the device has.

    Raises `InputError` where the device has no room for it.
    """
    try:
        model = model.to(place)
    except torch.OutOfMemoryError as error:
        size = model.get_memory_footprint() / 2**30
        raise InputError(
            f"model.device: expected room for {size:.1f} GiB of weights on {place}, got less; use model.dtype=bfloat16, a "
            "smaller model, or model.device=cpu"
        ) from error
    widen_linears(model)
    return model


def load_random(
    shape: str,
    *,
    layers: int | None = None,
    hidden: int | None = None,
    vocabulary: int | None = None,
    dtype: str = "float32",
    device: str = "cpu",
) -> LoadedModel:
    """A known model's published shape with random weights and the bundled tokenizer: for cost and plumbing, never for quality.

    PhoneLM's shapes are those of the nearest Llama. `layers`, `hidden` and `vocabulary` make a model smaller than it was
    published; its name then says so. Raises `InputError` on an unknown shape or dtype, and on sizes that do not fit together.
    """
    if shape not in KNOWN_MODELS:
        raise InputError(f"model.shape: expected one of {', '.join(KNOWN_MODELS)}, got {shape!r}")
    if dtype not in DTYPES:
        raise InputError(f"model.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    place = find_place(device)
    changed = {"layers": layers, "hidden": hidden, "vocabulary": vocabulary}
    changed = {name: value for name, value in changed.items() if value is not None}
    size = replace(KNOWN_MODELS[shape].shape, **changed)
    if hidden is not None:
        size = replace(size, intermediate=4 * hidden)
    tokenizer = AutoTokenizer.from_pretrained(str(BUNDLED), local_files_only=True)
    if size.vocabulary < len(tokenizer):
        raise InputError(
            f"model.vocabulary: expected at least the {len(tokenizer)} tokens of the bundled tokenizer, got {size.vocabulary}"
        )
    try:
        config = size.build_config()
    except StrictDataclassError as error:
        raise InputError(f"model.hidden: expected a size that fits {shape} ({' '.join(str(error).split())})") from error
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()
    name = "_".join([f"random-{shape}", *(f"{key}{value}" for key, value in changed.items())])
    return LoadedModel(_moved(model, place), tokenizer, name, fingerprint(model))
