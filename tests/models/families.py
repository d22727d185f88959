"""Every decoder family of transformers as a tiny random model, and what becomes of it inside `attach` and in `calibrate`.

`python -m tests.models.families` measures all families and writes `families.json` beside this file and `docs/models.md`.
"""

import json
import re
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as MODELS

import shadowattn
from shadowattn.artifacts import Units
from shadowattn.calibration import Windows
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.models import attended_layers, model_shape
from shadowattn.offline import measure_ablations
from shadowattn.online.estimators.oracle import Oracle
from tests.profiles import profile_for

TABLE = Path(__file__).parent / "families.json"
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TOKENS, CHANGED, WINDOW = 20, 14, 6

# Whatever a family's config calls its sizes. Only names that the config has already are set.
_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "emb_dim", "embedding_size", "lru_width"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "dim_ff", "n_inner", "decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("shared_intermediate_size", "mlp_hidden_size", "ffn_hidden_size", "block_ff_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    "word_embed_proj_dim": 32,
    "num_key_value_heads": 2,
    **dict.fromkeys(("head_dim", "attention_head_dim", "dim_head", "global_head_dim", "swa_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_num_value_heads"), 8),
    "linear_num_key_heads": 2,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k", "num_experts_per_token", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "mamba_n_groups"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "index_head_dim", "qk_head_dim", "chunk_size", "mamba_chunk_size"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "mamba_d_state", "mamba_d_head", "state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "laurel_rank"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "attention_chunk_size"), 8),
    **dict.fromkeys(("conv_kernel", "mamba_dt_rank", "rotary_dim"), 4),
    **dict.fromkeys(("mamba_expand", "n_mamba_heads", "index_n_heads", "type_vocab_size", "altup_num_inputs"), 2),
    "index_topk": 64,
    "num_kv_shared_layers": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": WINDOW,
    "is_decoder": True,
}
_WITHOUT: dict[str, tuple[str, ...]] = {
    "prophetnet": ("num_hidden_layers",),
    "xlnet": ("max_position_embeddings",),
    "falcon": ("head_dim",),
    "xlstm": ("head_dim", "v_head_dim", "chunk_size"),
    "bamba": ("layer_types",),
    "jamba": ("layer_types",),
    "recurrent_gemma": ("layer_types",),
    "zamba": ("layer_types",),
    "zamba2": ("layer_types",),
}
# Multi-head latent attention expands keys to all heads.
_LATENT = {"num_key_value_heads": 4}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_OTHER: dict[str, dict] = {
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa"), _LATENT),
    **dict.fromkeys(("hy_v4", "kimi_linear", "longcat_flash", "minicpm3", "youtu", "dots3_note_text", "bailing_hybrid"), _LATENT),
    "bamba": {"attn_layer_indices": [1]},
    "granitemoehybrid": {"num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE},
    },
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "moshi": {"sliding_window": 3000},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 16,
        "indexer_compress_ratio": 2,
    },
    "recurrent_gemma": {"num_hidden_layers": 2, "block_types": ["recurrent", "attention"]},
    "reformer": {"axial_pos_embds_dim": (16, 16), "axial_pos_shape": (4, 5), "attn_layers": ["local", "local"]},
    "roc_bert": {"pronunciation_vocab_size": 64, "shape_vocab_size": 64, "pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
_FULL = {"layer_types": ["full_attention", "full_attention"], "num_hidden_layers": 2}
# The same family with other settings that decide over the outcome.
_VARIANTS: dict[str, dict] = {
    "cohere2@full": _FULL,
    "gemma3_text@full": _FULL,
    "ministral@full": _FULL,
    "mistral@full": {"sliding_window": None},
    "gemma2@uncapped": {"attn_logit_softcapping": None},
    "bert@encoder": {"is_decoder": False},
    "llama4_text@full": _FULL,
    "minimax_m3_vl_text@sparse": {"num_hidden_layers": 2, "layer_types": ["full_attention", "minimax_m3_sparse"]},
}
_VISION = "images or sound and text in one config; its language model is the family {}"
_NOT_BUILT: dict[str, str] = {
    "blt": "bytes in patches: several models in one config",
    "cpmant": "needs a tokenizer's segments and prompts of its own",
    "dbrx": "its attention config lacks a rope_theta, so that its default config builds no model",
    "gemma3n": "needs timm",
    "gemma4_assistant": "drafts for another model's cache and has none of its own",
    "gemma4_unified_assistant": "drafts for another model's cache and has none of its own",
    "fuyu": _VISION.format("persimmon"),
    "git": "images and text in one model",
    "musicgen": "writes sound for a text encoder",
    "musicgen_melody": "writes sound for a text encoder",
    "mllama": "cross-attention to images",
    "phi4_multimodal": _VISION.format("phi3"),
    "dots3_note": _VISION.format("dots3_note_text"),
    "emu3": _VISION.format("llama, nearly"),
    "gemma3": _VISION.format("gemma3_text"),
    "gemma4": _VISION.format("gemma4_text"),
    "gemma4_unified": _VISION.format("gemma4_unified_text"),
    "got_ocr2": _VISION.format("qwen2"),
    "llama4": _VISION.format("llama4_text"),
    "moss_transcribe_diarize": _VISION.format("qwen3"),
    "qwen3_5": _VISION.format("qwen3_5_text"),
    "qwen3_5_moe": _VISION.format("qwen3_5_moe_text"),
    "qwen4_exp": _VISION.format("qwen4_exp_text"),
}
NAMES = [*MODELS, *_VARIANTS]


def build(name: str) -> transformers.PreTrainedModel:
    """The family `name`, or a variant FAMILY@SETTING, of about a hundred thousand random weights; float32, eval mode."""
    family = name.partition("@")[0]
    config = _config(family, _OTHER.get(family, {}) | _VARIANTS.get(name, {}))
    model_class = getattr(transformers, MODELS[family])
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = model_class(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                # Not the values that norms, biases and scalars begin with: one that got lost would not show.
                if parameter.dim() < 2:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    return model


def _config(family: str, other: dict) -> transformers.PreTrainedConfig:
    default = CONFIG_MAPPING[family]()
    names = vars(default).keys() | default.attribute_map.keys()
    skip = _WITHOUT.get(family, ())
    sizes = {
        name: value
        for name, value in _SIZES.items()
        if name in names and name not in skip and not isinstance(vars(default).get(name), list | tuple | dict)
    }
    if vars(default).get("sliding_window", 0) is None:
        sizes.pop("sliding_window", None)
    kinds = list(dict.fromkeys(vars(default).get("layer_types") or ()))
    if kinds and "layer_types" not in other.keys() | set(skip):
        layers = max(2, len(kinds))
        sizes |= {"layer_types": (kinds * 2)[:layers], "num_hidden_layers": layers}
    return CONFIG_MAPPING[family](**sizes | other)


@torch.no_grad()
def outcome(name: str) -> str:
    """`works …`, `refused: SENTENCE` or `not built: REASON`. Whatever else happens is an error."""
    if name in _NOT_BUILT:
        return f"not built: {_NOT_BUILT[name]}"
    model = build(name)
    ids = torch.randint(3, 60, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    try:
        shape = model_shape(model)
    except InputError as refusal:
        return f"refused: {refusal}"
    expected, decoded = _logits(model, ids), _decoded(model, ids)
    try:
        with _attached(model, 1.0) as dense:
            found = _logits(model, ids)
        # Two sequences of all rows in each head: every layer that attends, once.
        counters = dense.counters
        with _attached(model, 1.0):
            found_decoded = _decoded(model, ids)
        with _attached(model, 0.9999) as kept:
            found_kept = _logits(model, ids)
        with _attached(model, 0.3) as sparse:
            few = _logits(model, ids)
            other = ids.clone()
            other[:, CHANGED] = (other[:, CHANGED] + 1) % 60
            changed = _logits(model, other)
    except InputError as refusal:
        return f"refused: {refusal}"
    size = float(expected.abs().max())
    close = {"atol": 1e-4 * max(size, 1.0), "rtol": 0}
    torch.testing.assert_close(found, expected, **close)
    torch.testing.assert_close(found_kept, expected, **close)
    torch.testing.assert_close(found_decoded, decoded, **close)
    rows = shape.layers * shape.heads * 2 * TOKENS
    assert counters.dense_rows + counters.windowed_rows == rows, counters
    windowed = counters.windowed_rows // (shape.heads * 2 * TOKENS)
    assert kept.counters.sparse_rows == counters.dense_rows, kept.counters
    assert sparse.counters.sparse_rows == 2 * counters.dense_rows, sparse.counters
    assert (few - expected).abs().max() > 1e-2 * size, "retention 0.3 changed nothing"
    torch.testing.assert_close(changed[:, :CHANGED], few[:, :CHANGED], **close)
    assert (changed[:, CHANGED] - few[:, CHANGED]).abs().max() > 1e-2 * size, "the changed token is not seen"
    return "works" + _layers_said(model, shape.layers, windowed) + _chunks_said(model, ids[0], expected[0], close)


def calibration_outcome(name: str) -> str:
    """`measured` or `refused: SENTENCE` for a family that works, of `shadowattn.calibrate`. Whatever else happens is an error."""
    model = build(name)
    short = {"windows": Windows(16, 1), "importance_windows": Windows(16, 2)}
    try:
        made = shadowattn.calibrate(model, _Tokens(), "text", retention=0.3, chunk_tokens=8, **short)
        profile, importance = made.profile, made.importance
    except InputError as refusal:
        if "use the allocator uniform" in str(refusal):
            uniform = shadowattn.calibrate(model, _Tokens(), "text", allocator="uniform", chunk_tokens=16, **short).profile
            assert {value for layer in uniform.retention for value in layer} == {0.2}
        return f"refused: {refusal}"
    assert abs(profile.mean_retention - 0.3) < 1e-6
    assert len({value for layer in profile.retention for value in layer}) > 1, "every head has the same retention"
    with tempfile.TemporaryDirectory() as folder:
        plain = measure_ablations(model, made.importance_tokens, Units(Path(folder)), method="plain")
    base = torch.tensor(plain.base, dtype=torch.float64).mean()
    ablated = torch.tensor(plain.heads, dtype=torch.float64).mean(-1)
    measured = torch.tensor(importance.head_ppl, dtype=torch.float64).log()
    torch.testing.assert_close(measured, ablated, atol=1e-5 * float(base), rtol=0)
    with torch.no_grad(), shadowattn.attach(model, profile) as run:
        _logits(model, made.tokens)
    assert run.counters.sparse_rows > 0
    return "measured"


def _chunks_said(model, ids, expected, close: dict) -> str:
    """A prompt in chunks gives what it gives in one piece, or is refused."""
    try:
        found = torch.cat([logits for _, logits in prefill_chunks(model, ids, chunk_tokens=8)])
    except InputError as refusal:
        return "; prompts in one piece only" if "has to go through it in one piece" in str(refusal) else f"; in chunks: {refusal}"
    torch.testing.assert_close(found, expected, **close)
    return ""


class _Tokens:
    """A tokenizer that gives tokens which every family knows."""

    bos_token_id = None

    def __call__(self, text, **options):
        return SimpleNamespace(input_ids=torch.randint(3, 60, (200,), generator=torch.Generator().manual_seed(1)).tolist())


def _layers_said(model, attended: int, windowed: int) -> str:
    parts = []
    layers = len(max((m for m in model.modules() if isinstance(m, torch.nn.ModuleList)), key=len))
    if attended < layers:
        parts.append(f"layers {attended_layers(model)} of {layers} attend")
    if windowed:
        parts.append(f"{windowed} of {attended} attending layers have a sliding window")
    return "".join(f"; {part}" for part in parts)


def _attached(model, retention: float):
    return shadowattn.attach(model, profile_for(model, retention), None, estimator=Oracle(), chunk_tokens=8)


def _logits(model, ids):
    logits = model(input_ids=ids, use_cache=False).logits
    assert torch.isfinite(logits).all(), "the tiny model is not finite"
    return logits


def _decoded(model, ids):
    """The last token's logits by the family's own cache."""
    start = model(input_ids=ids[:, :-1], use_cache=True)
    if start.get("past_key_values") is None:
        return start.logits
    return model(input_ids=ids[:, -1:], past_key_values=start.past_key_values, use_cache=True).logits


def measure(name: str) -> dict[str, str]:
    """What becomes of a family in `attach`, and where it works, in `calibrate`."""
    attached = outcome(name)
    return {"attach": attached, "calibrate": calibration_outcome(name)} if attached.startswith("works") else {"attach": attached}


def read_table() -> dict[str, dict[str, str]]:
    """Family or variant → outcomes, as committed."""
    return json.loads(TABLE.read_text())


def page(whole: dict[str, dict[str, str]]) -> str:
    """docs/models.md for a table of outcomes."""
    table = {name: outcomes["attach"] for name, outcomes in whole.items()}
    works: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for name, result in table.items():
        if result.startswith("works"):
            works.setdefault(result.removeprefix("works").removeprefix("; "), []).append(name)
        elif result.startswith("refused: "):
            # The class's name, where the sentence begins with one, is the family's again.
            sentence = re.sub(r"^\w+: ", "", result.removeprefix("refused: "))
            refused.setdefault(sentence, []).append(name)
    calibrated = {name: outcomes["calibrate"] for name, outcomes in whole.items() if "calibrate" in outcomes}
    measured = [name for name, result in calibrated.items() if result == "measured"]
    without: dict[str, list[str]] = {}
    for name in sorted(calibrated.keys() - set(measured)):
        sentence = re.sub(r"^\w+(, taken layer by layer)?: ", "", calibrated[name].removeprefix("refused: "))
        without.setdefault(_NUMBERS.sub("…", sentence), []).append(name)
    not_built = {name: result.removeprefix("not built: ") for name, result in table.items() if result.startswith("not built: ")}
    counts = {
        "works": sum(map(len, works.values())),
        "refused": sum(map(len, refused.values())),
        "not_built": len(not_built),
        "calibrated": len(measured),
        "transformers": transformers.__version__,
    }
    lines = [_INTRODUCTION.format(**counts), "| families | what attends |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {said or 'every layer'} |" for said, names in sorted(works.items())]
    lines += ["", "## Refused", "", "| families | sentence of the error |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {sentence} |" for sentence, names in sorted(refused.items(), key=lambda x: -len(x[1]))]
    lines += ["", "## Calibrated", "", _CALIBRATED.format(**counts), f"{', '.join(measured)}.", ""]
    lines += ["Of the families that work, `calibrate` refuses these before any work:", ""]
    lines += ["| families | sentence of the error |", "|---|---|"]
    lines += [f"| {', '.join(names)} | {sentence} |" for sentence, names in sorted(without.items(), key=lambda x: -len(x[1]))]
    lines += ["", "## Not measured", "", "No tiny model of these families is built here.", "", "| family | reason |", "|---|---|"]
    lines += [f"| {name} | {reason} |" for name, reason in not_built.items()]
    return "\n".join(lines) + "\n"


# A loss, a layer: figures of one tiny model among others of the same sentence.
_NUMBERS = re.compile(r"(?<=layer )\d+(?= has a)|(?<=each of its )\d+|\d+\.\d+")
_CALIBRATED = """`calibrate` measures importance, sensitivity and scales of {calibrated} of the families that work. For each of
them, importance by ablation, whose work the heads of a layer share, equals a forward pass for every ablation to 1e-5 of
the loss; the profile keeps its mean and differs between heads; and the model runs with it:
"""
_INTRODUCTION = """# Which models `attach` and `calibrate` work on

<!-- Written by `python -m tests.models.families`; edit that file. -->
`tests/models/families.py` builds a tiny random model of every causal language model family of transformers {transformers} and
attaches to it. Norm weights, biases and other vectors hold random values, so that a lost vector changes the logits.
NAME@SETTING is a family with a setting that decides the outcome. `tests/models/test_families.py` fails where an outcome
differs from this page.

| outcome | families and variants |
|---|---|
| `attach` works | {works} |
| `attach` and `calibrate` work; the rest `calibrate` refuses with one sentence | {calibrated} |
| refused with one sentence | {refused} |
| not measured | {not_built} |

A family *works* if all of this holds:

- at retention 1.0, and at 0.9999 through selection and index lists, the logits equal the model's own, without a cache
  and for a last token decoded from the family's own cache;
- a prompt in chunks, each behind the cache of those before, has the same logits, or several chunks are refused
  (*prompts in one piece only*);
- the counters hold every head and row of every layer that attends, once;
- at retention 0.3 the logits differ, and a changed token changes no earlier logit.

**Hybrids.** Layers without softmax attention (Mamba, linear attention, convolutions) are unchanged. A profile's table
has one row for each layer that attends, in the order of the layers. `shadowattn.models.attended_layers(model)` names
these layers, and `model_shape(model).layers` counts them.

**Sliding windows.** A layer with a sliding window is computed dense within its window, a few rows at a time, whatever
its row of the table says. `counters.windowed_rows` counts its heads and rows, and a log entry at level INFO names the
layer and its window. A model in which every layer has a window is refused. The offline stage (importance, scales)
refuses windows.

**Refused models.** A model is refused if its attention cannot be replaced, or if its attention computes more than
causal softmax attention: soft caps, attention sinks (`s_aux`), learned biases, position biases, masks of the model's
own, cross-attention, encoders. An unknown argument of the attention function is refused by its name. Models without
weights in memory (meta device) and models that share a config object with an attached one are refused too. A copy or a
pickle of an attached model is dense.

**Refused calls.** For every family these inputs are refused: padding, ready-made 4-D masks and dicts of masks, packed
sequences, a static cache, dropout, and forward passes that need a gradient (call the model under `torch.no_grad()`).

## Works
"""


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    measured = read_table() if TABLE.exists() else {}
    for name in sys.argv[1:] or NAMES:
        measured[name] = measure(name)
        print(f"{name}: {measured[name]}", flush=True)
    measured = {name: measured[name] for name in NAMES if name in measured}
    TABLE.write_text(json.dumps(measured, indent=1) + "\n")
    PAGE.write_text(page(measured))
