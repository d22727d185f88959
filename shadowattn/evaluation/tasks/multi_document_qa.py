"""Question answering of "Lost in the Middle": a question after several documents, one of which has the answer."""

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.data.retrieval import evaluation_rng
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Task, check_at_most, check_count, encode_prompt
from shadowattn.evaluation.tasks.files import Published, read_records, read_text
from shadowattn.evaluation.tasks.questions import Written

_REMEDY = "give an nq-open file of github.com/nelson-liu/lost-in-the-middle, such as nq-open-oracle.jsonl.gz"
_ENTRIES = {"question": str, "answers": [str], "ctxs": [{"title": str, "text": str}]}
_RESULTS, _QUESTION = "{search_results}", "{question}"  # what the published prompts call them
_TEMPLATE = (
    f"Answer the question by these documents. Some of them have nothing to do with it.\n\n{_RESULTS}\n\nQuestion: {_QUESTION}"
    "\nAnswer:"
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


@dataclass(frozen=True)
class MultiDocumentQA(Task):
    """Questions over documents (arXiv 2307.03172, section 2); right where what is written contains one of the answers.

    `path` is a published file, a JSON object a line with `question`, `answers` and `ctxs`, the documents; its first `documents`
    lines are asked. The document with the answer (`isgold`) is moved to `position`, 0 for the first, among the others of its line
    and `distractors` more, drawn by `seed` from documents of other lines that hold none of the answers: for the file that has the
    right document alone. `template` is a file with {search_results} and {question}, such as the published qa.prompt; without
    one the wording is ours. Texts are compared in lower case without articles and punctuation, as the paper does, up to the first
    line end of `new_tokens` tokens. Nothing of a prompt is cut: a run refuses one beyond the model's context.

    Departure: the paper's other documents are those that a retriever ranks highest for the question, harder to tell from the
    right one than documents of other questions.
    """

    path: str
    documents: int = 50
    position: int = 0
    distractors: int = 0
    template: str | None = None
    new_tokens: int = 100
    seed: int = 0
    chat: bool = False

    def __post_init__(self):
        check_count("documents", self.documents)
        check_count("new_tokens", self.new_tokens)
        for name in ("position", "distractors"):
            checks.integer(f"task.{name}", getattr(self, name))

    @property
    def source(self) -> str:
        return ", ".join(Published(path).source for path in (self.path, self.template) if path is not None)

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Written]:
        """`filler` is not used. Raises `InputError` where a file is missing or holds something else or less."""
        template = _TEMPLATE if self.template is None else _template(self.template)
        lines = read_records("path", self.path, _ENTRIES, _REMEDY)
        check_at_most("documents", self.documents, len(lines), "lines of the file")
        every, rng = [text for line in lines for text in line["ctxs"]], evaluation_rng(f"task/multi_document_qa/{self.seed}")
        return [self._question(tokenizer, template, rng, every, line) for line in lines[: self.documents]]

    def _question(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        rng: random.Random,
        every: Sequence[Mapping[str, Any]],
        line: Mapping[str, Any],
    ) -> Written:
        gold = [text for text in line["ctxs"] if text.get("isgold")]
        if len(gold) != 1:
            raise InputError(f"task.path: expected one document with isgold for each question, got {len(gold)}; {_REMEDY}")
        shown = [text for text in line["ctxs"] if not text.get("isgold")] + self._others(rng, every, line)
        if self.position > len(shown):
            raise InputError(
                f"task.position: expected 0 to {len(shown)}, with {len(shown) + 1} documents, got {self.position}; raise "
                "task.distractors, or use a file with more documents"
            )
        shown.insert(self.position, gold[0])
        written = "\n".join(f"Document [{at}](Title: {one['title']}) {one['text']}" for at, one in enumerate(shown, start=1))
        prompt = template.replace(_QUESTION, line["question"]).replace(_RESULTS, written)
        asked = encode_prompt(tokenizer, prompt.rstrip(), "", self.chat)
        return Written(asked.prompt, tokenizer, partial(contains_answer, line["answers"]), self.new_tokens, until=("\n",))

    def _others(self, rng: random.Random, every: Sequence[Mapping[str, Any]], line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """Documents of other questions that hold none of the answers."""
        own, others = {text["text"] for text in line["ctxs"]}, []
        for text in rng.sample(every, len(every)) if self.distractors else ():
            if len(others) == self.distractors:
                break
            if text["text"] not in own and not contains_answer(line["answers"], text["text"]):
                others.append(text)
                own.add(text["text"])
        check_at_most("distractors", self.distractors, len(others), "documents without the answer")
        return others


def contains_answer(answers: Sequence[str], text: str) -> float:
    """1 where a text contains one of the answers, both normalised; else 0."""
    normal = _normal(text)
    return float(any(_normal(answer) in normal for answer in answers))


def _normal(text: str) -> str:
    letters = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(_ARTICLES.sub(" ", letters).split())


def _template(path: str) -> str:
    remedy = "give the published qa.prompt, or leave it out for our wording"
    template = read_text("template", path, remedy)
    if _RESULTS not in template or _QUESTION not in template:
        raise InputError(f"task.template: expected a text with {_RESULTS} and {_QUESTION}, got {path!r} without; {remedy}")
    return template
