"""A model taken layer by layer, so that what ablations have in common is computed once.

Besides `shape` and `registry`, the only place that knows how a transformers decoder is put together. It repeats no layer's
arithmetic: layers are called with the arguments that the model itself gave them, and what comes before and after attention is
found by watching a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models.linear import Linear, choose_linear, replace_linears
from shadowattn.models.registry import replace_attention
from shadowattn.models.shape import attention_modules, decoder_of, layer_of, model_shape
from shadowattn.online.attention import Request

Variants = Callable[[Tensor, Tensor, Tensor, float, Tensor], Tensor]
"""(q [B, H, T, D], k, v [B, G, T, D], scale, heads' outputs [B, T, H·D]) → other outputs [n, B, T, H·D]."""

# Rows × vocabulary entries whose logits exist at a time: 8 MiB of float32 stay in the caches.
_LOSS_ROWS, _LOSS_ENTRIES = 512, 4096
_REMEDY = (
    "importance.method=plain measures ablations without this; for retentions without any measurement use the allocator uniform"
)


@dataclass
class _Call:
    """How the model calls one layer, for any batch of windows of this length, and what takes its attention's output."""

    positional: tuple = ()
    named: dict = field(default_factory=dict)
    after_attention: nn.Module | None = None


class Layerwise:
    """The layers of one model for windows of one length; made by `layerwise`.

    Hidden states are [B, T, C] in the model's dtype; attention is computed in float32 and causal.
    """

    def __init__(self, model: PreTrainedModel, tokens: int, linear: Linear):
        self._model, self._linear, self._decoder = model, linear, decoder_of(model)
        self._modules = attention_modules(model)
        self._layers = decoder_layers(model)
        self._head = model.get_output_embeddings()
        if not isinstance(self._head, nn.Linear):
            raise self.refusal(f"expected a linear output layer, got {type(self._head).__name__}")
        config = model.config.get_text_config()
        self._logit_scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
        self._seen: tuple[Tensor, Tensor, Tensor, float] | None = None
        self._attended: Tensor | None = None
        self._calls = [_Call() for _ in self._layers]
        self._tail: list[nn.Module] = []
        self._watch(torch.zeros(1, tokens, dtype=torch.int64, device=model.device))

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
        raise self.refusal("expected to reach layer 0, did not")

    def layer(self, index: int, hidden: Tensor) -> Tensor:
        """What layer `index` makes of the hidden states."""
        call = self._calls[index]
        return hidden_states(self._layers[index](hidden, *call.positional, **call.named))

    def varied(self, index: int, hidden: Tensor, variants: Variants) -> Tensor:
        """Layer `index` with several attention outputs on the same hidden states: [n, B, T, C].

        All that comes before the attention's output is computed once; what follows, once for each variant.
        """

        def vary(module, args):
            q, k, v, scale = self._seen
            return (variants(q, k, v, scale, args[0]), *args[1:])

        with ExitStack() as undo:
            undo.callback(self._calls[index].after_attention.register_forward_pre_hook(vary).remove)
            for module in self._layers[index].children():
                if self._modules[index] not in module.modules():
                    undo.enter_context(_as_one_batch(module))
            return self.layer(index, hidden)

    def rest(self, index: int, hidden: Tensor) -> Tensor:
        """The layers from `index` on."""
        for number in range(index, len(self._layers)):
            hidden = self.layer(number, hidden)
        return hidden

    def losses(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Mean loss in nat of each sequence's tokens but its first, float64 [B], from the last layer's hidden states.

        The logits of a few rows and vocabulary entries exist at a time, never all.
        """
        batch, tokens, _ = hidden.shape
        for module in self._tail:
            hidden = module(hidden)
        rows = hidden[:, :-1].flatten(0, 1)
        targets = ids[:, 1:].reshape(-1)
        parts = [self._cross_entropy(r, t) for r, t in zip(rows.split(_LOSS_ROWS), targets.split(_LOSS_ROWS), strict=True)]
        return torch.cat(parts).view(batch, tokens - 1).mean(1)

    def check(self, ids: Tensor, expected: Tensor) -> None:
        """Raises `InputError` unless the layers, taken one by one, give the losses `expected` [B] of the model for ids [B, T],
        and unless a layer whose attention's output is given in two copies makes of both what it makes of one."""
        hidden = self.embed(ids)
        for index in range(len(self._layers)):
            once = self.layer(index, hidden)
            if not torch.equal(self._entered_after(index, hidden), self._attended):
                raise self.refusal(f"layer {index} changes its attention's output before it projects it")
            twice = self.varied(index, hidden, lambda q, k, v, scale, heads: torch.stack([heads, heads]))
            size = float(once.abs().max())
            if twice.shape[1:] != once.shape or float((twice - once).abs().max()) > _tolerance(self._model) * max(size, 1.0):
                raise self.refusal(f"layer {index} makes something else of two attention outputs at once than of each")
            hidden = once
        losses = self.losses(hidden, ids)
        if not bool(((losses - expected).abs() <= _tolerance(self._model) * expected.clamp(min=1.0)).all()):
            raise self.refusal(
                f"its loss is {float(losses[0]):.6f}, in one go {float(expected[0]):.6f}, so it does more than layers, norm and "
                "output layer"
            )

    def refusal(self, reason: str) -> InputError:
        """What to raise where the model is not put together as is needed here."""
        return InputError(f"{type(self._model).__name__}, taken layer by layer: {reason}; {_REMEDY}")

    def _cross_entropy(self, rows: Tensor, targets: Tensor) -> Tensor:
        """float64 [rows], by a running logarithm of the sum of exponentials over slices of the vocabulary."""
        weight, bias = self._head.weight, self._head.bias
        total = torch.full((len(rows),), -torch.inf, dtype=torch.float64, device=rows.device)
        hit = torch.empty_like(total)
        for start in range(0, len(weight), _LOSS_ENTRIES):
            part = slice(start, start + _LOSS_ENTRIES)
            logits = self._linear(rows, weight[part], None if bias is None else bias[part]).float() * self._logit_scale
            total = torch.logaddexp(total, torch.logsumexp(logits, 1).double())
            here = ((targets >= start) & (targets < start + _LOSS_ENTRIES)).nonzero()[:, 0]
            hit[here] = logits[here, targets[here] - start].double()
        return total - hit

    def _attention(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, request: Request) -> Tensor:
        self._seen = (q, k, v, scale)
        out = dense(q.float(), k.float(), v.float(), causal_offset=0, scale=scale).to(q.dtype)
        self._attended = out.transpose(1, 2).flatten(2)  # as the modules of transformers hand it on: [B, T, H·D]
        return out

    def _entered_after(self, index: int, hidden: Tensor) -> Tensor:
        """What enters the module behind the attention of layer `index`."""
        entered: list[Tensor] = []
        handle = self._calls[index].after_attention.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
        try:
            self.layer(index, hidden)
        finally:
            handle.remove()
        return entered[0]

    def _watch(self, ids: Tensor) -> None:
        """Finds, in a forward pass of ids [1, T], how each layer is called, and what follows attention and the last layer."""
        left: list[int] = []

        def enter(index):
            def remember(module, args, kwargs):
                self._attended = None
                named = {name: value for name, value in kwargs.items() if name != "hidden_states"}
                self._calls[index].positional, self._calls[index].named = args[1:], named

            return remember

        def follow(index):
            def remember(module, args):
                if self._attended is not None and self._calls[index].after_attention is None:
                    self._calls[index].after_attention = module

            return remember

        def leave(index):
            return lambda module, args, output: left.append(index)

        def end(module, args):
            if len(left) == len(self._layers):
                self._tail.append(module)

        with ExitStack() as undo:
            for index, layer in enumerate(self._layers):
                undo.callback(layer.register_forward_pre_hook(enter(index), with_kwargs=True).remove)
                undo.callback(layer.register_forward_hook(leave(index)).remove)
                for module in self._modules[index].children():
                    undo.callback(module.register_forward_pre_hook(follow(index)).remove)
            around = next(part for part in self._decoder.modules() if self._layers[0] in _grandchildren(part))
            for module in around.children():
                undo.callback(module.register_forward_pre_hook(end).remove)
            with replace_attention(self._model, self._attention):
                self._decoder(input_ids=ids, use_cache=False)
        missing = [index for index, call in enumerate(self._calls) if call.after_attention is None]
        if missing:
            raise self.refusal(f"expected a module that takes the attention's output in each layer, found none in {missing}")


@contextmanager
def layerwise(model: PreTrainedModel, tokens: int, linear: Linear) -> Iterator[Layerwise]:
    """`model` layer by layer for windows of `tokens` tokens; its attention and linear layers are replaced meanwhile.

    Raises `InputError` where the model is not put together as expected, found out by comparing what its layers do with what the
    whole does, on two windows of random tokens.
    """
    with torch.no_grad():
        ids = _probe(model, tokens)
        losses = _own_losses(model, ids)
        layers = Layerwise(model, tokens, linear)
        with replace_attention(model, layers._attention, by_layer=True), replace_linears(model, linear):
            try:
                layers.check(ids, losses)
            except InputError:
                raise
            except Exception as error:  # whatever a layer of another make raises when it is called in another way
                raise layers.refusal(f"its layers cannot be called so ({type(error).__name__}: {error})") from error
            yield layers


def check_layerwise(model: PreTrainedModel, tokens: int = 16) -> None:
    """Raises `InputError` where `layerwise` would, at the cost of a few short forward passes."""
    with layerwise(model, min(tokens, model_shape(model).context_tokens), choose_linear("auto")):
        pass


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers, all of which attend. Raises `InputError` on a hybrid."""
    modules = attention_modules(model)
    layers = [layer_of(model, module) for module in modules]
    blocks = next(part for part in model.modules() if isinstance(part, nn.ModuleList) and layers[0] in part.children())
    if list(blocks) != layers:
        raise InputError(f"{type(model).__name__}: expected attention in each of its {len(blocks)} layers; {_REMEDY}")
    return layers


def hidden_states(output: Tensor | tuple) -> Tensor:
    """What a decoder layer of transformers returns, without what some return beside it."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def _as_one_batch(module: nn.Module) -> Iterator[None]:
    """Inputs [n, B, T, C] go through `module` as [n·B, T, C]: a mixture of experts, for one, takes three dimensions only."""
    counts: list[int | None] = []

    def flatten(_, args):
        varied = bool(args) and isinstance(args[0], Tensor) and args[0].dim() == 4
        counts.append(len(args[0]) if varied else None)
        return (args[0].flatten(0, 1), *args[1:]) if varied else None

    def unflatten(_, args, output):
        count = counts.pop()
        if count is None:
            return None
        if isinstance(output, tuple):
            return (output[0].unflatten(0, (count, -1)), *output[1:])
        return output.unflatten(0, (count, -1))

    handles = [module.register_forward_pre_hook(flatten), module.register_forward_hook(unflatten)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _grandchildren(module: nn.Module) -> list[nn.Module]:
    return [grandchild for child in module.children() for grandchild in child.children()]


class _EnteredError(Exception):
    """Carries the hidden states out of a forward pass that is not wanted any further."""

    def __init__(self, hidden: Tensor):
        super().__init__("layer 0 reached")
        self.hidden = hidden


def _tolerance(model: PreTrainedModel) -> float:
    return 1e-4 if model.dtype == torch.float32 else 3e-2


def _probe(model: PreTrainedModel, tokens: int) -> Tensor:
    """Two windows, so that a layer that mixes up windows and variants is found out."""
    outputs = getattr(model.get_output_embeddings(), "out_features", None)  # some models read a token that they never say
    entries, seeded = min(filter(None, (model.get_input_embeddings().num_embeddings, outputs))), torch.Generator().manual_seed(0)
    return torch.randint(0, entries, (2, tokens), generator=seeded).to(model.device)


def _own_losses(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """float64 [B]."""
    logits = (model(input_ids=window[None], use_cache=False).logits[0, :-1].float() for window in ids)
    return torch.stack([nn.functional.cross_entropy(part, ids[i, 1:]).double() for i, part in enumerate(logits)])
