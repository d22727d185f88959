import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import MultiHop
from shadowattn.evaluation.tasks.multihop import _with_assignments
from tests.evaluation.tasks.chat import Chatty

ASSIGNMENT = re.compile(r"(?:^|<user>)VAR ([A-Z]{5}) = (?:VAR ([A-Z]{5})|(\d{5}))$", re.MULTILINE)


def holders(document: str, value: str) -> list[str]:
    """The definition: go through the assignments from the top, and note every variable that comes to hold the value."""
    held = {}
    for name, source, number in ASSIGNMENT.findall(document):
        held[name] = held[source] if source else number
    return [name for name, content in held.items() if content == value]


@pytest.mark.parametrize(("chains", "hops"), [(1, 4), (2, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("chat", [False, True])
def test_the_answer_follows_from_the_assignments(chains, hops, chat, bundled, heldout):
    tokenizer = Chatty(bundled.tokenizer)
    task = MultiHop(documents=4, tokens=1600, chains=chains, hops=hops, chat=chat)
    for question in task.questions(tokenizer, heldout):
        prompt, answer = tokenizer.decode(question.prompt), tokenizer.decode(question.answer)
        value = re.search(r"The variables that hold (\d{5}) are$", prompt)[1]
        assert prompt.count(f"Which variables hold {value},") == 1
        assert len(ASSIGNMENT.findall(prompt)) == 2 * chains * (hops + 1)  # the worked example has as many
        assert answer == " " + ", ".join(holders(prompt, value))
        assert len(answer.split()) == hops + 1
        assert 1600 - 4 * len(ASSIGNMENT.findall(prompt)) - 40 < question.tokens <= 1600
        if chat:
            assert prompt.startswith("<user>VAR ")
            assert prompt.split("</user>\n<assistant>")[1] == f"The variables that hold {value} are"


def test_a_worked_example_of_other_variables_comes_first(bundled, heldout):
    (question,) = MultiHop(documents=1, tokens=900, chains=2, hops=2).questions(bundled.tokenizer, heldout)
    prompt = bundled.tokenizer.decode(question.prompt)
    example, text = prompt.split("\n\n", 1)
    shown = re.search(r"The variables that hold (\d{5}) are (.*)$", example)
    assert holders(example, shown[1]) == shown[2].split(", ")
    assert not {name for name, _, _ in ASSIGNMENT.findall(example)} & {name for name, _, _ in ASSIGNMENT.findall(text)}


def test_questions_are_the_same_for_the_same_seed_alone(bundled, heldout):
    def prompts(**how):
        return [
            question.prompt.tolist()
            for question in MultiHop(documents=2, tokens=900, **how).questions(bundled.tokenizer, heldout)
        ]

    assert prompts() == prompts()
    assert prompts()[0] != prompts(seed=1)[0] != prompts()[1]


@given(
    text=st.text(alphabet="ab \n", max_size=60),
    depths=st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3).map(sorted), min_size=1, max_size=3),
)
def test_lines_of_a_chain_stay_in_its_order_and_the_text_stays_whole(text, depths):
    class Shown:
        def __init__(self, index):
            self.assignments = [f"{index}.{step}\n" for step in range(3)]

    chains = [Shown(index) for index in range(len(depths))]
    lines = _with_assignments(text, chains, depths).splitlines()
    for chain in chains:
        places = [lines.index(line.strip()) for line in chain.assignments]
        assert places == sorted(places)
    assert [line for line in lines if "." not in line] == text.splitlines()


@pytest.mark.parametrize("setting", ["documents", "tokens", "chains", "hops"])
def test_refuses_settings_below_one(setting):
    with pytest.raises(InputError, match=rf"task\.{setting}: expected at least 1, got 0"):
        MultiHop(**{setting: 0})


def test_refuses_more_chains_than_there_are_values():
    with pytest.raises(InputError, match=r"task\.chains: expected at most 45000, got 50000; use fewer"):
        MultiHop(chains=50_000)


def test_refuses_prompts_without_room_for_text(bundled, heldout):
    with pytest.raises(InputError, match=r"task\.tokens: expected more than \d+ and at most the \d+ tokens of the held-out text"):
        MultiHop(tokens=100).questions(bundled.tokenizer, heldout)
