"""A model taken layer by layer, so that what ablations have in common is computed once.

Besides `patch`, the only place that knows how a transformers decoder is put together. It does not repeat any layer's
arithmetic: layers are called with the arguments that the model itself gave them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.linear import Linear, replace_linears
from shadowattn.models.registry import replace_attention
from shadowattn.models.shape import attention_modules
from shadowattn.online.attention import Request

Variants = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
"""(q [B, H, T, D], k, v [B, G, T, D], scale, heads' outputs [B, T, H·D]) → other outputs [n, B, T, H·D]."""

_OUTPUT_PROJECTIONS = ("o_proj", "out_proj", "dense")
# Rows × vocabulary entries whose logits exist at a time: 8 MiB of float32 stay in the caches.
_LOSS_ROWS, _LOSS_ENTRIES = 512, 4096
_REMEDY = "use importance.method=plain, which needs none of this"


class Layerwise:
    """The layers of one model for windows of one length; made by `layerwise`.

    Hidden states are [B, T, C] in the model's dtype; attention is computed in float32 and causal.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, linear: Linear):
        self._decoder, self._linear = model.get_decoder(), linear
        self._layers = list(self._decoder.layers)
        self._norm = getattr(self._decoder, "norm", None)
        self._head = model.get_output_embeddings()
        if self._norm is None or not isinstance(self._head, nn.Linear):
            raise InputError(f"{type(model).__name__}: expected a final norm called `norm` and a linear output layer; {_REMEDY}")
        modules = attention_modules(model)
        if [module.layer_idx for module in modules] != list(range(len(self._layers))):
            raise InputError(f"{type(model).__name__}: expected attention in each of its {len(self._layers)} layers; {_REMEDY}")
        self._projections = [_output_projection(module) for module in modules]
        self._model, self._seen = model, None
        self._arguments = self._layer_arguments(torch.zeros(1, tokens, dtype=torch.int64, device=model.device))

    def embed(self, ids: Tensor) -> Tensor:
        """The hidden states that enter layer 0, for ids int64 [B, T]."""

        def stop(module, args, kwargs):
            raise _EnteredError(args[0] if args else kwargs["hidden_states"])

        handle = self._layers[0].register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self._decoder(input_ids=ids, use_cache=False)
        except _EnteredError as entered:
            return entered.hidden
        finally:
            handle.remove()
        raise InputError(f"{type(self._model).__name__}: expected to reach layer 0, did not; {_REMEDY}")

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """What layer `index` makes of the hidden states."""
        return hidden_states(self._layers[index](hidden, **self._arguments[index]))

    def varied(self, index: int, hidden: Tensor, variants: Variants) -> Tensor:
        """Layer `index` with several attention outputs on the same hidden states: [n, B, T, C].

        All that comes before the output projection is computed once; projection, residual and MLP once for each variant.
        """

        def vary(module, args):
            q, k, v, scale = self._seen
            return (variants(q, k, v, scale, args[0]),)

        handle = self._projections[index].register_forward_pre_hook(vary)
        try:
            return self.layer(index, hidden)
        finally:
            handle.remove()

    def rest(self, index: int, hidden: Tensor) -> Tensor:
        """The layers from `index` on."""
        for number in range(index, len(self._layers)):
            hidden = self.layer(number, hidden)
        return hidden

    def losses(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Mean loss in nat of each sequence's tokens but its first, float64 [B], from the last layer's hidden states.

        The logits of a few rows and vocabulary entries exist at a time, never all.
        """
        batch, tokens, width = hidden.shape
        rows = self._norm(hidden)[:, :-1].reshape(-1, width)
        targets = ids[:, 1:].reshape(-1)
        parts = [self._cross_entropy(r, t) for r, t in zip(rows.split(_LOSS_ROWS), targets.split(_LOSS_ROWS), strict=True)]
        return torch.cat(parts).view(batch, tokens - 1).mean(1)

    def _cross_entropy(self, rows: Tensor, targets: Tensor) -> Tensor:
        """float64 [rows], by a running logarithm of the sum of exponentials over slices of the vocabulary."""
        weight, bias = self._head.weight, self._head.bias
        total = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=rows.device)
        hit = torch.empty_like(total)
        for start in range(0, len(weight), _LOSS_ENTRIES):
            part = slice(start, start + _LOSS_ENTRIES)
            logits = self._linear(rows, weight[part], None if bias is None else bias[part]).float()
            total = torch.logaddexp(total, torch.logsumexp(logits, 1).double())
            here = ((targets >= start) & (targets < start + _LOSS_ENTRIES)).nonzero()[:, 0]
            hit[here] = logits[here, targets[here] - start].double()
        return total - hit

    def _attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> Tensor:
        self._seen = (q, k, v, scale)
        return dense(q.float(), k.float(), v.float(), causal_offset=0, scale=scale).to(q.dtype)

    def _layer_arguments(self, ids: Tensor) -> list[dict]:
        """The keyword arguments that the model gives each layer, for any batch of windows of this length."""
        seen: list[dict] = [{} for _ in self._layers]
        handles = []
        for index, layer in enumerate(self._layers):

            def remember(module, args, kwargs, index=index):
                seen[index] = {name: value for name, value in kwargs.items() if name != "hidden_states"}

            handles.append(layer.register_forward_pre_hook(remember, with_kwargs=True))
        try:
            with replace_attention(self._model, self._attention):
                self._decoder(input_ids=ids, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return seen


@contextmanager
def layerwise(model: PreTrainedModel, tokens: int, linear: Linear) -> Iterator[Layerwise]:
    """`model` layer by layer for windows of `tokens` tokens; its attention and linear layers are replaced meanwhile.

    Raises `InputError` where the model is not put together as expected, found out by comparing a loss with the model's own.
    """
    with torch.no_grad():
        own = _own_loss(model, tokens)
        layers = Layerwise(model, tokens, linear)
        with replace_attention(model, layers._attention), replace_linears(model, linear):
            ids = _probe(model, tokens)
            found = float(layers.losses(layers.rest(0, layers.embed(ids)), ids)[0])
            tolerance = 1e-4 if model.dtype == torch.float32 else 3e-2
            if not abs(found - own) <= tolerance * max(own, 1.0):
                raise InputError(
                    f"{type(model).__name__}: layer by layer its loss is {found:.6f}, in one go {own:.6f}; it does more than "
                    f"layers, norm and output layer. {_REMEDY}"
                )
            yield layers


def hidden_states(output: Tensor | tuple) -> Tensor:
    """What a decoder layer of transformers returns, without what some return beside it."""
    return output[0] if isinstance(output, tuple) else output


class _EnteredError(Exception):
    """Carries the hidden states out of a forward pass that is not wanted any further."""

    def __init__(self, hidden: Tensor):
        super().__init__("layer 0 reached")
        self.hidden = hidden


def _output_projection(attention: nn.Module) -> nn.Module:
    for name in _OUTPUT_PROJECTIONS:
        if isinstance(getattr(attention, name, None), nn.Module):
            return getattr(attention, name)
    raise InputError(
        f"{type(attention).__name__}: expected an output projection called {', '.join(_OUTPUT_PROJECTIONS)}, found none; "
        f"{_REMEDY}"
    )


def _probe(model: PreTrainedModel, tokens: int) -> Tensor:
    entries, seeded = model.get_input_embeddings().num_embeddings, torch.Generator().manual_seed(0)
    return torch.randint(0, entries, (1, tokens), generator=seeded).to(model.device)


def _own_loss(model: PreTrainedModel, tokens: int) -> float:
    ids = _probe(model, tokens)
    logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
    return float(nn.functional.cross_entropy(logits, ids[0, 1:]))
