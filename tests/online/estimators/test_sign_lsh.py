import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.online.estimators.random import Random
from shadowattn.online.estimators.sign_lsh import SignLSH
from tests.online.estimators.test_rankings import DIM, assert_defined, chunk_of


@given(bits=st.integers(1, 9), seed=st.integers(0, 3))
def test_a_key_scores_the_signs_that_agree(bits, seed):
    generator = torch.Generator().manual_seed(seed)
    projections = torch.randn(bits, DIM, generator=generator).double()
    chunk = chunk_of(20)
    whole = SignLSH(bits, seed).scores(chunk).floor()

    def plain(q, k, position, key):
        return ((projections @ q >= 0) == (projections @ k[key] >= 0)).double().sum()

    class Whole:
        def scores(self, _):
            return whole

    assert_defined(Whole(), chunk, plain)


def test_keys_that_agree_as_often_come_at_random():
    chunk = chunk_of(20)
    parts = SignLSH(3, 5).scores(chunk).frac()
    torch.testing.assert_close(parts, Random(5).scores(chunk) * 2.0**-24, atol=2e-6, rtol=0)


def test_the_contract_holds():
    shadowattn.check_estimator(SignLSH())
