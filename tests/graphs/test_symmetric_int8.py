"""Integer products in torch: those of integers, whatever torch multiplies float32 in."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.graphs import symmetric_int8
from shadowattn.graphs.symmetric_int8 import absmax, products


@pytest.fixture(params=["highest", "high", "medium"])
def precision(request):
    """As CUDA's TF32 and oneDNN's bfloat16 may be allowed."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield
    torch.set_float32_matmul_precision(before)


def test_the_largest_products_are_exact(precision):
    """Partial sums of 1040 products of one sign come within 3112 of 2²⁴, and odd ones need all of its bits."""
    k8 = torch.full((1, 3, 1040), 127, dtype=torch.int8)
    k8[0, 1, ::2], k8[0, 2, 7] = -127, 126
    q8 = torch.full((1, 1, 1040), 127, dtype=torch.int8)
    expected = (q8.long() @ k8.long().mT).tolist()
    assert products(q8, k8).long().tolist() == expected
    assert expected[0][0][0] == 1040 * 127**2 < 2**24


@pytest.mark.parametrize("dim", [1, 20, 128, 1040])
@given(seed=st.integers(0, 2**31))
def test_products_are_those_of_integers(dim, seed):
    generator = torch.Generator().manual_seed(seed)
    q8, k8 = (torch.randint(-127, 128, (2, rows, dim), dtype=torch.int8, generator=generator) for rows in (3, 17))
    found = products(q8, k8)
    assert found.dtype == torch.float32
    assert found.long().equal(q8.long() @ k8.long().mT)


def test_more_dimensions_are_refused():
    x = torch.zeros(1, 1, 1041, dtype=torch.int8)
    with pytest.raises(InputError, match=r"at most 1040 dimensions.*got 1041"):
        products(x, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@given(
    seed=st.integers(0, 2**31),
    special=st.sampled_from([None, -torch.inf, torch.nan, -torch.nan, -0.0]),
    part_bytes=st.sampled_from([1, 64, 2**24]),
)
def test_the_largest_magnitude_is_that_of_the_values_and_nan_where_there_is_one(dtype, seed, special, part_bytes):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(5, 3, 8, generator=generator).to(dtype)
    if special is not None:
        tokens[seed % 5, 1, seed % 8] = special
    for x in (tokens.transpose(0, 1), tokens.transpose(0, 1)[:, 1::2, ::3], tokens[:1].expand(3, 3, 8)):
        with mock.patch.object(symmetric_int8, "_PART_BYTES", part_bytes):
            found = absmax(x)
        torch.testing.assert_close(found, x.float().abs().amax((1, 2)), rtol=0, atol=0, equal_nan=True)
