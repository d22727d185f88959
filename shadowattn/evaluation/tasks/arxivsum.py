"""Summaries of papers: the abstract that is written after a paper, held to its own by ROUGE-L."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import evaluation_rng
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Task, check_at_most, check_count, encode_prompt, opening_tokens
from shadowattn.evaluation.tasks.files import Published
from shadowattn.evaluation.tasks.questions import Summary

_REMEDY = "give a file of JSON lines, or the id of a data set on the hub, such as ccdv/arxiv-summarization, where it is reached"
_LINE = "Abstract:"
_BETWEEN = 16  # tokens that headings and line ends take of a prompt beside each paper, at most


@dataclass(frozen=True)
class ArxivSum(Task):
    """Papers with their abstracts (arXiv summarisation, arXiv 1804.05685, section 5); scored by the F1 of ROUGE-L (`rouge_l`).

    `path` is a file of JSON lines or a data set of the hub, with the paper in the entry `article` and its abstract in `abstract`;
    of its records those whose entries have the values of `where` count. The first `documents` papers are asked; `shots` others,
    drawn by `seed`, come before each with their abstracts, as shadowAttn has it (arXiv 2508.16703, section 4: five examples,
    prompts of 3840 tokens, 50 new ones). A prompt and what is written take `tokens` at most, so that prompts are as long as the
    paper's with `tokens=3890`. Papers are cut at their ends, and
    abstracts of examples at as many tokens as are to be written; all papers of a prompt get the same room.

    Departures: which papers, which examples and the wording are ours, as the paper names none.
    """

    path: str
    article: str = "article"
    abstract: str = "abstract"
    where: dict[str, Any] = field(default_factory=dict)
    split: str = "test"
    revision: str | None = None
    documents: int = 50
    shots: int = 5
    tokens: int = 3840
    new_tokens: int = 50
    seed: int = 0
    chat: bool = False
    cut: ClassVar[str] = "papers, at their ends"

    def __post_init__(self):
        check_count("documents", self.documents, least=2)  # of one paper there is no interval
        check_count("new_tokens", self.new_tokens)
        check_count("shots", self.shots, least=0)
        if self._room() < _BETWEEN:
            least = self.tokens + (_BETWEEN - self._room()) * (self.shots + 1)
            raise InputError(f"task.tokens: expected at least {least} for {self.shots} examples, got {self.tokens}; use fewer")

    def _room(self, beside: int = 0) -> int:
        """Tokens of each paper: what abstracts, headings and `beside` tokens leave."""
        return (self.tokens - beside) // (self.shots + 1) - self.new_tokens - _BETWEEN

    @property
    def source(self) -> str:
        return Published(self.path, self.split, self.revision).source

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Summary]:
        """`filler` is not used. Raises `InputError` where papers are missing."""
        try:
            from rouge_score.rouge_scorer import RougeScorer
        except ImportError as error:
            raise InputError(f"task: ROUGE-L is measured by rouge-score ({error}); pip install '.[arxivsum]'") from error
        judge = partial(_rouge_l, RougeScorer(["rougeL"], use_stemmer=True))
        source = Published(self.path, self.split, self.revision)
        papers = source.records("path", {self.article: str, self.abstract: str} | dict.fromkeys(self.where, object), _REMEDY)
        papers = [paper for paper in papers if all(paper[name] == value for name, value in self.where.items())]
        check_at_most("documents", self.documents + self.shots, len(papers), "papers, examples among them")
        rng = evaluation_rng(f"task/arxivsum/{self.seed}")
        cut, room = partial(_cut, tokenizer), self._room(opening_tokens(tokenizer, self.chat, ""))
        others = papers[self.documents :]
        return [
            self._question(tokenizer, cut, room, judge, rng.sample(others, self.shots), paper)
            for paper in papers[: self.documents]
        ]

    def _question(
        self,
        tokenizer: PreTrainedTokenizerBase,
        cut: Callable[[str, int], str],
        room: int,
        judge: Callable[[str, str], float],
        examples: Sequence[Mapping[str, str]],
        paper: Mapping[str, str],
    ) -> Summary:
        lines = [f"Paper: {cut(one[self.article], room)}\n{_LINE}" for one in (*examples, paper)]
        solved = [f"{line} {cut(one[self.abstract], self.new_tokens)}\n\n" for line, one in zip(lines, examples, strict=False)]
        asked = encode_prompt(tokenizer, "".join([*solved, lines[-1]]), "", self.chat)
        return Summary(asked.prompt, tokenizer, partial(judge, paper[self.abstract]), self.new_tokens, until=("\n",))


def _cut(tokenizer: PreTrainedTokenizerBase, text: str, tokens: int) -> str:
    """At most so many tokens from the beginning, on one line."""
    ids = tokenizer(" ".join(text.split()), add_special_tokens=False, verbose=False).input_ids
    return tokenizer.decode(ids[:tokens])


def _rouge_l(scorer: Any, abstract: str, written: str) -> float:
    return float(scorer.score(abstract, written)["rougeL"].fmeasure)
