import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shadowattn.data.retrieval import asked_words
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import CommonWords
from tests.evaluation.tasks.chat import Chatty


def counts(text: str) -> Counter:
    """The definition: every entry of the numbered list on the line, counted."""
    entries = re.findall(r"(\d+)\. ([a-z]+)", text)
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return Counter(word for _, word in entries)


def check(question, task, tokenizer):
    prompt, answer = tokenizer.decode(question.prompt), tokenizer.decode(question.answer)
    first, second = prompt.split("\n\n", 1)
    example, _, line = first.split("\n")
    shown, found = line.removeprefix("The most common words are "), counts(second.split("\n")[0])
    common = [word for word, count in found.most_common(task.common)]
    assert answer == " " + ", ".join(sorted(common))
    assert {found[word] for word in common} == {task.often}
    assert {count for word, count in found.items() if word not in common} == {task.rarely}
    assert set(common) <= set(asked_words("evaluation"))
    example_common = [word for word, _ in counts(example).most_common(task.common)]
    assert shown == ", ".join(sorted(example_common))
    assert not set(example_common) & set(found)
    assert question.tokens <= task.tokens
    return question.tokens


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("tokens", [1024, 1500])
def test_the_answer_is_what_the_list_holds_most_often(tokens, chat, bundled):
    tokenizer = Chatty(bundled.tokenizer)
    task = CommonWords(documents=3, tokens=tokens, chat=chat)
    for question in task.questions(tokenizer, ""):
        assert check(question, task, tokenizer) > tokens - 40  # another word would not fit
        prompt = tokenizer.decode(question.prompt)
        assert prompt.startswith("<user>1. " if chat else "1. ")
        assert prompt.endswith("</user>\n<assistant>The most common words are" if chat else "\nThe most common words are")


@settings(max_examples=10, deadline=None)
@given(common=st.integers(1, 6), rarely=st.integers(2, 4), more=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_count_is_as_set(common, rarely, more, seed, bundled):
    task = CommonWords(documents=1, tokens=1024, common=common, rarely=rarely, often=rarely + more, seed=seed)
    (question,) = task.questions(bundled.tokenizer, "")
    check(question, task, bundled.tokenizer)


def test_questions_are_the_same_for_the_same_seed_alone(bundled):
    def prompts(**how):
        return [one.prompt.tolist() for one in CommonWords(documents=2, tokens=1024, **how).questions(bundled.tokenizer, "")]

    assert prompts() == prompts()
    assert prompts()[0] != prompts(seed=1)[0] != prompts()[1]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"documents": 0}, r"task\.documents: expected at least 1, got 0"),
        ({"rarely": 0}, r"task\.rarely: expected at least 1, got 0"),
        ({"common": 40}, r"task\.common: expected at most \d+, half of the words kept for evaluation, got 40; use fewer"),
        ({"often": 2}, r"task\.often: expected more than task\.rarely = 2, so that common words are common, got 2"),
    ],
)
def test_refuses_counts_that_make_no_sense(how, message):
    with pytest.raises(InputError, match=message):
        CommonWords(**how)


@pytest.mark.parametrize("tokens", [300, 50_000])
def test_refuses_prompts_that_the_words_do_not_fill(tokens, bundled):
    with pytest.raises(
        InputError, match=rf"task\.tokens: expected \d+ to \d+, which .*, got {tokens}; for a longer prompt raise"
    ):
        CommonWords(tokens=tokens).questions(bundled.tokenizer, "")
