"""Real language models by name: their ids on the hub at a pinned revision, and their published shapes.

`load.py` reads this table, for weights (`load_known`) and for random ones (`load_random`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from transformers import LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config


@dataclass(frozen=True)
class PublishedShape:
    """What decides the sizes and the arithmetic of a decoder, as its published config has it.

    `rope_scaling` holds what of the rotary embedding is not `rope_theta`; empty for the plain one. All known models share the
    weights of embedding and output.
    """

    config: type[PreTrainedConfig]
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    context_tokens: int
    rope_theta: float
    norm_eps: float
    rope_scaling: Mapping[str, str | float] = field(default_factory=dict)
    activation: str = "silu"

    def build_config(self) -> PreTrainedConfig:
        """A config of transformers with token 0 for beginning, end and padding, as the bundled tokenizer has it.

        Raises `StrictDataclassError` of huggingface_hub on sizes that do not fit together.
        """
        return self.config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            hidden_act=self.activation,
            max_position_embeddings=self.context_tokens,
            rope_parameters={"rope_type": "default", "rope_theta": self.rope_theta, **self.rope_scaling},
            rms_norm_eps=self.norm_eps,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=0,
        )


@dataclass(frozen=True)
class KnownModel:
    """Where the weights of a model are.

    `revision`: a commit of the hub's repository; None where none is pinned. `fetched`: what rows call the weights that
    `python -m experiments.fetch` leaves; None where they cannot be fetched. `remote_code`: the repository's own Python defines
    the model, and transformers does not.
    """

    hub_id: str
    revision: str | None
    shape: PublishedShape
    fetched: str | None = None
    remote_code: bool = False


_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

KNOWN_MODELS = {
    "smollm2": KnownModel(
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        "12fd25f77366fa6b3b4b768ec3050bf629380bac",
        PublishedShape(LlamaConfig, 30, 9, 3, 64, 576, 1536, 49152, 8192, 1e5, 1e-5),
        fetched="SmolLM2-135M-Instruct (Q4_1)",
    ),
    "smollm2_360m": KnownModel(
        "HuggingFaceTB/SmolLM2-360M-Instruct",
        "a10cc1512eabd3dde888204e902eca88bddb4951",
        PublishedShape(LlamaConfig, 32, 15, 5, 64, 960, 2560, 49152, 8192, 1e5, 1e-5),
    ),
    "qwen2_0_5b": KnownModel(
        "Qwen/Qwen2-0.5B",
        "91d2aff3f957f99e4c74c962f2f408dcc88a18d8",
        PublishedShape(Qwen2Config, 24, 14, 2, 64, 896, 4864, 151936, 131072, 1e6, 1e-6),
    ),
    "qwen2_1_5b": KnownModel(
        "Qwen/Qwen2-1.5B",
        "8a16abf2848eda07cc5253dec660bf1ce007ad7a",
        PublishedShape(Qwen2Config, 28, 12, 2, 128, 1536, 8960, 151936, 131072, 1e6, 1e-6),
    ),
    "qwen3_0_6b": KnownModel(
        "Qwen/Qwen3-0.6B",
        "c1899de289a04d12100db370d81485cdf75e47ca",
        PublishedShape(Qwen3Config, 28, 16, 8, 128, 1024, 3072, 151936, 40960, 1e6, 1e-6),
    ),
    "llama3_2_1b": KnownModel(
        "meta-llama/Llama-3.2-1B",
        "4e20de362430cd3b72f300e6b0f18e50e7166e08",
        PublishedShape(LlamaConfig, 16, 32, 8, 64, 2048, 8192, 128256, 131072, 5e5, 1e-5, _LLAMA_3_ROPE),
    ),
    "qwen2_5_coder_1_5b": KnownModel(
        "Qwen/Qwen2.5-Coder-1.5B-Instruct",
        "2e1fd397ee46e1388853d2af2c993145b0f1098a",
        PublishedShape(Qwen2Config, 28, 12, 2, 128, 1536, 8960, 151936, 32768, 1e6, 1e-6),
        fetched="Qwen2.5-Coder-1.5B-Instruct (Q4_K_M)",
    ),
    # PhoneLM's class is the repository's own, written for an older transformers; Llama's config is the nearest that there is.
    "phonelm_0_5b": KnownModel(
        "mllmTeam/PhoneLM-0.5B",
        None,  # not pinned
        PublishedShape(LlamaConfig, 24, 16, 16, 64, 1024, 4864, 49152, 2048, 1e4, 1e-6, activation="relu"),
        remote_code=True,
    ),
    "phonelm_1_5b": KnownModel(
        "mllmTeam/PhoneLM-1.5B",
        None,  # not pinned
        PublishedShape(LlamaConfig, 19, 16, 16, 160, 2560, 6816, 49152, 2048, 1e4, 1e-6, activation="relu"),
        remote_code=True,
    ),
}
