"""Divergent tokens: greedy decoding by definition, and what a method does along it."""

import pytest
import torch

import shadowattn
from shadowattn.errors import InputError
from shadowattn.evaluation.generation import DenseContinuations, divergence, greedy
from shadowattn.online.estimators.random import Random
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_greedy_decoding_is_the_models_own():
    model, prompt = tiny_model(), windows()[0]
    options = {"attention_mask": torch.ones_like(prompt)[None], "do_sample": False, "eos_token_id": None, "max_new_tokens": 12}
    made = model.generate(prompt[None], **options)[0, len(prompt) :]
    assert greedy(model, prompt, 12).equal(made)
    anew = prompt
    for _ in range(12):
        anew = torch.cat([anew, model(input_ids=anew[None]).logits[0, -1:].argmax(-1)])
    assert greedy(model, prompt, 12).equal(anew[len(prompt) :])


def test_dense_attention_does_not_diverge_from_itself():
    model = tiny_model()
    dense = DenseContinuations(model, windows(), tokens=20, chunk_tokens=32)
    assert all(len(text) == 70 and text[-20:].equal(expected) for text, expected in dense)
    found = divergence(model, list(dense), chunk_tokens=32)
    assert (found.first, found.share) == (20, 0)


@torch.no_grad()
def test_a_method_diverges_where_its_own_decoding_does():
    model, chosen = tiny_model(), Random()
    kept = list(DenseContinuations(model, windows(), tokens=20, chunk_tokens=32))
    firsts, shares = [], []
    with shadowattn.attach(model, 0.1, estimator=chosen, chunk_tokens=32):
        found = divergence(model, kept, chunk_tokens=32)
        for text, expected in kept:
            differs = []
            for at in range(50, 70):  # every token by a prompt of its own
                with shadowattn.models.prompt():
                    differs.append(int(model(input_ids=text[None, :at]).logits[0, -1].argmax()) != int(expected[at - 50]))
            firsts.append(differs.index(True) if True in differs else 20)
            shares.append(sum(differs) / 20)
    assert found.share == pytest.approx(sum(shares) / 2)
    assert found.firsts == tuple(firsts)
    spread = {"first_divergent_token_min": min(firsts), "first_divergent_token_max": max(firsts)}
    spread |= {"divergent_tokens_min": min(shares), "divergent_tokens_max": max(shares)}
    means = {"first_divergent_token": sum(firsts) / 2, "divergent_tokens": sum(shares) / 2}
    assert found.metrics() == pytest.approx(means | spread)
    assert 0 < found.share <= 1


@pytest.mark.parametrize("tokens", [0, 70])
def test_a_prompt_and_a_token_are_needed(tokens):
    with pytest.raises(InputError, match="expected 1 to 69"):
        DenseContinuations(tiny_model(), windows(), tokens=tokens, chunk_tokens=32)
