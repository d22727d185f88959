"""What Twilight's authors publish of others' selectors in plain torch (github.com/tsinghua-ideal/Twilight, twilight/pyimpl).

Their code is not ours to ship: SHADOWATTN_TWILIGHT names a checkout of it. It was held to commit 35a8e72. Its top-p is a CUDA
operator, so that `TopP` is held to a definition of our own (`test_top_p.py`); so is the gather of Double Sparsity's channels,
which torch's own stands for here.
"""

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.kernels import choose
from shadowattn.online.chunk import Chunk
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.double_sparsity import DoubleSparsity
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.per_token import token_integers
from shadowattn.online.estimators.quest import Quest
from shadowattn.online.estimators.sparq import SparQ
from shadowattn.online.estimators.streaming import Streaming
from shadowattn.online.selection import Rule
from shadowattn.types import ChannelStatistics
from tests.tensors import qkv

FOLDER = Path(os.environ.get("SHADOWATTN_TWILIGHT", "")) / "twilight" / "pyimpl"
HEADS, DIM = 3, 16

pytestmark = pytest.mark.skipif(
    not os.environ.get("SHADOWATTN_TWILIGHT"),
    reason="SHADOWATTN_TWILIGHT names no checkout of Twilight's code, which is not ours to ship",
)


def theirs(module: str):
    """One of its modules; the package's own __init__ needs a GPU."""
    package = sys.modules.setdefault("twilight_pyimpl", ModuleType("twilight_pyimpl"))
    package.__path__ = [str(FOLDER)]
    return importlib.import_module(f"twilight_pyimpl.{module}")


def last_row(keys: int) -> tuple[Chunk, torch.Tensor, torch.Tensor]:
    """A chunk of the one row that decodes, and q [1, H, 1, D] and k [1, H, K, D] as theirs takes them."""
    q, k, _ = qkv(HEADS, HEADS, 1, keys, DIM)
    return Chunk.of(q, k), q[None], k[None]


def ours(estimator: Estimator, chunk: Chunk, count: int) -> list[set[int]]:
    """The keys that each head keeps of so many."""
    kernels = choose("torch", head_dim=DIM, dtype=torch.float32, device=chunk.q.device)
    lists = Rule().lists(torch.full((HEADS,), (count - 0.5) / chunk.keys, dtype=torch.float64), chunk.positions)
    selection = estimator.select(chunk, Rule(), lists, kernels)
    return [set(part.tolist()) for part in selection.indices.split(selection.indptr.diff().tolist())]


def kept(mask: torch.Tensor) -> list[set[int]]:
    return [set(head.nonzero()[:, 0].tolist()) for head in mask[0, :, 0]]


@settings(max_examples=30)
@given(keys=st.integers(2, 60), share=st.floats(0.05, 1))
def test_oracle_keeps_its_keys(keys, share):
    chunk, q, k = last_row(keys)
    count = max(1, round(share * keys))
    weights = q @ k.mT * DIM**-0.5
    assert ours(Oracle(), chunk, count) == kept(theirs("top_k").oracle_topk_selector(weights, count))


@settings(max_examples=30)
@given(keys=st.integers(2, 60), share=st.floats(0.05, 1), channels=st.integers(1, DIM))
def test_sparq_keeps_its_keys(keys, share, channels):
    chunk, q, k = last_row(keys)
    count = max(1, round(share * keys))
    assert ours(SparQ(channels), chunk, count) == kept(theirs("sparq").sparq_selector(q, k, channels, count))


@settings(max_examples=30)
@given(keys=st.integers(8, 60), window=st.integers(1, 20), sinks=st.integers(0, 4))
def test_streaming_keeps_its_keys(keys, window, sinks):
    chunk, q, k = last_row(keys)
    expected = kept(theirs("streaming_llm").streaming_selector(q @ k.mT, window, sinks))
    assert ours(Streaming(sinks), chunk, len(expected[0])) == expected


@settings(max_examples=30)
@given(keys=st.integers(2, 80), page=st.integers(1, 16), pages=st.integers(1, 6))
def test_quest_keeps_its_pages_but_for_the_rows_own_which_is_always_in(keys, page, pages):
    chunk, q, k = last_row(keys)
    model = SimpleNamespace(num_heads=HEADS)
    own = (keys - 1) // page
    scores = Quest(page).scores(chunk)[:, 0]
    for head, expected in enumerate(kept(theirs("quest").quest_selector(model, q, k, page, token_budget=pages * page))):
        others = {key // page for key in expected} - {own}
        ranked = sorted(range(own), key=lambda at, head=head: -float(scores[head, at * page]))
        assert set(ranked[: len(others)]) == others


@settings(max_examples=30)
@given(keys=st.integers(2, 60), share=st.floats(0.05, 1), kept_channels=st.integers(1, DIM), seed=st.integers(0, 99))
def test_double_sparsity_keeps_its_keys(keys, share, kept_channels, seed):
    generator = torch.Generator().manual_seed(seed)
    means = [torch.rand(HEADS, DIM, generator=generator) for _ in "qk"]
    channels = ChannelStatistics([means[0].tolist()], [means[1].tolist()], [torch.eye(DIM).expand(HEADS, -1, -1).tolist()])
    best = (means[0] * means[1]).sort(dim=1, descending=True, stable=True).indices[:, :kept_channels]
    chunk, q, k = last_row(keys)
    count = max(1, round(share * keys))
    selector = with_gather("double_sparse").double_sparse_selector
    expected = kept(selector(q, k, best, kept_channels, quant_bit=32, token_budget=count))
    assert ours(DoubleSparsity(channels, kept_channels), chunk, count) == expected


def with_gather(module: str) -> ModuleType:
    """One of its modules that takes channels by a GPU's kernel, with torch in its place."""

    def get_label_tensor(x: torch.Tensor, channels: torch.Tensor, out: torch.Tensor, count: int) -> None:
        out.copy_(x.gather(2, channels[None, :, :count].expand(len(x), -1, -1)))

    package = sys.modules.setdefault("twilight", ModuleType("twilight"))
    package.ops = sys.modules.setdefault("twilight.ops", ModuleType("twilight.ops"))
    package.ops.get_label_tensor = get_label_tensor
    return theirs(module)


@settings(max_examples=30)
@given(keys=st.integers(1, 60), bits=st.integers(2, 7))
def test_a_keys_own_scale_is_its(keys, bits):
    """Theirs counts the steps on one side of zero, ours the bits with the sign."""
    _, k, _ = qkv(HEADS, HEADS, 1, keys, DIM)
    integers, scales = token_integers(k, bits + 1)
    expected = theirs("quantize").max_per_token_quant_kv(k, bits, smooth=False)
    torch.testing.assert_close(integers * scales, expected, atol=1e-6, rtol=1e-6)
