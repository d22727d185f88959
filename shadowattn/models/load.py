"""A model and its tokenizer from the package, a local folder or the Hugging Face hub. Safetensors only."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, Qwen2Config

from shadowattn.artifacts import cache_folder
from shadowattn.errors import InputError
from shadowattn.models.shape import fingerprint

BUNDLED = Path(__file__).parent / "bundled"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class LoadedModel:
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    fingerprint: str


def load_bundled(*, dtype: str = "float32") -> LoadedModel:
    """The small reference model that comes with the package; its card is `README.md` beside the weights."""
    return _load(str(BUNDLED), "bundled", dtype, local_files_only=True)


def load_local(path: str | None, *, dtype: str = "float32", trust_remote_code: bool = False) -> LoadedModel:
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
    return _load(str(folder), folder.resolve().name, dtype, local_files_only=True, trust_remote_code=trust_remote_code)


def load_smollm2(*, dtype: str = "float32") -> LoadedModel:
    """SmolLM2-135M-Instruct as `python -m experiments.fetch smollm2` left it: 4-bit weights (GGUF Q4_1), dequantised.

    Slightly worse than the published float weights, so its name in rows says Q4_1.
    """
    folder = cache_folder() / "smollm2"
    if not folder.is_dir():
        raise InputError(
            f"model=smollm2: expected the model in {folder}, found nothing; fetch it with: python -m experiments.fetch smollm2"
        )
    return _load(str(folder), "SmolLM2-135M-Instruct (Q4_1)", dtype, local_files_only=True)


def load_hub(
    id: str | None, *, revision: str | None = None, dtype: str = "float32", trust_remote_code: bool = False
) -> LoadedModel:
    """A Hugging Face id, from the hub or its local cache."""
    if not id:
        raise InputError("model=hub: expected a Hugging Face id, got none; set model.id=ORGANISATION/NAME")
    return _load(id, id, dtype, revision=revision, trust_remote_code=trust_remote_code)


def _load(source: str, name: str, dtype: str, **options) -> LoadedModel:
    if dtype not in DTYPES:
        raise InputError(f"model.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=DTYPES[dtype], use_safetensors=True, **options)
        tokenizer = AutoTokenizer.from_pretrained(source, **options)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(f"model {name}: could not be loaded ({reason}); check the id or folder, or use model=bundled") from error
    return LoadedModel(model.eval(), tokenizer, name, fingerprint(model))


@dataclass(frozen=True)
class RandomShape:
    """The published shape of a model."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int


RANDOM_SHAPES = {
    "qwen2_0_5b": RandomShape(24, 14, 2, 64, 896, 4864, 151936),
    "qwen2_1_5b": RandomShape(28, 12, 2, 128, 1536, 8960, 151936),
}


def load_random(
    shape: str, *, layers: int | None = None, hidden: int | None = None, vocabulary: int | None = None, dtype: str = "float32"
) -> LoadedModel:
    """A Qwen2 of a published shape with random weights and the bundled tokenizer: for cost and plumbing, never for quality.

    `layers`, `hidden` and `vocabulary` make it smaller than it was published; its name then says so.
    """
    if shape not in RANDOM_SHAPES:
        raise InputError(f"model.shape: expected one of {', '.join(RANDOM_SHAPES)}, got {shape!r}")
    changed = {"layers": layers, "hidden": hidden, "vocabulary": vocabulary}
    changed = {name: value for name, value in changed.items() if value is not None}
    size = replace(RANDOM_SHAPES[shape], **changed)
    config = Qwen2Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate if hidden is None else 4 * size.hidden,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        max_position_embeddings=32768,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    if dtype not in DTYPES:
        raise InputError(f"model.dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype], attn_implementation="sdpa").eval()
    name = "_".join([f"random-{shape}", *(f"{key}{value}" for key, value in changed.items())])
    return LoadedModel(model, AutoTokenizer.from_pretrained(str(BUNDLED), local_files_only=True), name, fingerprint(model))
