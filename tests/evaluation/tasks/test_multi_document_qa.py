import json

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import MultiDocumentQA
from shadowattn.evaluation.tasks.multi_document_qa import contains_answer
from tests.evaluation.tasks.chat import Chatty


def document(at: int, gold: bool) -> dict:
    return {"title": f"Title {at}", "text": f"The text of {at} names a thing{at}.", "isgold": gold, "hasanswer": gold}


@pytest.fixture
def file(tmp_path):
    """Four questions with the right document and one beside it."""
    path = tmp_path / "questions.jsonl"
    lines = [
        {
            "question": f"What does {at} name?",
            "answers": [f"thing{at}", "nothing else"],
            "ctxs": [document(at, True), document(at + 50, False)],
        }
        for at in range(4)
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


@pytest.mark.parametrize(("position", "distractors"), [(0, 0), (1, 0), (3, 3), (1, 3)])
@pytest.mark.parametrize("chat", [False, True])
def test_the_right_document_stands_at_its_position(position, distractors, chat, file, bundled):
    tokenizer = Chatty(bundled.tokenizer)
    task = MultiDocumentQA(file, documents=4, position=position, distractors=distractors, chat=chat)
    questions = task.questions(tokenizer, "")
    for at, question in enumerate(questions):
        prompt = tokenizer.decode(question.prompt)
        shown = [line for line in prompt.splitlines() if line.startswith("Document [")]
        assert len(shown) == len(set(shown)) == 2 + distractors
        assert shown[position] == f"Document [{position + 1}](Title: Title {at}) The text of {at} names a thing{at}."
        assert sum(f"names a thing{at}." in line for line in shown) == 1
        assert f"Question: What does {at} name?" in prompt
        assert question.judge(f"It is the Thing{at}!") == 1
        assert question.judge("I do not know") == 0


def test_answers_are_compared_without_articles_case_and_punctuation():
    assert contains_answer(["The U.S. Senate"], "it was the us senate, then") == 1
    assert contains_answer(["The U.S. Senate"], "the senate of us") == 0


def test_published_questions_with_the_published_prompt(bundled, test_data):
    folder = test_data / "data/lost_in_the_middle"
    task = MultiDocumentQA(
        str(folder / "nq-open-oracle.jsonl.gz"), 3, position=2, distractors=4, template=str(folder / "qa.prompt")
    )
    for question in task.questions(bundled.tokenizer, ""):
        assert bundled.tokenizer.decode(question.prompt).count("Document [") == 5


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": 0}, "task.documents"),
        ({"documents": 5}, "task.documents: expected at most the 4 lines of the file"),
        ({"position": 2}, "task.position: expected 0 to 1, with 2 documents, got 2"),
        ({"position": -1}, "task.position"),
        ({"distractors": 90}, "task.distractors: expected at most the 6 documents without the answer"),
        ({"path": "nowhere.jsonl"}, "task.path: expected a file"),
        ({"template": "nowhere.prompt"}, "task.template: expected a file"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message, file, bundled):
    with pytest.raises(InputError, match=message):
        MultiDocumentQA(**{"path": file, "documents": 2} | wrong).questions(bundled.tokenizer, "")
