"""Files of published questions: what is not there, empty or of another kind is refused by the setting that names it."""

import json

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.files import Published, read_records

ENTRIES = {"query": str, "id": int, "pairs": [(str, str)], "texts": [{"title": str}], "extras": {str: str}, "free": object}
GOOD = {"query": "a", "id": 1, "pairs": [["b", "c"]], "texts": [{"title": "d", "more": 2}], "extras": {"e": "f"}, "free": None}


def written(tmp_path, *records) -> str:
    path = tmp_path / "records.jsonl"
    path.write_text("\n".join(json.dumps(record) for record in records))
    return str(path)


def test_records_of_the_right_kinds_are_read(tmp_path):
    path = written(tmp_path, GOOD, GOOD | {"pairs": [], "texts": [], "extras": {}})
    assert len(read_records("path", path, ENTRIES, "give another")) == 2
    assert Published(path).records("path", ENTRIES, "give another")[0] == GOOD


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"query": 3}, r"line 2: expected query to be text, got 3 \(int\)"),
        ({"query": None}, "expected query to be text, got None"),
        ({"id": "1"}, "expected id to be a whole number"),
        ({"id": True}, "expected id to be a whole number"),
        ({"pairs": {"b": "c"}}, "expected pairs to be a list, each a list of text and text"),
        ({"pairs": [["b"]]}, "expected pairs to be a list, each a list of text and text"),
        ({"texts": [{"name": "d"}]}, r"expected texts to be a list, each an object with title \(text\)"),
        ({"texts": ["d"]}, "expected texts to be a list"),
        ({"extras": {"e": 1}}, "expected extras to be an object, each entry text"),
        ({"extras": []}, "expected extras to be an object"),
    ],
)
def test_entries_of_another_kind_are_refused_by_their_line(wrong, message, tmp_path):
    path = written(tmp_path, GOOD, GOOD | wrong)
    with pytest.raises(InputError, match=rf"task\.path, .*{message}.*; give another"):
        read_records("path", path, ENTRIES, "give another")


def test_what_is_no_file_of_records_is_refused(tmp_path):
    for path, message in (
        (tmp_path, "which is a folder"),
        (tmp_path / "none", "where there is none"),
        ("x" * 5000, "where there is none"),
        ("bad\0name", "where there is none"),
    ):
        with pytest.raises(InputError, match=rf"task\.examples: expected a file, got .*{message}; give another"):
            read_records("examples", str(path), ENTRIES, "give another")
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(InputError, match=r"task\.path: expected a JSON object a line, got .*, which is empty; give another"):
        read_records("path", str(empty), ENTRIES, "give another")
    deep = tmp_path / "deep.jsonl"
    deep.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"task\.path, line 1: expected a JSON object with query"):
        read_records("path", str(deep), ENTRIES, "give another")
