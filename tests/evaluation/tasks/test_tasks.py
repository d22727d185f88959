import pytest
import torch

import shadowattn
from shadowattn.data.stdlib import stdlib_text
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import Copy, ExactMatch, Needle, RetrievalKV, scores
from shadowattn.evaluation.tasks.base import encode
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.estimators.random import Random
from tests.evaluation.tasks.chat import Chatty
from tests.profiles import profile_for
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    "task",
    [
        RetrievalKV(documents=3, pairs=5),
        RetrievalKV(documents=3, pairs=5, tokens=400),
        Needle(documents=3, tokens=200),
        Needle(documents=3, tokens=200, wording="number"),
        Needle(documents=3, tokens=300, wording="country"),
        Copy(documents=3, tokens=700),
    ],
)
def test_questions_are_the_same_for_the_same_seed_and_fit(task, bundled):
    filler = stdlib_text("heldout")[:50_000]
    questions, again = (task.questions(bundled.tokenizer, filler) for _ in range(2))
    assert len(questions) == 3
    for one, two in zip(questions, again, strict=True):
        assert one.prompt.equal(two.prompt)
        answer, prompt = bundled.tokenizer.decode(one.answer), bundled.tokenizer.decode(one.prompt)
        assert answer.strip() in prompt
    if isinstance(task, Needle):
        assert all(0.6 * task.tokens < question.tokens <= task.tokens for question in questions)
    other = type(task)(**vars(task) | {"seed": 1}).questions(bundled.tokenizer, filler)
    assert not other[0].prompt.equal(questions[0].prompt)


def test_the_needle_goes_through_its_depths(bundled):
    questions = Needle(documents=4, tokens=300, depths=[0.0, 1.0]).questions(bundled.tokenizer, stdlib_text("heldout")[:50_000])
    for question, at_start in zip(questions, [True, False] * 2, strict=True):
        text = bundled.tokenizer.decode(question.prompt)
        assert (text.index("# note: the word for") < len(text) / 2) == at_start


def share(model, questions) -> float:
    return sum(scores(model, questions, chunk_tokens=128)) / len(questions)


def test_the_bundled_model_retrieves_and_loses_it_without_its_keys(bundled):
    questions = RetrievalKV(documents=10, pairs=20).questions(bundled.tokenizer, "")
    assert share(bundled.model, questions) >= 0.9
    profile = profile_for(bundled.model, 0.2)
    with shadowattn.attach(bundled.model, profile, None, estimator=Oracle()):
        assert share(bundled.model, questions) >= 0.9
    with shadowattn.attach(bundled.model, profile, None, estimator=Random()):
        assert share(bundled.model, questions) <= 0.3


def test_a_match_needs_every_answer_token():
    model = tiny_model()
    prompt = torch.randint(0, 128, (40,), generator=torch.Generator().manual_seed(0))
    first = model(prompt[None]).logits[0, -1].argmax()
    second = model(torch.cat([prompt, first[None]])[None]).logits[0, -1].argmax()
    right, half = torch.stack([first, second]), torch.stack([first, (second + 1) % 128])
    assert scores(model, [ExactMatch(prompt, right)], chunk_tokens=16) == [1.0]
    assert scores(model, [ExactMatch(prompt, right), ExactMatch(prompt, half)], chunk_tokens=16) == [1.0, 0.0]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: RetrievalKV(documents=0),
        lambda: RetrievalKV(pairs=58),
        lambda: RetrievalKV(pairs=5, fewer=5),
        lambda: Needle(depths=[1.5]),
        lambda: Needle(depths=[]),
        lambda: Needle(tokens=64),
        lambda: Needle(documents=0),
        lambda: RetrievalKV(pairs=10, tokens=300),
        lambda: Copy(documents=0),
        lambda: Copy(shots=-1),
        lambda: Copy(lead=12),
        lambda: Copy(tokens=400),
    ],
)
def test_refuses_tasks_that_make_no_sense(wrong):
    with pytest.raises(InputError, match=r"task\."):
        wrong()


def test_refuses_a_haystack_that_is_too_small(bundled):
    with pytest.raises(InputError, match="at most the"):
        Needle(tokens=500).questions(bundled.tokenizer, "import os\n")


def test_prompts_of_many_lengths_end_at_every_place_in_a_block(bundled):
    questions = RetrievalKV(documents=16, pairs=20, fewer=15).questions(bundled.tokenizer, "")
    assert {question.tokens % 8 for question in questions} == set(range(8))


def test_a_number_is_hidden_once_and_asked_for_by_the_beginning_of_its_sentence(bundled):
    (question,) = Needle(documents=1, tokens=300, depths=[0.5], wording="number").questions(
        bundled.tokenizer, stdlib_text("heldout")[:50_000]
    )
    prompt, answer = bundled.tokenizer.decode(question.prompt), bundled.tokenizer.decode(question.answer)
    asked = prompt[prompt.rindex("The special magic number for") :]
    assert asked.endswith(" is")
    assert answer.strip().isdigit()
    assert prompt.count(f"{asked}{answer}.") == 1
    with pytest.raises(InputError, match=r"task\.wording: expected one of note, number, country"):
        Needle(wording="riddle")


