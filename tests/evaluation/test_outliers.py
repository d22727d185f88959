"""Errors of static INT8 attention head by head, and rescalings of Q and K that change no softmax."""

import pytest
import torch

from shadowattn.engine.observe import observe_prefill
from shadowattn.evaluation.outliers import (
    RESCALINGS,
    Candidate,
    Channels,
    measure_head_errors,
    observe_channels,
    rescalings,
)
from shadowattn.offline.attention_ranges import observe_attention_ranges, observe_prepared_ranges
from shadowattn.offline.key_offsets import observe_key_offset
from shadowattn.online.chunk import Chunk
from shadowattn.online.full_int8 import FullInt8
from shadowattn.reference import dense_attention
from shadowattn.types import KeyOffset
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", RESCALINGS)
def test_a_rescaling_changes_no_attention(name):
    generator = torch.Generator().manual_seed(0)
    q, (k, v) = torch.randn(4, 9, 16, generator=generator), torch.randn(2, 2, 20, 16, generator=generator)
    channels = Channels(q.view(2, -1, 16).abs().amax(1), k.amin(1), k.amax(1))
    made = rescalings([channels], KeyOffset([k.mean(1).tolist()]))[name](Chunk.of(q, k, v))
    torch.testing.assert_close(
        dense_attention(made.q, made.k, v, causal_offset=11), dense_attention(q, k, v, causal_offset=11), atol=1e-4, rtol=1e-4
    )
    if name in ("equalised", "both"):  # and Q's and K's ranges meet in every pair that RoPE rotates
        largest = [x.abs().amax(1).view(2, 2, 8).amax(1) for x in (made.q.view(2, -1, 16), made.k)]
        torch.testing.assert_close(*largest, atol=1e-4, rtol=1e-4)


def test_an_offset_shrinks_keys_that_have_a_large_vector_in_common():
    k = torch.randn(1, 50, 16, generator=torch.Generator().manual_seed(0)) + 30
    channels = Channels(torch.ones(1, 16), k.amin(1), k.amax(1))
    less_mean = rescalings([channels], KeyOffset([k.mean(1).tolist()]))["offset"]
    assert float(less_mean(Chunk.of(k[:, :4], k)).k.abs().max()) < 5 < float(k.abs().max())


def test_errors_by_head_are_those_of_whole_attention():
    model, ids = tiny_model(), windows()
    channels = observe_channels(model, ids, chunk_tokens=32)
    rescaled = rescalings(channels, observe_key_offset(model, ids, how="mean", chunk_tokens=32))
    ranges = observe_prepared_ranges(model, ids, rescaled, chunk_tokens=32)
    plain = observe_attention_ranges(model, ids, chunk_tokens=32)
    for key in ("q", "k", "v", "scores"):
        torch.testing.assert_close(torch.tensor(getattr(ranges["none"], key)), torch.tensor(getattr(plain, key)))
    forms = {"qkv": FullInt8(scores=False, probabilities="float"), "all": FullInt8()}
    candidates = {name: Candidate(form, rescaled["none"], ranges["none"]) for name, form in forms.items()}
    candidates["both"] = Candidate(FullInt8(scores=False, probabilities="float"), rescaled["both"], ranges["both"])
    found = measure_head_errors(model, ids, candidates, chunk_tokens=32)
    assert found.rows == ids.numel()
    assert found.relative("all").shape == (2, 4)
    assert (found.relative("qkv") < found.relative("all")).all()
    assert (found.relative("both") < 0.2).all()
    assert ((found.sink >= 0) & (found.sink <= 1)).all()
    assert ((found.small > 0) & (found.small < 1)).all()
    assert (found.k_outlier >= 1).all()


def test_small_probabilities_are_those_that_half_a_step_rounds_to_zero():
    model, ids = tiny_model(), windows(1, 300)
    form = FullInt8(scores=False, probabilities="float")
    channels = observe_channels(model, ids, chunk_tokens=300)
    rescaled = rescalings(channels, observe_key_offset(model, ids, how="mean", chunk_tokens=300))["none"]
    ranges = observe_prepared_ranges(model, ids, {"none": rescaled}, chunk_tokens=300)["none"]
    found = measure_head_errors(model, ids, {"qkv": Candidate(form, rescaled, ranges)}, chunk_tokens=300)
    seen = {}

    def observe(chunk: Chunk) -> None:
        q, k = chunk.q.double(), chunk.k.double()[chunk.heads.kv]
        scores = (q @ k.mT * chunk.scale).masked_fill(torch.ones(300, 300).triu(1).bool(), -torch.inf)
        probability = scores.softmax(-1)
        rounded = (probability * 127).round()
        seen[chunk.layer] = torch.where(rounded == 0, probability, 0.0).sum(2).mean(1)

    observe_prefill(model, ids, observe, chunk_tokens=300)
    torch.testing.assert_close(found.small, torch.stack([seen[layer] for layer in sorted(seen)]).float(), atol=1e-4, rtol=1e-3)
