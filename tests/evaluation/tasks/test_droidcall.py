import json

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import DroidCall
from shadowattn.evaluation.tasks.droidcall import call
from tests.evaluation.tasks.chat import Chatty

INTENTS = [
    {"id": at, "action": f"DO_{at}", "uri": "None", "mime": {}, "desc": f"Does\n  {at}.", "extras": {"HOW": f"the way of {at}"}}
    for at in range(1, 7)
]


def solved(query: str, number: int, **how) -> dict:
    return {"query": query, "intent": f"DO_{number}", "id": number, "uri": "", "mime": None, "extras": {"HOW": query[:3]}, **how}


QUERIES = [solved(f"please do {at}", at) for at in (2, 4, 6)]
EXAMPLES = [solved(f"try {letter} with {at}", at) for at in range(1, 7) for letter in "abc"]


def write(path, records):
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


@pytest.fixture
def files(tmp_path):
    """Three queries, six intents, and three examples of each intent beside the queries themselves and one of a wrong number."""
    wrong = solved("of a wrong number", 1, intent="DO_2")
    return {
        "path": write(tmp_path / "queries.jsonl", QUERIES),
        "intents": write(tmp_path / "intents.jsonl", INTENTS),
        "examples": write(tmp_path / "examples.jsonl", [*QUERIES, *EXAMPLES, wrong]),
    }


def parts(prompt: str) -> tuple[list[dict], list[tuple[str, str]], str]:
    """The intents, the solved examples and the query of a prompt."""
    described, _, examples = prompt.partition("\n\n")
    *shots, last = examples.split("Request: ")[1:]
    pairs = [tuple(shot.strip().split("\nCall: ")) for shot in shots]
    return [json.loads(line) for line in described.splitlines()[1:]], pairs, last.partition("\n")[0]


@pytest.mark.parametrize("tokens", [270, 300, 340])
def test_as_many_intents_are_offered_as_fit_into_the_tokens(tokens, files, bundled):
    settings = {**files, "documents": 3, "shots": 2, "offered": 2}
    plain = DroidCall(**settings).questions(bundled.tokenizer, "")
    for query, few, question in zip(
        QUERIES, plain, DroidCall(**settings, tokens=tokens).questions(bundled.tokenizer, ""), strict=True
    ):
        intents, _, asked = parts(bundled.tokenizer.decode(question.prompt))
        assert asked == query["query"]
        assert query["intent"] in [intent["intent"] for intent in intents]
        assert few.tokens <= question.tokens <= tokens
        longest = max(len(bundled.tokenizer.encode(json.dumps(intent) + "\n")) for intent in intents)
        assert len(intents) == 6 or question.tokens + longest + 2 > tokens  # no room for another


def test_tokens_that_hold_not_even_what_is_offered_are_refused(files, bundled):
    with pytest.raises(InputError, match=r"task.tokens: expected at least \d+ for 4 intents and 5 examples, got 60"):
        DroidCall(**files, documents=3, tokens=60).questions(bundled.tokenizer, "")


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(("shots", "offered"), [(5, 4), (0, 1), (2, 6)])
def test_a_prompt_describes_intents_and_shows_calls_of_them(shots, offered, chat, files, bundled):
    tokenizer = Chatty(bundled.tokenizer)
    questions = DroidCall(**files, documents=3, shots=shots, offered=offered, chat=chat).questions(tokenizer, "")
    for query, question in zip(QUERIES, questions, strict=True):
        prompt, answer = tokenizer.decode(question.prompt), tokenizer.decode(question.answer)
        if chat:
            message, line = prompt.removeprefix("<user>").split("</user>\n<assistant>")
            assert line == "Call:"
            prompt = f"{message}\nCall:"
        intents, examples, asked = parts(prompt)
        assert asked == query["query"]
        assert prompt.endswith(f"Request: {asked}\nCall:")
        names = {intent["intent"] for intent in intents}
        assert len(intents) == len(names) == offered
        assert json.loads(answer) == {"intent": query["intent"], "extras": {"HOW": "ple"}}
        assert json.loads(answer)["intent"] in names
        known = {example["query"]: example for example in EXAMPLES}
        assert len(examples) == len(set(examples)) == shots
        for request, shown in examples:
            assert f" {shown}" == call(known[request])
            assert known[request]["intent"] in names
        for intent in intents:
            number = intent["intent"].removeprefix("DO_")
            assert intent["description"] == f"Does {number}."
            assert intent["extras"] == {"HOW": f"the way of {number}"}