def test_a_passage_to_copy_stands_in_the_prompt_after_other_copies(bundled):
    words = " ".join(f"w{i} x{i % 7}" for i in range(400))
    (question,) = Copy(documents=1, tokens=700, shots=2, lead=3, words=6).questions(bundled.tokenizer, words)
    prompt, answer = bundled.tokenizer.decode(question.prompt), bundled.tokenizer.decode(question.answer)
    text, *shown, line = prompt.split("\n")
    assert [text.count(copied) for copied in shown] == [1, 1]
    assert len(line.split()) == len(answer.split()) == 3
    assert text.count(line + answer) == 1


def test_records_stand_in_held_out_text(bundled):
    questions = RetrievalKV(documents=4, pairs=5, tokens=600).questions(bundled.tokenizer, stdlib_text("heldout")[:50_000])
    for question in questions:
        assert 400 < question.tokens <= 600
        lines = bundled.tokenizer.decode(question.prompt).split("\n")
        assert [line.startswith(": ") for line in lines].count(True) == 6


@pytest.mark.parametrize(
    "task",
    [
        RetrievalKV(documents=3, pairs=5, tokens=600, chat=True),
        Needle(documents=3, tokens=600, wording="number", chat=True),
        Copy(documents=3, tokens=900, chat=True),
    ],
)
def test_a_chat_asks_for_a_line_and_begins_the_reply_with_it(task, bundled):
    for question in task.questions(Chatty(bundled.tokenizer), stdlib_text("heldout")[:50_000]):
        prompt = bundled.tokenizer.decode(question.prompt)
        asked, reply = prompt.split("</user>\n<assistant>")
        assert asked.startswith("<user>")
        assert asked.endswith("Repeat a line of the text above, word for word.")
        assert asked.count(reply + bundled.tokenizer.decode(question.answer)) == 1
        assert question.tokens <= task.tokens


def test_refuses_a_chat_without_a_template(bundled):
    with pytest.raises(InputError, match="expected a tokenizer with a chat template"):
        Needle(chat=True).questions(bundled.tokenizer, stdlib_text("heldout")[:50_000])


class Beginning:
    """A tokenizer that puts its beginning token before plain text."""

    def __init__(self, tokenizer):
        self._tokenizer, self.bos_token_id = tokenizer, tokenizer("<").input_ids[0]

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, text, add_special_tokens=True, **options):
        made = self._tokenizer(text, add_special_tokens=False, **options)
        if add_special_tokens:
            made["input_ids"] = [self.bos_token_id, *made["input_ids"]]
        return made


def test_a_plain_prompt_begins_with_one_beginning_token_where_the_tokenizer_puts_one(bundled):
    tokenizer = Beginning(bundled.tokenizer)
    begin = tokenizer.bos_token_id
    assert encode(tokenizer, "a", "b").prompt.tolist() == [begin, *bundled.tokenizer("a").input_ids]
    assert encode(tokenizer, "a", "b").answer.tolist() == bundled.tokenizer("b").input_ids
    assert encode(tokenizer, "<a", "b").prompt.tolist() == bundled.tokenizer("<a").input_ids  # the text spells it
    assert encode(tokenizer, "a", "b", plain=False).prompt.tolist() == bundled.tokenizer("a").input_ids  # the template decides
    assert encode(bundled.tokenizer, "a", "b").prompt.tolist() == bundled.tokenizer("a").input_ids


@pytest.mark.parametrize(
    "task", [Needle(documents=2, tokens=900), Copy(documents=2, tokens=900), RetrievalKV(documents=2, pairs=5, tokens=900)]
)
def test_a_beginning_token_counts_among_the_tokens_of_a_prompt(task, bundled):
    filler = stdlib_text("heldout")[:50_000]
    for with_it, without in zip(
        task.questions(Beginning(bundled.tokenizer), filler), task.questions(bundled.tokenizer, filler), strict=True
    ):
        assert int(with_it.prompt[0]) == Beginning(bundled.tokenizer).bos_token_id
        assert with_it.tokens <= 900
        assert without.tokens <= 900


def test_refuses_a_prompt_that_begins_with_two_bos_tokens(bundled):
    tokenizer = Chatty(bundled.tokenizer)
    tokenizer.bos_token_id = bundled.tokenizer("<").input_ids[0]
    assert encode(tokenizer, "<a", "b").prompt[0] == tokenizer.bos_token_id
    with pytest.raises(InputError, match="expected at most one BOS token at the start of a prompt, got two; take"):
        encode(tokenizer, "<<user>", "b")
