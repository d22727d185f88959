"""Initial weights under which an induction circuit nearly exists at step 0, so that a short run can finish it.

Left to itself, a model of this size forms induction heads only after tens of millions of tokens. Three structures
shorten that; all of them stay trainable:

1. Layer 0, heads 0 and 1 look one and two tokens back, whatever the content. Their query and key projections begin
   at zero, so the scores come from the QKV biases alone: with key bias A on a RoPE pair of frequency f and the query
   bias turned by -f d, the score at distance x is A^2 cos(f (x - d)), which peaks at x = d.
2. Token embeddings begin in the first three quarters of the residual stream. The two heads write the identity of the
   token that they look at (a random projection of its embedding) into an eighth each of the remaining quarter.
3. In layers 1 and 2, head 0 asks "where was the previous token the current one?", and the first head of the second
   key-value group asks it of the last two tokens. Both compare identities on RoPE's slow pairs, where distance hardly
   matters, and copy the found token's embedding to the output ("mimetic" W_Q W_K^T ~ I and W_O W_V ~ I, after
   Trockman & Kolter 2023).

Every other output projection begins at zero (as in modded-nanogpt), so at step 0 only this circuit speaks.
"""

import math

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

_EMBEDDING_STD = 0.03
_LINEAR_GAIN = 0.6
_POSITION_BIAS = 7.0  # A: a softmax weight of about 0.99 on the wanted distance
_POSITION_PAIRS = 6  # the fastest RoPE pairs, which tell neighbouring distances apart
_IDENTITY_WRITE = 0.022  # as strong as the embedding's own share of the projected dimensions
_MATCH_GAIN = 2.0  # a match scores about 15 nat above a mismatch
_COPY_GAIN = 0.06


@torch.no_grad()
def initialise(model: Qwen2ForCausalLM, *, seed: int) -> None:
    """Overwrite all weights of `model` in place; see the module's docstring for what they then compute.

    Raises `ValueError` when the model is too small to hold the circuit.
    """
    config = model.config
    _check(config)
    generator = torch.Generator().manual_seed(seed)
    token_dims = config.hidden_size * 3 // 4
    _plain(model, token_dims, generator)
    identity = _orthonormal_rows(_head_dim(config) // 2, token_dims, generator)
    _look_back(model, identity)
    for layer in (1, 2):
        _induction(model, layer, identity, generator)


def _plain(model: Qwen2ForCausalLM, token_dims: int, generator: torch.Generator) -> None:
    for name, weight in model.named_parameters():
        if weight.ndim == 1:
            weight.fill_(1.0 if "norm" in name else 0.0)
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
        elif "embed_tokens" in name:
            weight.normal_(0.0, _EMBEDDING_STD, generator=generator)
            weight[:, token_dims:] = 0.0
        else:
            weight.normal_(0.0, _LINEAR_GAIN / math.sqrt(weight.shape[1]), generator=generator)


def _look_back(model: Qwen2ForCausalLM, identity: torch.Tensor) -> None:
    config, attention = model.config, model.model.layers[0].self_attn
    dims, slots, token_dims = _head_dim(config), *identity.shape
    frequency = model.model.rotary_emb.inv_freq[:_POSITION_PAIRS]
    pair = torch.arange(_POSITION_PAIRS)
    attention.k_proj.weight[:dims] = 0.0
    attention.k_proj.bias[pair] = _POSITION_BIAS
    attention.v_proj.weight[:slots] = 0.0
    attention.v_proj.weight[:slots, :token_dims] = identity
    for head in (0, 1):
        distance, start = head + 1, head * dims
        attention.q_proj.weight[start : start + dims] = 0.0
        attention.q_proj.bias[start + pair] = _POSITION_BIAS * torch.cos(-distance * frequency)
        attention.q_proj.bias[start + dims // 2 + pair] = _POSITION_BIAS * torch.sin(-distance * frequency)
        written = token_dims + head * slots + torch.arange(slots)
        attention.o_proj.weight[written, start + torch.arange(slots)] = _IDENTITY_WRITE


def _induction(model: Qwen2ForCausalLM, layer: int, identity: torch.Tensor, generator: torch.Generator) -> None:
    config, attention = model.config, model.model.layers[layer].self_attn
    dims, slots, token_dims = _head_dim(config), *identity.shape
    group = config.num_attention_heads // config.num_key_value_heads
    slow = _slow_dims(dims)
    one_back, two_back = token_dims + torch.arange(slots), token_dims + slots + torch.arange(slots)

    def query(head: int) -> torch.Tensor:
        return attention.q_proj.weight[head * dims : (head + 1) * dims]

    def key(key_head: int) -> torch.Tensor:
        return attention.k_proj.weight[key_head * dims : (key_head + 1) * dims]

    for weight in (query(0), query(group), key(0), key(1)):
        weight.zero_()
    query(0)[slow, :token_dims] = _MATCH_GAIN * identity
    key(0)[slow, one_back] = _MATCH_GAIN
    # The slowest half of the pairs matches the current token, the others the one before it.
    now, before = torch.arange(slots // 2, slots), torch.arange(slots // 2)
    query(group)[slow[now], :token_dims] = _MATCH_GAIN * identity[now]
    key(1)[slow[now], one_back[now]] = _MATCH_GAIN
    query(group)[slow[before], one_back[before]] = _MATCH_GAIN
    key(1)[slow[before], two_back[before]] = _MATCH_GAIN
    for key_head, head in ((0, 0), (1, group)):
        copied = _orthonormal_rows(dims, token_dims, generator)
        attention.v_proj.weight[key_head * dims : (key_head + 1) * dims] = 0.0
        attention.v_proj.weight[key_head * dims : (key_head + 1) * dims, :token_dims] = copied
        attention.o_proj.weight[:token_dims, head * dims : (head + 1) * dims] = _COPY_GAIN * copied.T


def _slow_dims(dims: int) -> torch.Tensor:
    """The head dimensions of the slower half of RoPE's pairs (pair i turns dimensions i and i + D/2), slowest last."""
    pairs = torch.arange(dims // 4, dims // 2)
    return torch.stack([pairs, pairs + dims // 2], dim=1).flatten()


def _orthonormal_rows(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(columns, rows, generator=generator)).Q.T.contiguous()


def _head_dim(config: Qwen2Config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _check(config: Qwen2Config) -> None:
    needed = config.hidden_size * 3 // 4 + 2 * (_head_dim(config) // 2)
    if needed > config.hidden_size or _head_dim(config) > config.hidden_size * 3 // 4:
        raise ValueError(f"expected hidden_size >= {needed} for two look-back slots, got {config.hidden_size}; widen")
    if config.num_hidden_layers < 3 or config.num_key_value_heads < 2 or config.num_attention_heads < 4:
        raise ValueError(
            f"expected at least 3 layers, 2 key-value heads and 4 query heads, got {config.num_hidden_layers}, "
            f"{config.num_key_value_heads} and {config.num_attention_heads}; set structured_init=false to train without"
        )