def test_questions_are_the_same_for_the_same_seed_alone(files, bundled):
    def prompts(**how):
        return [one.prompt.tolist() for one in DroidCall(**files, documents=2, **how).questions(bundled.tokenizer, "")]

    assert prompts() == prompts()
    assert prompts() != prompts(seed=1)


def test_a_call_leaves_out_what_is_empty_and_nothing_else():
    record = solved("q", 1, uri="None", mime={}, extras={"A": None, "B": "None", "C": [], "D": False, "E": 0, "F": "é"})
    assert call(record) == ' {"intent": "DO_1", "extras": {"D": false, "E": 0, "F": "é"}}'
    assert call(solved("q", 1, uri="tel:1", mime="text/plain", extras={})) == (
        ' {"intent": "DO_1", "uri": "tel:1", "mime": "text/plain"}'
    )


def test_the_published_files_are_read(test_data, bundled):
    folder = test_data / "data" / "droidcall"
    names = {"path": "annotation_data.jsonl", "intents": "intents.jsonl", "examples": "machine_generated.jsonl"}
    task = DroidCall(**{setting: str(folder / name) for setting, name in names.items()})
    questions = task.questions(bundled.tokenizer, "")
    assert len(questions) == 48
    published = [json.loads(line)["query"] for line in (folder / names["path"]).read_text().splitlines()]
    told = 0
    for query, question in zip(published, questions, strict=True):
        prompt, answer = bundled.tokenizer.decode(question.prompt), bundled.tokenizer.decode(question.answer)
        intents, examples, asked = parts(prompt)
        assert asked == " ".join(query.split())
        assert len(intents) == 4
        assert len(examples) == 5
        assert not {request for request, _ in examples} & set(published)
        assert json.loads(answer)["intent"] in {intent["intent"] for intent in intents}
        told += answer.strip() in {shown.strip() for _, shown in examples}
    assert told == 22


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"documents": 4}, r"task\.documents: expected at most the 3 queries of the file, got 4; use fewer"),
        ({"documents": 0}, r"task\.documents: expected at least 1, got 0"),
        ({"offered": 0}, r"task\.offered: expected at least 1, got 0"),
        ({"offered": 7}, r"task\.offered: expected at most the 6 intents of the file, got 7; use fewer"),
        ({"shots": -1}, r"task\.shots: expected at least 0, got -1"),
        ({"shots": 4, "offered": 1}, r"task\.shots: expected at most the 3 examples of the intents that are offered, got 4; use"),
        ({"path": "nowhere"}, r"task\.path: expected a file, got 'nowhere', where there is none; give annotation_data\.jsonl of"),
        ({"intents": "nowhere"}, r"task\.intents: expected a file, got 'nowhere', where there is none; give intents\.jsonl of"),
        ({"examples": "nowhere"}, r"task\.examples: expected a file, .* there is none; give machine_generated\.jsonl of"),
    ],
)
def test_refuses_what_the_files_do_not_hold(how, message, files, bundled):
    with pytest.raises(InputError, match=message):
        DroidCall(**{**files, "documents": 3, **how}).questions(bundled.tokenizer, "")


def test_refuses_one_file_in_place_of_another(files, bundled):
    with pytest.raises(InputError, match=r"task\.path, line 1: expected a JSON object with query, intent, extras, id, got"):
        DroidCall(**{**files, "path": files["intents"]}, documents=3).questions(bundled.tokenizer, "")
