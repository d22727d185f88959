"""Automatic warnings: a sparse method that beats dense, a dense model that knows too little to lose anything, an estimate that
finds fewer of the exact top-k than the authors' tool asks for."""

import math

from shadowattn.evaluation.recall import TARGET_MEAN

EQUAL_DENSITY = 0.01  # densities that differ by no larger share are equal
UNUSED = "the sparse path was not used: every head went dense"
# Losses that differ by less are equal: another order of summation moves them as far.
_ROUNDING_NAT = 1e-5
# Share of the unigram loss that a dense model must get below before its losses mean anything.
_FLOOR_SHARE = 0.9


def quality_flag(
    *, loss: float, dense_loss: float, floor_loss: float, method: str = "sparse", overlap: float | None = None
) -> str:
    """The flag of a perplexity row; losses in nat, `floor_loss` that of a unigram model on the same text.

    `method`: what the flag calls the method. `overlap`: share of the exact top-k that it found; None: it ranks no keys.
    """
    flags = []
    if loss < dense_loss - _ROUNDING_NAT:
        flags.append(f"{method} beats dense")
    if dense_loss > _FLOOR_SHARE * floor_loss:
        flags.append(f"dense near the floor (unigram perplexity {math.exp(floor_loss):.1f})")
    if overlap is not None and overlap < TARGET_MEAN:
        flags.append(f"top-k overlap below {TARGET_MEAN:.2f}")
    return "; ".join(flags)
