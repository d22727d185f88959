"""Tiny random models, built in code."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM


def tiny_model(*, heads: int = 4, kv_heads: int = 2, head_dim: int = 64, layers: int = 2, family: str = "qwen2", vocab=128):
    """A random causal LM of one family with the given attention shape, float32, in eval mode."""
    config_class, model_class = {
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[family]
    torch.manual_seed(0)
    config = config_class(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=512,
        attn_implementation="sdpa",
        initializer_range=0.2,  # far from uniform attention, so that a wrong key shows
    )
    return model_class(config).eval()
