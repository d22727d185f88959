import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.online.estimators.sparq import SparQ
from tests.online.estimators.test_rankings import DIM, assert_defined, chunk_of


@given(channels=st.integers(1, DIM))
def test_sparq_sums_the_rows_largest_channels(channels):
    def plain(q, k, position, key):
        largest = sorted(range(DIM), key=lambda c: (-abs(float(q[c])), c))[:channels]
        return sum(q[c] * k[key, c] for c in largest)

    assert_defined(SparQ(channels), chunk_of(20), plain)


def test_sparq_with_every_channel_is_exact_and_with_more_is_refused():
    chunk = chunk_of(20)
    exact = chunk.q @ chunk.k.repeat_interleave(2, 0).mT
    torch.testing.assert_close(SparQ(DIM).scores(chunk), exact)
    with pytest.raises(InputError, match="1 … 24, the head dimension, got 25"):
        SparQ(DIM + 1).scores(chunk)


def test_the_contract_holds():
    shadowattn.check_estimator(SparQ(8))
