"""Questions and how an answer is scored: every token right, a choice among a few tokens, or text that is written and judged."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

from shadowattn.engine.prefill import check_chunks, prefill_chunks
from shadowattn.errors import InputError
from shadowattn.evaluation.intervals import Interval, mean_interval, paired_share_interval, share_interval


@dataclass(frozen=True, eq=False)
class Question(ABC):
    """A prompt, token ids int64 [T], and what is asked after it. `metric` names the mean of the scores of many."""

    metric: ClassVar[str] = "accuracy"

    prompt: Tensor

    @property
    def chance(self) -> float:
        """What guessing scores in the mean."""
        return 0.0

    @property
    @abstractmethod
    def tokens(self) -> int:
        """The tokens that the model's context has to hold."""

    @abstractmethod
    def score(self, model: PreTrainedModel, *, chunk_tokens: int) -> float:
        """From 0 to 1, of the model as it is now; the prompt goes through it in chunks."""


@dataclass(frozen=True, eq=False)
class ExactMatch(Question):
    """1 where every token of `answer`, int64 [A], is the most likely one, as greedy decoding would find it."""

    answer: Tensor

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.answer)

    def score(self, model: PreTrainedModel, *, chunk_tokens: int) -> float:
        tokens = torch.cat([self.prompt, self.answer[:-1]])
        chunks = prefill_chunks(model, tokens, chunk_tokens=chunk_tokens, last=len(self.answer))
        likeliest = torch.cat([_numbers(logits).argmax(-1) for _, logits in chunks])
        return float(likeliest.cpu().equal(self.answer))


@dataclass(frozen=True, eq=False)
class Choice(Question):
    """1 where the token `choices[right]` is among the `top` likeliest of `choices`, int64 [C], right behind the prompt.

    Of choices that are equally likely the right one counts as the last.
    """

    choices: Tensor
    right: int
    top: int = 1

    @property
    def chance(self) -> float:
        return self.top / len(self.choices)

    @property
    def tokens(self) -> int:
        return len(self.prompt) + 1

    def score(self, model: PreTrainedModel, *, chunk_tokens: int) -> float:
        ((_, logits),) = prefill_chunks(model, self.prompt, chunk_tokens=chunk_tokens, last=1)
        likelihoods = _numbers(logits[-1])[self.choices.to(logits.device)]
        return float(int((likelihoods >= likelihoods[self.right]).sum()) <= self.top)


def _numbers(logits: Tensor) -> Tensor:
    """The logits as they are. Raises `InputError` on NaN, which is neither more nor less likely than anything."""
    if logits.isnan().any():
        raise InputError("task: the model's logits are NaN, so that no answer can be scored; its attention or weights overflow")
    return logits


@dataclass(frozen=True, eq=False)
class Written(Question):
    """What `judge` makes of the text that greedy decoding writes after the prompt, `new_tokens` at most.

    It ends with the model's end of text or before the first of `until`. Decoding steps attend as the method in use says
    (`decode`). Penalties of the model's own generation settings do not count.
    """

    tokenizer: PreTrainedTokenizerBase
    judge: Callable[[str], float]
    new_tokens: int
    until: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        return len(self.prompt) + self.new_tokens

    def score(self, model: PreTrainedModel, *, chunk_tokens: int) -> float:
        check_chunks(model, self.prompt, chunk_tokens=chunk_tokens)
        ids = self.prompt.to(model.device)[None]
        written = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=self.new_tokens,
            do_sample=False,
            num_beams=1,
            repetition_penalty=1.0,
            no_repeat_ngram_size=0,
            prefill_chunk_size=chunk_tokens,
            pad_token_id=0,  # one sequence is never padded, and without a value transformers warns
            stopping_criteria=[_Until(self._text, self.until)],
        )
        text = self._text(written[0])
        return self.judge(text[: min((text.find(end) for end in self.until if end in text), default=len(text))])

    def _text(self, ids: Tensor) -> str:
        """What was written, of the token ids [T] of prompt and text."""
        return self.tokenizer.decode(ids[len(self.prompt) :].tolist(), skip_special_tokens=True)


class _Until(StoppingCriteria):
    """Ends the only sequence of a batch where its text holds one of some strings."""

    def __init__(self, text: Callable[[Tensor], str], until: Sequence[str]):
        self._text, self._until = text, until

    def __call__(self, input_ids: Tensor, scores: Tensor, **_) -> Tensor:
        text = self._text(input_ids[0])
        return torch.tensor([any(end in text for end in self._until)], device=input_ids.device)


@dataclass(frozen=True, eq=False)
class Summary(Written):
    """Text whose judgement is the F1 of ROUGE-L."""

    metric: ClassVar[str] = "rouge_l"


def scores(
    model: PreTrainedModel,
    questions: Sequence[Question],
    *,
    chunk_tokens: int,
    progress: Callable[[Sequence[Question]], Sequence[Question]] = list,
) -> list[float]:
    """The score of each question."""
    return [question.score(model, chunk_tokens=chunk_tokens) for question in progress(questions)]


def mean_score(metric: str, values: Sequence[float]) -> Interval:
    """The mean of the scores of questions with this `metric`, and its 95 % interval: Wilson's of a share, Student's of others."""
    if metric == ExactMatch.metric:
        return share_interval(int(sum(values)), len(values))
    return mean_interval(values)


def mean_change(metric: str, values: Sequence[float], others: Sequence[float]) -> Interval:
    """The mean of the scores less that of the others, of the same two or more questions, and its 95 % interval, paired."""
    if metric == ExactMatch.metric:
        return paired_share_interval(*([score == 1 for score in side] for side in (values, others)))
    return mean_interval([one - other for one, other in zip(values, others, strict=True)])
