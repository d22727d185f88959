"""Variable tracking: which variables hold a value that reached them through other variables."""

import random
import string
from dataclasses import dataclass
from typing import ClassVar

from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import evaluation_rng
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import HAYSTACK_CUT, Haystack, Task, ask, check_count
from shadowattn.evaluation.tasks.questions import ExactMatch

_NAME_LETTERS = 5
_FIRST_VALUE, _VALUES = 10_000, 90_000  # all numbers of five digits
# A hidden line may divide tokens of the text around it: so many more, at most.
_TOKENS_AT_A_LINE, _TOKENS_AT_ENDS = 2, 8
_REQUEST = "Which variables hold {value}, directly or by way of other variables? List them in the order of their assignments."
_LINE = "The variables that hold {value} are"


@dataclass(frozen=True)
class Chain:
    """A value and the variables that it reaches, the first one directly and each other one through the one before it."""

    value: int
    names: tuple[str, ...]

    @property
    def assignments(self) -> list[str]:
        """A line for each variable."""
        sources = [str(self.value), *(f"VAR {name}" for name in self.names[:-1])]
        return [f"VAR {name} = {source}\n" for name, source in zip(self.names, sources, strict=True)]

    @property
    def answer(self) -> str:
        return f" {', '.join(self.names)}"


@dataclass(frozen=True)
class MultiHop(Task):
    """Variable tracking of RULER (arXiv 2404.06654, section 3, multi-hop tracing): `VAR X = 12345`, `VAR Y = VAR X`, ….

    `chains` values with `hops` + 1 variables each are assigned in lines of held-out text. The question names the value of one
    chain; the answer lists its variables in the order of their assignments, which is also their order in the text, separated by
    commas. Prompts have at most `tokens` tokens with the answer, and the held-out text alone is cut, on both sides.

    As in RULER, names are five capital letters, values five digits, and a worked example of other variables, without held-out
    text, comes first. Departures: RULER hides lines in repeated sentences or essays, counts the share of variables that the reply
    names in whatever order, and words the request differently; here the whole list has to match.
    """

    documents: int = 20
    tokens: int = 2048
    chains: int = 1
    hops: int = 4
    seed: int = 0
    chat: bool = False
    cut: ClassVar[str] = HAYSTACK_CUT

    def __post_init__(self):
        for name in ("documents", "tokens", "chains", "hops"):
            check_count(name, getattr(self, name))
        if self.chains > _VALUES // 2:
            raise InputError(f"task.chains: expected at most {_VALUES // 2}, got {self.chains}; use fewer")

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """Prompts with held-out text cut from `filler` at random; raises `InputError` where `tokens` leaves no room for any."""
        rng = evaluation_rng(f"task/multihop/{self.seed}")
        drawn = [(self._chains(rng), [self._depths(rng) for _ in range(self.chains)]) for _ in range(self.documents)]
        bare = [self._question(tokenizer, chains, depths, "") for chains, depths in drawn]
        lines = self.chains * (self.hops + 1)
        beside = max(question.tokens for question in bare) + _TOKENS_AT_A_LINE * lines + _TOKENS_AT_ENDS
        hay = Haystack(tokenizer, filler, tokens=self.tokens, beside=beside)
        return [self._question(tokenizer, chains, depths, hay.drawn(rng)) for chains, depths in drawn]

    def _chains(self, rng: random.Random) -> list[Chain]:
        """The chains of the worked example, then those of the document; no name or value occurs twice."""
        count = 2 * self.chains
        values = rng.sample(range(_FIRST_VALUE, _FIRST_VALUE + _VALUES), count)
        names: dict[str, None] = {}
        while len(names) < count * (self.hops + 1):
            names["".join(rng.choices(string.ascii_uppercase, k=_NAME_LETTERS))] = None
        ordered, length = list(names), self.hops + 1
        return [Chain(value, tuple(ordered[at * length : (at + 1) * length])) for at, value in enumerate(values)]

    def _depths(self, rng: random.Random) -> list[float]:
        """Where the lines of one chain stand, 0 first line and 1 last line of the text, in the chain's order."""
        return sorted(rng.random() for _ in range(self.hops + 1))

    def _question(
        self, tokenizer: PreTrainedTokenizerBase, chains: list[Chain], depths: list[list[float]], hay: str
    ) -> ExactMatch:
        shown, asked = chains[: self.chains], chains[self.chains :]
        example = "".join(line for chain in shown for line in chain.assignments)
        example += f"{_REQUEST}\n{_LINE}{{answer}}\n\n".format(value=shown[0].value, answer=shown[0].answer)
        value = asked[0].value
        return ask(
            tokenizer,
            document=example + _with_assignments(hay, asked, depths),
            request=_REQUEST.format(value=value),
            line=_LINE.format(value=value),
            answer=asked[0].answer,
            chat=self.chat,
        )


def _with_assignments(text: str, chains: list[Chain], depths: list[list[float]]) -> str:
    """The text with a line for each assignment; those of a chain stay in its order where they meet at one place."""
    lines = text.splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    placed = [
        (round(depth * len(lines)), step, line)
        for chain, chain_depths in zip(chains, depths, strict=True)
        for step, (depth, line) in enumerate(zip(chain_depths, chain.assignments, strict=True))
    ]
    for place, _, line in sorted(placed, reverse=True):
        lines.insert(place, line)
    return "".join(lines)
