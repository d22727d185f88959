"""Training of the lightning indexer: what it scores high is to be what the heads of its layer attend to together.

DeepSeek-V3.2 (arXiv 2512.02556, section 2.1) first trains the indexer alone, with the model frozen and dense: the KL divergence
of its softmax from dense attention's probabilities, summed over heads and normalised. That stage is done here, layer by layer,
on Q and K that are kept from one pass over calibration text; the paper's second stage trains the model too, and is left out.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shadowattn import checks
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import StageError
from shadowattn.evaluation.recall import sampled_rows
from shadowattn.models.shape import fingerprint, model_shape
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators.lightning_indexer import beside, indexer_keys, indexer_scores
from shadowattn.types import IndexerWeights

_ROWS = 64  # of each chunk
_RATE = 1e-3
_LARGEST_GRADIENT = 1.0  # by norm; a step beyond it can leave every product below zero, where nothing is learnt any more
_DIGITS = 6  # that are kept of a weight: more than any of its products is exact to


def train_indexer(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    heads: int,
    dims: int,
    chunk_tokens: int,
    steps: int = 400,
    progress: Callable[[Iterable], Iterable] = iter,
) -> IndexerWeights:
    """Indexers of `heads` heads of `dims` dimensions for every layer, each trained in `steps` steps of one window's rows.

    Runs the windows int64 [W, T] through the model, dense, in chunks, and keeps 64 rows of every chunk and all keys, in the
    model's dtype. The key matrix begins with the axes in which the keys of all key heads vary most together, the queries with
    the same axes, so that the first scores are products along them. Raises `InputError` on a model with sliding windows, and on
    more dimensions than the keys have; `StageError` where training made a layer's indexer worse.
    """
    shape = model_shape(model)
    checks.integer("heads", heads, least=1)
    checks.integer("dims", dims, least=1, most=shape.kv_heads * shape.head_dim)
    seen: list[list[_Seen]] = [[] for _ in range(shape.layers)]

    def observe(chunk: Chunk) -> None:
        if chunk.first_position == 0:
            seen[chunk.layer].append(_Seen([], [], chunk.k, chunk.scale))
        seen[chunk.layer][-1].add(chunk)

    observe_prefill(model, windows, observe, chunk_tokens=chunk_tokens, progress=progress)
    trained = [_train(layer, heads, dims, steps) for layer in progress(seen)]
    tables = ([_rounded(layer[name]) for layer in trained] for name in ("q", "k", "gate"))
    return IndexerWeights(*tables, [layer["divergence"] for layer in trained], fingerprint(model))


@dataclass
class _Seen:
    """What one layer was given for one window: some of its rows, [H, rows, D] each, and where they stand; keys [G, K, D]."""

    rows: list[Tensor]
    positions: list[Tensor]
    keys: Tensor
    scale: float

    def add(self, chunk: Chunk) -> None:
        which = sampled_rows(chunk.q.shape[1], min(_ROWS, chunk.q.shape[1]))
        self.rows.append(chunk.q[:, which].clone())
        self.positions.append(chunk.positions[which])
        self.keys = chunk.k.clone()

    @property
    def later(self) -> Tensor:
        """Which keys come after each row, bool [rows, K]."""
        return torch.arange(self.keys.shape[1], device=self.keys.device) > torch.cat(self.positions)[:, None]

    def attended(self) -> Tensor:
        """What dense attention gives each key, mean over heads, [rows, K]."""
        q, k = torch.cat(self.rows, 1).float(), self.keys.float()
        k = k.repeat_interleave(len(q) // len(k), 0)
        return (q @ k.mT * self.scale).masked_fill(self.later, -math.inf).softmax(-1).mean(0)


def _train(windows: list[_Seen], heads: int, dims: int, steps: int) -> dict:
    """The matrices of one layer, and the divergence that the last pass had left. Raises `StageError` where nothing was learnt."""
    rows = [beside(torch.cat(window.rows, 1)) for window in windows]
    keys = [beside(window.keys) for window in windows]
    attended, later = [window.attended() for window in windows], [window.later for window in windows]
    weights = _first_weights(windows[0], torch.cat(keys), heads, dims)
    # One rate is to fit channels of every size, so it is channels of size 1 that are trained on.
    row_size, key_size = (torch.cat(x).square().mean(0).sqrt().clamp(min=1e-6) for x in (rows, keys))
    rows, keys = [x / row_size for x in rows], [x / key_size for x in keys]
    sizes = {"q": row_size, "k": key_size, "gate": torch.nn.functional.pad(row_size, (0, 1), value=1.0)}
    weights = {name: (weight * sizes[name]).requires_grad_() for name, weight in weights.items()}
    optimiser = torch.optim.Adam(weights.values(), lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    losses = []
    with torch.enable_grad():
        for step in range(steps):
            at = step % len(windows)
            made = indexer_keys(keys[at], weights["k"])
            logits = indexer_scores(rows[at], made, weights["q"], weights["gate"]).masked_fill(later[at], -math.inf)
            loss = _divergence(attended[at], logits)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(weights.values(), _LARGEST_GRADIENT)
            optimiser.step()
            schedule.step()
            losses.append(float(loss.detach()))
    last = sum(losses[-len(windows) :]) / len(losses[-len(windows) :])
    if not last <= losses[0]:
        raise StageError(
            f"indexer: a layer's divergence rose from {losses[0]:.3g} to {last:.3g} nat in {steps} steps of training"
        )
    return {name: (weight / sizes[name]).detach() for name, weight in weights.items()} | {"divergence": last}


def _divergence(target: Tensor, logits: Tensor) -> Tensor:
    """KL divergence of the softmax of `logits` from `target`, both [rows, K]; mean over rows, nat."""
    chosen = target > 0  # a key after its row has no logit, and none is asked of it
    return (target[chosen] * (target[chosen].log() - logits.log_softmax(-1)[chosen])).sum() / len(target)


def _first_weights(window: _Seen, keys: Tensor, heads: int, dims: int) -> dict[str, Tensor]:
    """Products along the keys' principal axes; each indexer head adds up those of its share of the layer's heads."""
    axes = torch.linalg.eigh(torch.cov(keys.double().T)).eigenvectors.flip(-1)[:, :dims].T.float()  # [E, G·D]
    count, groups, dim = window.rows[0].shape[0], window.keys.shape[0], window.keys.shape[2]
    of_heads = axes.view(dims, groups, 1, dim).expand(-1, -1, count // groups, -1).reshape(dims, count, dim)
    mine = torch.arange(count, device=keys.device) % heads == torch.arange(heads, device=keys.device)[:, None] % count
    q = of_heads[None] * mine[:, None, :, None] * window.scale
    gate = keys.new_zeros(heads, count * dim + 1)
    gate[:, -1] = 1.0
    return {"q": q.reshape(heads, dims, -1), "k": axes, "gate": gate}


def _rounded(weights: Tensor) -> list:
    """Nested lists of figures, so short that files of them are."""
    if weights.dim() > 1:
        return [_rounded(part) for part in weights]
    return [float(f"{figure:.{_DIGITS}g}") for figure in weights.tolist()]
