import gzip
import json
import uuid

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import LostInTheMiddle
from shadowattn.evaluation.tasks.files import Published
from tests.evaluation.tasks.chat import Chatty


def name(number: int) -> str:
    return str(uuid.UUID(int=number * 2**90 + number, version=4))


@pytest.fixture
def file(tmp_path):
    """Three lines of six records each, in the published format."""
    lines = []
    for line in range(3):
        records = [(name(100 * line + at + 1), name(1000 + 100 * line + at)) for at in range(6)]
        key, value = records[line + 1]
        lines.append(json.dumps({"ordered_kv_records": records, "key": key, "value": value}))
    path = tmp_path / "records.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    return path


def records_of(prompt: str) -> dict[str, str]:
    """The definition: the JSON object in the prompt, in its order."""
    return json.loads(prompt[prompt.index("{") : prompt.index("}") + 1])


@pytest.mark.parametrize(("position", "pairs"), [(0, None), (5, None), (0, 1), (2, 4)])
@pytest.mark.parametrize("chat", [False, True])
def test_the_record_asked_for_stands_at_its_position(position, pairs, chat, file, bundled):
    tokenizer = Chatty(bundled.tokenizer)
    questions = LostInTheMiddle(str(file), documents=3, position=position, pairs=pairs, chat=chat).questions(tokenizer, "")
    assert len(questions) == 3
    for line, question in zip(gzip.decompress(file.read_bytes()).splitlines(), questions, strict=True):
        published = json.loads(line)
        prompt, answer = tokenizer.decode(question.prompt), tokenizer.decode(question.answer)
        records = records_of(prompt)
        assert list(records)[position] == published["key"]
        assert len(records) == (pairs or 6)
        assert records.items() <= dict(published["ordered_kv_records"]).items()
        assert answer == records[published["key"]] == published["value"]
        assert prompt.endswith(': "')
        assert f'"{published["key"]}"' in prompt[prompt.index("}") :]
        if chat:
            assert prompt.split("</user>\n<assistant>")[1] == 'Its value is: "'


def test_questions_are_the_same_each_time(file, bundled):
    first, again = (LostInTheMiddle(str(file), documents=2).questions(bundled.tokenizer, "") for _ in range(2))
    assert [one.prompt.tolist() for one in first] == [one.prompt.tolist() for one in again]


def test_a_template_words_the_prompt(file, tmp_path, bundled):
    template = tmp_path / "some.prompt"
    template.write_text('Records:\n{formatted_kv_records}\nWanted: "{key}"\nFound:\n')
    (question,) = LostInTheMiddle(str(file), documents=1, pairs=2, template=str(template)).questions(bundled.tokenizer, "")
    prompt = bundled.tokenizer.decode(question.prompt)
    key = next(iter(records_of(prompt)))
    assert prompt.startswith('Records:\n{"')
    assert prompt.endswith(f'Wanted: "{key}"\nFound: "')
    sources = [LostInTheMiddle(str(file), template=path).source for path in (None, str(template))]
    assert sources == [sources[0], f"{sources[0]}, {Published(str(template)).source}"]
    template.write_text("nothing")
    with pytest.raises(
        InputError, match=r"task\.template: expected a text with {formatted_kv_records} and {key}, got .* without; give"
    ):
        LostInTheMiddle(str(file), documents=1, template=str(template)).questions(bundled.tokenizer, "")


def test_the_published_file_is_read(test_data, bundled):
    folder = test_data / "data" / "lost_in_the_middle"
    path, template = folder / "kv-retrieval-75_keys.jsonl.gz", folder / "kv_retrieval.prompt"
    questions = LostInTheMiddle(str(path), documents=5, position=40, template=str(template)).questions(bundled.tokenizer, "")
    for question in questions:
        prompt, answer = bundled.tokenizer.decode(question.prompt), bundled.tokenizer.decode(question.answer)
        records = records_of(prompt)
        assert len(records) == 75
        key, value = list(records.items())[40]
        assert answer == value
        assert prompt.endswith(f'Key: "{key}"\nCorresponding value: "')


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"documents": 4}, r"task\.documents: expected at most the 3 lines of the file, got 4"),
        ({"documents": 0}, r"task\.documents: expected at least 1, got 0"),
        ({"pairs": 0}, r"task\.pairs: expected at least 1, got 0"),
        ({"pairs": 7}, r"task\.pairs: expected at most the 6 records of a line, got 7"),
        ({"position": 6}, r"task\.position: expected 0 to 5, with 6 records, got 6"),
        ({"position": -1}, r"task\.position: expected an integer of 0"),
        (
            {"path": "nowhere.jsonl"},
            r"task\.path: expected a file, got 'nowhere\.jsonl', where there is none; give a kv-retrieval",
        ),
        (
            {"template": "nowhere.prompt"},
            r"task\.template: expected a file, got 'nowhere\.prompt', .* leave it out for our wording",
        ),
    ],
)
def test_refuses_what_the_file_does_not_hold(how, message, file, bundled):
    with pytest.raises(InputError, match=message):
        LostInTheMiddle(**{"path": str(file), "documents": 1, **how}).questions(bundled.tokenizer, "")


@pytest.mark.parametrize("content", [b"no JSON", b'{"key": "a"}', b"[1]"])
def test_refuses_lines_of_another_format(content, tmp_path, bundled):
    path = tmp_path / "other.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"task\.path, line 1: expected a JSON object with ordered_kv_records, key, value, got"):
        LostInTheMiddle(str(path), documents=1).questions(bundled.tokenizer, "")


@pytest.mark.parametrize("name", ["some.jsonl.gz", "some.jsonl"])
def test_refuses_files_that_are_no_text(name, tmp_path, bundled):
    path = tmp_path / name
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match=r"task\.path: expected UTF-8 text, got .*, which is not"):
        LostInTheMiddle(str(path), documents=1).questions(bundled.tokenizer, "")
