"""The engine on trained models: the bundled one, and SmolLM2 where it was fetched."""

import torch

from shadowattn import Engine
from shadowattn.data.text import stdlib_corpus
from shadowattn.models import LoadedModel, load_bundled

NEW = 200


def agree(loaded: LoadedModel) -> None:
    prompt = loaded.tokenizer(stdlib_corpus().heldout[:4000], verbose=False).input_ids[:300]
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
    expected = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()
    assert list(Engine(loaded.model, chunk_tokens=128).generate(prompt, new_tokens=NEW)) == expected


def test_two_hundred_greedy_tokens_are_those_of_transformers():
    """In float32 with dense attention. A step in which rounding decided would show as another text from there on."""
    agree(load_bundled())


def test_two_hundred_greedy_tokens_of_smollm2_are_those_of_transformers(smollm2):
    agree(smollm2)
