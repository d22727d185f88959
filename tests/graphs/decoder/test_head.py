"""The output layer with INT8 weights against products with the same integers."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shadowattn import Engine
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.head import Int8Head
from tests.tiny import tiny_model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 5, 8, 9, 20])
def test_its_weights_are_rounded_and_nothing_else(rows, dtype):
    generator = torch.Generator().manual_seed(rows)
    weight = (torch.randn(97, 64, generator=generator) * torch.logspace(-3, 3, 97)[:, None]).to(dtype)
    weight[5] = 0
    hidden = torch.randn(rows, 64, generator=generator)
    scales = (weight.float().abs().amax(1, keepdim=True) / 127).clamp(min=1e-30)
    integers = (weight.float() / scales).round()
    expected = hidden.double() @ (integers.double() * scales.double()).T
    found = Int8Head(weight)(hidden)
    assert found.dtype == torch.float32
    size = hidden.double().abs() @ weight.double().abs().T
    assert ((found - expected).abs() <= 1e-5 * size).all()


def test_a_later_call_leaves_earlier_logits_alone():
    head = Int8Head(torch.randn(16, 64))
    first = head(torch.ones(1, 64))
    kept = first.clone()
    head(-torch.ones(1, 64))
    assert torch.equal(first, kept)


def test_threads_take_turns():
    head = Int8Head(torch.eye(64))
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda at: int(head(torch.eye(64)[at % 64 : at % 64 + 1]).argmax()), range(400)))
    assert found == [at % 64 for at in range(400)]


@pytest.mark.parametrize("tokens", [1, 23])
def test_the_engine_with_it_stays_near_the_model(tokens):
    model = tiny_model()
    ids = torch.randint(0, 128, (tokens,), generator=torch.Generator().manual_seed(2))
    exact, rounded = (
        torch.cat([part for _, part in Engine(model, form=BlockForm(head=head), chunk_tokens=16).prefill_chunks(ids)])
        for head in ("model", "int8")
    )
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-4 < error < 0.02
