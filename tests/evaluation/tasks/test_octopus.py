import json

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import Octopus
from tests.evaluation.tasks.chat import Chatty

FUNCTIONS = [{"name": f"do_{at}", "description": f"Does\n  {at}."} for at in range(8)]
QUERIES = [{"query": f"please do {at} now", "function": f"do_{at % 8}"} for at in range(12)]


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


@pytest.fixture
def files(tmp_path):
    return {"functions": write(tmp_path / "functions.jsonl", FUNCTIONS), "path": write(tmp_path / "queries.jsonl", QUERIES)}


@pytest.mark.parametrize("chat", [False, True])
def test_a_letter_stands_for_the_function(files, chat, bundled):
    tokenizer = Chatty(bundled.tokenizer)
    questions = Octopus(**files, documents=4, shots=3, chat=chat).questions(tokenizer, "")
    assert len(questions) == 4
    orders = set()
    for question, asked in zip(questions, QUERIES, strict=False):
        prompt = tokenizer.decode(question.prompt)
        described = dict(line.split(". ", 1) for line in prompt.splitlines() if ". do_" in line)
        assert {text.partition(": ")[0] for text in described.values()} == {one["name"] for one in FUNCTIONS}
        letter = tokenizer.decode(question.choices[question.right]).strip()
        assert described[letter] == f"{asked['function']}: Does {asked['function'][3:]}."
        assert [tokenizer.decode(choice).strip() for choice in question.choices] == list(described)
        *shown, last = prompt.split("Request: ")[1:]
        assert len(shown) == 3
        for one in shown:
            query, _, answer = one.partition("\nFunction: ")
            of_query = next(other for other in QUERIES[4:] if other["query"] == query)
            assert described[answer.strip()[0]].startswith(f"{of_query['function']}:")
        assert last.startswith(asked["query"])
        assert question.tokens == len(question.prompt) + 1
        orders.add(tuple(described.values()))
    assert len(orders) > 1


def test_as_many_functions_are_described_as_fit_into_the_tokens(files, bundled):
    tokenizer, settings = bundled.tokenizer, {**files, "documents": 4, "shots": 2, "top": 2}
    every = Octopus(**settings).questions(tokenizer, "")
    longest = max(question.tokens for question in every)
    assert [one.prompt.tolist() for one in Octopus(**settings, tokens=longest).questions(tokenizer, "")] == [
        one.prompt.tolist() for one in every
    ]
    fewer = Octopus(**settings, tokens=longest - 20).questions(tokenizer, "")
    for question, asked in zip(fewer, QUERIES, strict=False):
        prompt = tokenizer.decode(question.prompt)
        described = dict(line.split(". ", 1) for line in prompt.splitlines() if ". do_" in line)
        assert 3 <= len(described) == len(question.choices) < 8
        assert longest - 40 < question.tokens <= longest - 20
        letter = tokenizer.decode(question.choices[question.right]).strip()
        assert described[letter].startswith(f"{asked['function']}:")
        for one in prompt.split("Request: ")[1:-1]:
            query, _, answer = one.partition("\nFunction: ")
            of_query = next(other for other in QUERIES[4:] if other["query"] == query)
            assert described[answer.strip()[0]].startswith(f"{of_query['function']}:")
    with pytest.raises(InputError, match=r"task.tokens: expected at least \d+ for \d functions and 2 examples, got 30"):
        Octopus(**settings, tokens=30).questions(tokenizer, "")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": 0}, "task.documents"),
        ({"top": 0}, "task.top"),
        ({"top": 8}, "task.top: expected at most the 7 functions beside the right one"),
        ({"shots": -1}, "task.shots"),
        ({"documents": 10}, "task.documents: expected at most the 12 requests, examples among them"),
        ({"path": "nowhere.jsonl"}, "task.path: expected a file"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message, files, bundled):
    with pytest.raises(InputError, match=message):
        Octopus(**files | {"documents": 3} | wrong).questions(bundled.tokenizer, "")


def test_functions_that_cannot_be_named_are_refused(files, tmp_path, bundled):
    many = write(tmp_path / "many.jsonl", [{"name": f"do_{at}", "description": "."} for at in range(27)])
    with pytest.raises(InputError, match=r"task\.functions: expected at most the 26 letters"):
        Octopus(**files | {"functions": many}, documents=3).questions(bundled.tokenizer, "")
    other = write(tmp_path / "other.jsonl", [*QUERIES, {"query": "do", "function": "undo"}])
    with pytest.raises(InputError, match=r"expected functions of task\.functions, got undo"):
        Octopus(**files | {"path": other}, documents=3).questions(bundled.tokenizer, "")
