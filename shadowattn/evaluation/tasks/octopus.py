"""Function selection on a phone: which of some functions a request calls for, as Octopus v2 is tested."""

import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import evaluation_rng
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Task, check_at_most, check_count, check_fits, encode_prompt
from shadowattn.evaluation.tasks.files import Published, read_records
from shadowattn.evaluation.tasks.questions import Choice

_INSTRUCTION = "Each of these functions has a letter:"
_EXAMPLES = "The letter of the function that each request calls for:"
_FUNCTIONS_REMEDY = "give a file of JSON lines with name and description, one a function"
_QUERIES_REMEDY = "give a file of JSON lines with query and function, a function's name, one a request"


@dataclass(frozen=True)
class Octopus(Task):
    """Octopus v2 (arXiv 2404.01744): which function a request calls for; right where its letter is among the `top` likeliest.

    `functions` holds names and descriptions, at most 26 of them; `path` requests with the name of their function, of which the
    first `documents` are asked. A prompt describes all functions, in an order drawn by `seed`, each with a letter of one token;
    then come `shots` solved requests, drawn from those that are not asked, and the request. With `tokens` it describes as many
    functions as fit into so many tokens: the right one, those of the examples, and others, of which there are `top` beside the
    right one at least. Nothing is cut: a run refuses a prompt beyond the model's context.

    Departures: Octopus v2 names each function by a token that the model is trained to know, here letters of the prompt stand for
    them. shadowAttn (arXiv 2508.16703, section 4) reports "top 5 function selection accuracy" with five examples, in prompts of
    1792 tokens, which `tokens=1792` comes near to, and does not define it: here the right letter is among the five likeliest;
    `top=1` is the strict reading. The published requests could not be had when this was written, so the files' form is ours.
    """

    path: str
    functions: str
    documents: int = 50
    shots: int = 5
    top: int = 5
    tokens: int | None = None
    seed: int = 0
    chat: bool = False

    def __post_init__(self):
        check_count("documents", self.documents)
        check_count("top", self.top)
        check_count("shots", self.shots, least=0)
        if self.tokens is not None:
            check_count("tokens", self.tokens)

    @property
    def source(self) -> str:
        return ", ".join(Published(path).source for path in (self.path, self.functions))

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[Choice]:
        """`filler` is not used. Raises `InputError` where a file is missing or holds something else or less."""
        records = read_records("functions", self.functions, {"name": str, "description": str}, _FUNCTIONS_REMEDY)
        functions = {one["name"]: " ".join(one["description"].split()) for one in records}
        check_at_most("functions", len(functions), len(string.ascii_uppercase), "letters there are")
        check_at_most("top", self.top, len(functions) - 1, "functions beside the right one")
        queries = read_records("path", self.path, {"query": str, "function": str}, _QUERIES_REMEDY)
        if unknown := sorted({one["function"] for one in queries} - set(functions)):
            raise InputError(f"task.path: expected functions of task.functions, got {', '.join(unknown)}; {_FUNCTIONS_REMEDY}")
        check_at_most("documents", self.documents + self.shots, len(queries), "requests, examples among them")
        letters, rng = _letters(tokenizer, len(functions)), evaluation_rng(f"task/octopus/{self.seed}")
        asked, others = queries[: self.documents], queries[self.documents :]
        return [self._question(tokenizer, rng, functions, letters, rng.sample(others, self.shots), one) for one in asked]

    def _question(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rng: random.Random,
        functions: Mapping[str, str],
        letters: Tensor,
        examples: Sequence[Mapping[str, str]],
        query: Mapping[str, str],
    ) -> Choice:
        order = rng.sample(list(functions), len(functions))
        if self.tokens is None:
            return self._asked(tokenizer, functions, order, letters, examples, query)
        needed = {query["function"], *(one["function"] for one in examples)}
        others = [name for name in order if name not in needed]
        needed |= set(others[: max(0, self.top + 1 - len(needed))])

        def asked_of(names: set[str]) -> Choice:
            return self._asked(tokenizer, functions, [name for name in order if name in names], letters, examples, query)

        asked = asked_of(needed)
        check_fits(asked.tokens, self.tokens, f"{len(needed)} functions and {self.shots} examples")
        for name in others:
            if name not in needed and (longer := asked_of(needed | {name})).tokens <= self.tokens:
                needed, asked = needed | {name}, longer
        return asked

    def _asked(
        self,
        tokenizer: PreTrainedTokenizerBase,
        functions: Mapping[str, str],
        order: Sequence[str],
        letters: Tensor,
        examples: Sequence[Mapping[str, str]],
        query: Mapping[str, str],
    ) -> Choice:
        letter = dict(zip(order, string.ascii_uppercase, strict=False))
        lines = [_INSTRUCTION, *(f"{letter[name]}. {name}: {functions[name]}" for name in order), "", _EXAMPLES]
        lines += [f"{_request(one)} {letter[one['function']]}" for one in examples]
        prompt = encode_prompt(tokenizer, "\n".join([*lines, _request(query)]), "", self.chat).prompt
        return Choice(prompt, letters[: len(order)], order.index(query["function"]), self.top)


def _request(record: Mapping[str, str]) -> str:
    return f"Request: {' '.join(record['query'].split())}\nFunction:"


def _letters(tokenizer: PreTrainedTokenizerBase, count: int) -> Tensor:
    """The tokens of the first letters, each behind a space, int64 [count]. Raises `InputError` where one takes several tokens."""
    ids = [tokenizer(f" {letter}", add_special_tokens=False).input_ids for letter in string.ascii_uppercase[:count]]
    several = [letter for letter, tokens in zip(string.ascii_uppercase, ids, strict=False) if len(tokens) != 1]
    if several:
        raise InputError(
            f"task: expected a tokenizer with one token for each letter behind a space, got several for {', '.join(several)}; "
            "use fewer functions, or another model"
        )
    return torch.tensor([tokens[0] for tokens in ids])
