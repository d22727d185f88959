"""What an estimate loses that is made before its layer is reached: Q and the chunk's K from what entered an earlier layer.

A layer changes the hidden states little, so that the next layer's queries can be guessed from what enters this one (Deja Vu,
arXiv 2310.17157, does it for heads and neurons). An estimate made so can run on the device while the CPU still attends for the
layer before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shadowattn.engine.reference import finished, projected
from shadowattn.evaluation.recall import top_keys
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.decoder import Decoder


@dataclass(frozen=True)
class LookAhead:
    """Of one window by how many layers ahead and by retention, [L][H]; not a number where there is no layer so far before.

    `recall`: the share of the exact top-k that is chosen. `mass`: the share of the exact top-k's attention that the chosen keys
    have.
    """

    recall: dict[tuple[int, float], list[list[float]]]
    mass: dict[tuple[int, float], list[list[float]]]


@torch.no_grad()
def measure_look_ahead(
    decoder: Decoder, window: Tensor, *, rows: int, retentions: Sequence[float], ahead: Sequence[int]
) -> LookAhead:
    """Runs a window int64 [T] dense, in float32, and ranks the keys of its last `rows` rows, which count as one chunk.

    Keys before these rows are in the cache, exact; those of the rows themselves come from the earlier layer, as their queries do.
    """
    start = len(window) - rows
    positions = torch.arange(start, len(window))
    hidden = decoder.embedding[window].float()
    entered: list[Tensor] = []  # the last rows of what entered each layer
    recall = {(distance, at): [] for distance in ahead for at in retentions}
    mass = {key: [] for key in recall}
    for index, layer in enumerate(decoder.layers):
        entered.append(hidden[start:])
        q, k, v = projected(decoder, layer, hidden)
        exact = _scores(decoder, q[:, start:], k)
        visible = torch.arange(len(window)) <= positions[:, None]
        attention = torch.softmax((exact * decoder.scale).masked_fill(~visible, -torch.inf), -1)
        for distance in ahead:
            if distance > index:
                for at in retentions:
                    for table in (recall, mass):
                        table[distance, at].append([float("nan")] * len(q))
                continue
            early_q, early_k, _ = projected(decoder, layer, entered[index - distance], start)
            early = _scores(decoder, early_q, torch.cat([k[:, :start], early_k], 1))
            for at in retentions:
                best, chosen = (top_keys(scores, positions, at) for scores in (exact, early))
                recall[distance, at].append(((best & chosen).sum((1, 2)) / best.sum((1, 2))).tolist())
                mass[distance, at].append(((attention * chosen).sum((1, 2)) / (attention * best).sum((1, 2))).tolist())
        hidden = finished(decoder, layer, dense(q, k, v, causal_offset=0, scale=decoder.scale), hidden)
    return LookAhead(recall, mass)


def _scores(decoder: Decoder, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.repeat_interleave(decoder.shape.heads // decoder.shape.kv_heads, 0).mT
