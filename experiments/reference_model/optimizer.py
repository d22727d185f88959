"""Muon for the hidden matrices, AdamW for embeddings, biases and norms, in one object with a flat tensor state.

Muon (Jordan et al. 2024) replaces a matrix's momentum by the nearest orthogonal matrix, found by five Newton-Schulz
steps; at this size it needs about half of AdamW's tokens.
"""

from collections import defaultdict
from collections.abc import Iterable

import torch

_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


class MuonAdamW:
    """Steps the `named_parameters` of a Qwen2 model; matrices other than the embedding go to Muon.

    Args:
        named_parameters: pairs of name and parameter; the names key the saved state.
        matrix_lr: Muon's peak step: the spectral norm of an update.
        other_lr: AdamW's peak step.
        weight_decay: decoupled, per unit of learning rate, on matrices alone.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, torch.nn.Parameter]],
        *,
        matrix_lr: float,
        other_lr: float,
        weight_decay: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
    ) -> None:
        self.matrix_lr, self.other_lr, self.weight_decay = matrix_lr, other_lr, weight_decay
        self.momentum, self.betas = momentum, betas
        self.steps = 0
        self.matrices, self.others = {}, {}
        for name, weight in named_parameters:
            (self.matrices if weight.ndim == 2 and "embed" not in name else self.others)[name] = weight
        self.state = {f"{name}.momentum": torch.zeros_like(weight) for name, weight in self.matrices.items()}
        for name, weight in self.others.items():
            self.state[f"{name}.mean"] = torch.zeros_like(weight)
            self.state[f"{name}.square"] = torch.zeros_like(weight)

    @torch.no_grad()
    def step(self, lr_scale: float) -> None:
        """Apply the gradients with both learning rates times `lr_scale`, then clear them."""
        self.steps += 1
        self._step_matrices(self.matrix_lr * lr_scale)
        self._step_others(self.other_lr * lr_scale)
        for weight in (*self.matrices.values(), *self.others.values()):
            weight.grad = None

    def load_state(self, state: dict[str, torch.Tensor], steps: int) -> None:
        """Continue from the tensors of another instance's `state` after `steps` steps."""
        if missing := self.state.keys() ^ state.keys():
            raise ValueError(f"expected the optimizer state of this model, got other tensors, e.g. {min(missing)!r}")
        for name, tensor in self.state.items():
            tensor.copy_(state[name])
        self.steps = steps

    def _step_matrices(self, lr: float) -> None:
        same_shape = defaultdict(list)
        for name, weight in self.matrices.items():
            same_shape[weight.shape].append((weight, self.state[f"{name}.momentum"]))
        for (rows, columns), group in same_shape.items():
            weights, momenta = zip(*group, strict=True)
            gradients = [weight.grad for weight in weights]
            torch._foreach_lerp_(momenta, gradients, 1 - self.momentum)
            # Nesterov: look one momentum step ahead.
            ahead = torch.stack([g.lerp(m, self.momentum) for g, m in zip(gradients, momenta, strict=True)])
            updates = orthogonalise(ahead) * max(1.0, rows / columns) ** 0.5
            torch._foreach_mul_(weights, 1 - lr * self.weight_decay)
            torch._foreach_add_(weights, list(updates), alpha=-lr)

    def _step_others(self, lr: float) -> None:
        beta1, beta2 = self.betas
        weights = list(self.others.values())
        means = [self.state[f"{name}.mean"] for name in self.others]
        squares = [self.state[f"{name}.square"] for name in self.others]
        gradients = [weight.grad for weight in weights]
        torch._foreach_lerp_(means, gradients, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)
        scales = torch._foreach_div(squares, 1 - beta2**self.steps)
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, 1e-8)
        torch._foreach_addcdiv_(weights, means, scales, value=-lr / (1 - beta1**self.steps))


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """The `matrices` (batch, rows, columns) with all singular values near 1: bfloat16 inside, float32 out."""
    a, b, c = _NEWTON_SCHULZ
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if tall else x).float()
