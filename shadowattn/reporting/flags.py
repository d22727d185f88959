"""Two automatic warnings: a sparse method that beats dense, and a dense model that knows too little to lose anything."""

import math

# Losses that differ by less are equal: another order of summation moves them as far.
_ROUNDING_NAT = 1e-5
# Share of the unigram loss that a dense model must get below before its losses mean anything.
_FLOOR_SHARE = 0.9


def quality_flag(*, loss: float, dense_loss: float, floor_loss: float, method: str = "sparse") -> str:
    """The flag of a perplexity row; losses in nat, `floor_loss` that of a unigram model on the same text.

    `method`: what the flag calls the method.
    """
    flags = []
    if loss < dense_loss - _ROUNDING_NAT:
        flags.append(f"{method} beats dense")
    if dense_loss > _FLOOR_SHARE * floor_loss:
        flags.append(f"dense near the floor (unigram perplexity {math.exp(floor_loss):.1f})")
    return "; ".join(flags)
