import json
from types import SimpleNamespace

import pytest

from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import ArxivSum
from shadowattn.evaluation.tasks.files import Published
from tests.evaluation.tasks.chat import Chatty


@pytest.fixture
def papers(tmp_path):
    """Twelve papers, every third of which does not count."""
    path = tmp_path / "papers.jsonl"
    records = [
        {
            "text": f"Paper {at} begins. " + f"It goes on\u2028{at}. " * 60,
            "summary": f"We wrote paper {at}.",
            "good": bool(at % 3),
        }
        for at in range(12)
    ]
    path.write_text("\n".join(json.dumps(record, ensure_ascii=False) for record in records))
    return {"path": str(path), "article": "text", "abstract": "summary", "where": {"good": True}}


@pytest.mark.parametrize("chat", [False, True])
def test_papers_come_after_solved_ones_and_all_fits(papers, chat, bundled):
    task = ArxivSum(**papers, documents=3, shots=2, tokens=400, new_tokens=20, chat=chat)
    tokenizer = Chatty(bundled.tokenizer)
    questions = task.questions(tokenizer, "")
    assert len(questions) == 3
    for question, paper in zip(questions, (1, 2, 4), strict=True):
        prompt = tokenizer.decode(question.prompt)
        assert 0.7 * 400 < question.tokens <= 400
        assert f"Paper: Paper {paper} begins." in prompt
        assert prompt.count("Paper: Paper") == prompt.count("Abstract:") == 3
        shown = [one for one in (5, 7, 8, 10, 11) if f"We wrote paper {one}." in prompt]
        assert len(shown) == 2
        assert f"We wrote paper {paper}." not in prompt
        assert prompt.endswith("\nAbstract:") if not chat else "<assistant>Abstract:" in prompt
        assert question.judge(f"We wrote paper {paper}.") == 1
        assert question.judge("") == 0
        assert question.judge(f"we wrote {paper} of them") == pytest.approx(2 * 0.75 * 0.6 / 1.35)  # We wrote N: 3 of 4, 3 of 5
    assert [one.prompt.tolist() for one in task.questions(tokenizer, "")] == [one.prompt.tolist() for one in questions]


def test_published_papers_give_questions(bundled, test_data):
    path = str(test_data / "data/bamboo/abshallu_4k.jsonl")
    task = ArxivSum(path, "content", "hypothesis", {"answer": True}, documents=2, shots=1, tokens=1500)
    assert all(1000 < question.tokens <= 1500 for question in task.questions(bundled.tokenizer, ""))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"documents": 1}, "task.documents: expected at least 2"),
        ({"shots": -1}, "task.shots: expected at least 0"),
        ({"tokens": 300}, "task.tokens: expected at least"),
        ({"new_tokens": 0}, "task.new_tokens"),
        ({"documents": 8}, "task.documents: expected at most the 8 papers, examples among them"),
        ({"article": "body"}, "expected a JSON object with body"),
        ({"path": "nowhere.jsonl"}, "task.path: expected a file"),
    ],
)
def test_what_does_not_fit_is_refused(wrong, message, papers, bundled):
    with pytest.raises(InputError, match=message):
        ArxivSum(**papers | {"documents": 3, "shots": 5} | wrong).questions(bundled.tokenizer, "")


def test_a_data_set_that_is_not_reached_is_refused_by_name(monkeypatch):
    import huggingface_hub

    def unreached(*_, **__):
        raise RuntimeError("no network")  # errors of the client's network library are of no common class

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", unreached)
    with pytest.raises(InputError, match=r"'some/papers' is no file, and could not be had from the hub .*no network.*; give a"):
        ArxivSum("some/papers").questions(None, "")


def test_a_data_set_of_the_hub_is_read_like_a_file(monkeypatch):
    import datasets
    import huggingface_hub

    asked, resolved = {}, []

    def info(_, path, *, revision):
        resolved.append((path, revision))
        return SimpleNamespace(sha="0123456789" * 4)

    def load(path, *, split, revision):
        asked.update(path=path, split=split, revision=revision)
        return datasets.Dataset.from_list([{"article": "A", "abstract": "B"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", info)
    source = Published("some/papers", "train", "main")
    assert source.records("path", {"article": str}, "give another") == [{"article": "A", "abstract": "B"}]
    assert asked == {"path": "some/papers", "split": "train", "revision": "0123456789" * 4}
    assert source.source == f"some/papers {'0123456789' * 4}"
    assert resolved == [("some/papers", "main")]  # once: rows name what was read
    assert Published("some/papers", revision="ab" * 20).source == f"some/papers {'ab' * 20}"
    with pytest.raises(InputError, match="expected columns body in some/papers, got article, abstract; body are missing"):
        source.records("path", {"body": str}, "give another")
