"""INT8 scores are rounded by what was observed: the largest product fits, and a tail may not."""

import pytest
import torch

from shadowattn.errors import InputError
from shadowattn.offline.requantisation import ProductObservations, largest_product, observe_products
from shadowattn.types import Requant
from tests.profiles import GRID
from tests.tiny import tiny_model


def test_the_largest_product_is_that_of_the_integers():
    q, k = torch.tensor([[1.0, -2.0]]), torch.tensor([[3.0, 1.0], [0.2, 4.0]])
    assert largest_product(q, k, (1.0, 1.0)) == 8  # −2 · 4 + 1 · 0
    assert largest_product(q, k, (2.0, 0.5)) == 8  # q 0 (half to even), −1; k 6, 2 and 0, 8
    assert largest_product(1000 * q, k, (1.0, 1.0)) == 127 * 4


def test_every_head_and_chunk_is_observed_and_lands_at_127():
    model = tiny_model()
    windows = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(0))
    seen = observe_products(model, windows, GRID, chunk_tokens=32)
    assert len(seen.observed) == 2 * 2 * 2 * 4  # windows, chunks, layers, heads
    for multiplier, scale in seen.observed:
        assert any(abs(q * k / multiplier - scale) < 1e-12 for q, k in GRID.pairs)


def test_both_modes():
    seen = ProductObservations(tuple((float(m), 1 / m) for m in range(1, 102)))
    assert seen.requant("target_requant") == Requant("target_requant", 6 / 1.05)
    assert seen.requant("fixed_output") == Requant("fixed_output", 1.05)


def test_requant_says_what_a_bucket_comes_to():
    target, fixed = Requant("target_requant", 0.01), Requant("fixed_output", 0.5)
    assert target.multiplier(0.1, 0.2) == target.multiplier(1.0, 1.0) == 0.01
    assert target.output_scale(0.1, 0.2) == pytest.approx(2.0)
    assert fixed.multiplier(0.1, 0.2) == pytest.approx(0.04)
    assert fixed.output_scale(0.1, 0.2) == 0.5


@pytest.mark.parametrize(("mode", "value"), [("dynamic", 1.0), ("fixed_output", 0.0), ("target_requant", float("inf"))])
def test_bad_values_are_refused(mode, value):
    with pytest.raises(InputError, match="requant: expected"):
        Requant(mode, value)
