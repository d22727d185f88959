"""The training forward of a Qwen2 model in bfloat16, over the Hugging Face module's own weights.

`Qwen2ForCausalLM.forward` leaves about a third of a CPU step to unfused element-wise work. Here everything between two
attention calls is one function that `torch.compile` fuses; attention itself stays with
`scaled_dot_product_attention`, which compiled code does not beat on CPUs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen2ForCausalLM


class FastForward:
    """Callable: token ids (rows, K) -> loss (rows * K,) in nat of each of `targets` (rows, K).

    The weights stay those of `model`, so gradients arrive there; masters in float32 are cast as they are used. With
    `compiled` every new batch shape costs about ten seconds of compilation once.
    """

    def __init__(self, model: Qwen2ForCausalLM, *, compiled: bool) -> None:
        self.model = model
        functions = (_queries_keys_values, _output_and_mlp, _losses)
        if compiled:
            # One graph per batch shape: graphs for dynamic shapes are slower than no compilation.
            torch._dynamo.config.cache_size_limit = 64
            functions = tuple(torch.compile(function, dynamic=False) for function in functions)
        self.queries_keys_values, self.output_and_mlp, self.losses = functions

    def __call__(self, ids: Tensor, targets: Tensor) -> Tensor:
        transformer = self.model.model
        eps = self.model.config.rms_norm_eps
        turn = _rotary(transformer.rotary_emb.inv_freq, ids.shape[1])
        hidden = F.embedding(ids, transformer.embed_tokens.weight)
        for layer in transformer.layers:
            attention, mlp = layer.self_attn, layer.mlp
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            q, k, v = self.queries_keys_values(
                hidden,
                layer.input_layernorm.weight,
                [projection.weight for projection in projections],
                [projection.bias for projection in projections],
                turn,
                attention.head_dim,
                eps,
            )
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            hidden = self.output_and_mlp(
                hidden,
                attended,
                attention.o_proj.weight,
                layer.post_attention_layernorm.weight,
                mlp.gate_proj.weight,
                mlp.up_proj.weight,
                mlp.down_proj.weight,
                eps,
            )
        return self.losses(hidden, transformer.norm.weight, self.model.lm_head.weight, targets, eps)


def _queries_keys_values(
    hidden: Tensor,
    norm: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    turn: tuple[Tensor, Tensor],
    head_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    normed = _rms_norm(hidden, norm, eps)
    joined = F.linear(normed, torch.cat(weights).bfloat16(), torch.cat(biases).bfloat16())
    parts = joined.split([weight.shape[0] for weight in weights], dim=-1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)).transpose(1, 2) for part in parts)
    group = q.shape[1] // k.shape[1]
    k, v = _apply_rotary(k, turn).repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    return _apply_rotary(q, turn), k, v


def _output_and_mlp(
    hidden: Tensor,
    attended: Tensor,
    output: Tensor,
    norm: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    eps: float,
) -> Tensor:
    hidden = hidden + F.linear(attended.transpose(1, 2).flatten(2), output.bfloat16())
    normed = _rms_norm(hidden, norm, eps)
    inner = F.silu(F.linear(normed, gate.bfloat16())) * F.linear(normed, up.bfloat16())
    return hidden + F.linear(inner, down.bfloat16())


def _losses(hidden: Tensor, norm: Tensor, unembedding: Tensor, targets: Tensor, eps: float) -> Tensor:
    logits = F.linear(_rms_norm(hidden, norm, eps), unembedding.bfloat16()).float()
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")


def _rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), weight, eps).bfloat16()


def _rotary(frequencies: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens, device=frequencies.device)[:, None] * frequencies
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos().bfloat16(), angles.sin().bfloat16()


def _apply_rotary(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    cos, sin = turn
    return x * cos + torch.cat([-second, first], dim=-1) * sin
