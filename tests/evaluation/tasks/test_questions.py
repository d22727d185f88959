"""How answers are scored."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowattn
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import Choice, ExactMatch, Written, mean_change, mean_score, scores
from shadowattn.evaluation.tasks.questions import Summary
from tests.tiny import tiny_model

PROMPT = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(0))


@given(top=st.integers(1, 5), right=st.integers(0, 5))
def test_a_choice_is_right_among_the_likeliest(top, right):
    model, choices = tiny_model(), torch.tensor([5, 17, 90, 2, 64, 33])
    logits = model(PROMPT[None]).logits[0, -1].detach()
    better = sum(float(logits[choice]) > float(logits[choices[right]]) for choice in choices)
    assert scores(model, [Choice(PROMPT, choices, right, top)], chunk_tokens=16) == [float(better < top)]


def test_of_equally_likely_choices_the_right_one_is_the_last():
    assert scores(tiny_model(), [Choice(PROMPT, torch.tensor([5, 5]), 0, 1)], chunk_tokens=16) == [0.0]


def test_what_is_written_is_what_greedy_decoding_says(bundled):
    model, tokenizer = bundled.model, bundled.tokenizer
    prompt = tokenizer("import os\nimport sys\n\n\ndef main():\n    ", return_tensors="pt").input_ids[0]
    made = prompt
    for _ in range(12):
        made = torch.cat([made, model(made[None]).logits[0, -1:].argmax(-1)])
    expected = tokenizer.decode(made[len(prompt) :])
    seen = []
    question = Written(prompt, tokenizer, lambda text: seen.append(text) or 0.5, 12)
    assert scores(model, [question], chunk_tokens=4) == [0.5]
    assert seen == [expected]
    assert question.tokens == len(prompt) + 12
    first = expected.strip()[:1]
    cut = Written(prompt, tokenizer, lambda text: seen.append(text) or 0.0, 12, until=(first,))
    scores(model, [cut], chunk_tokens=4)
    assert seen[-1] == expected.split(first)[0]


def test_prompts_of_written_answers_are_sparse_and_their_decoding_dense(bundled):
    prompt = bundled.tokenizer("value = " * 40, return_tensors="pt").input_ids[0]
    question = Written(prompt, bundled.tokenizer, lambda text: 1.0, 5)
    with shadowattn.attach(bundled.model, 0.2, estimator="oracle", chunk_tokens=32) as run:
        scores(bundled.model, [question], chunk_tokens=32)
    heads = 32
    assert run.counters.sparse_rows == heads * len(prompt)
    assert run.counters.decode_rows == heads * 4  # the first new token comes from the prompt's last row


def test_penalties_of_a_models_generation_settings_do_not_count(bundled, monkeypatch):
    prompt, seen = bundled.tokenizer("value = value = value = ", return_tensors="pt").input_ids[0], []
    question = Written(prompt, bundled.tokenizer, lambda text: seen.append(text) or 1.0, 12)
    scores(bundled.model, [question], chunk_tokens=8)
    monkeypatch.setattr(bundled.model.generation_config, "repetition_penalty", 5.0)
    scores(bundled.model, [question], chunk_tokens=8)
    assert seen[0] == seen[1]


def test_a_model_that_begins_anew_with_every_chunk_is_refused(bundled, monkeypatch):
    monkeypatch.setattr(bundled.model.config, "model_type", "bamba")
    question = Written(torch.arange(20), bundled.tokenizer, lambda text: 1.0, 2)
    with pytest.raises(InputError, match="a prompt has to go through it in one piece"):
        scores(bundled.model, [question], chunk_tokens=8)


def test_means_have_the_interval_of_their_kind():
    share, mean = mean_score("accuracy", [1.0, 0.0, 1.0, 1.0]), mean_score(Summary.metric, [0.1, 0.3, 0.2])
    assert (share.value, share.n) == (0.75, 4)
    assert share.low == pytest.approx(0.3006, abs=1e-4)
    half = 4.302652729911275 * 0.1 / 3**0.5
    assert (mean.value, mean.low, mean.high) == pytest.approx((0.2, 0.2 - half, 0.2 + half))
    change = mean_change(Summary.metric, [0.1, 0.3, 0.2], [0.1, 0.2, 0.0])
    assert (change.value, change.n) == (pytest.approx(0.1), 3)


@pytest.mark.parametrize(("more", "fewer", "same"), [(0, 0, 20), (5, 1, 14), (0, 12, 8)])
def test_a_change_of_shares_has_agresti_and_mins_interval(more, fewer, same):
    values, others = [1.0] * more + [0.0] * fewer + [1.0] * same, [0.0] * more + [1.0] * fewer + [1.0] * same
    change, n = mean_change(ExactMatch.metric, values, others), more + fewer + same + 2
    p, q = (more + 0.5) / n, (fewer + 0.5) / n
    half = 1.959963984540054 * math.sqrt((p + q - (p - q) ** 2) / n)
    assert change.value == (more - fewer) / (n - 2)
    assert (change.low, change.high) == pytest.approx((max(-1, p - q - half), min(1, p - q + half)))


@pytest.mark.parametrize("question", [ExactMatch(PROMPT, torch.tensor([0])), Choice(PROMPT, torch.tensor([0, 1, 2]), 1)])
def test_logits_that_are_no_numbers_score_nothing(question):
    model = tiny_model()
    model.lm_head.weight = torch.nn.Parameter(torch.full_like(model.lm_head.weight, torch.nan))
    with pytest.raises(InputError, match="the model's logits are NaN"):
        question.score(model, chunk_tokens=8)
