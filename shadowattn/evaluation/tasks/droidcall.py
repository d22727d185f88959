"""Function calling on a phone: DroidCall's published queries, each after descriptions of intents and solved examples."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from shadowattn.data.retrieval import evaluation_rng
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Task, check_at_most, check_count, check_fits, encode_prompt
from shadowattn.evaluation.tasks.files import Published, read_records
from shadowattn.evaluation.tasks.questions import ExactMatch

_INTENT_ENTRIES = {"id": int, "action": str, "desc": str, "extras": {str: str}}
_CALL_ENTRIES = {"query": str, "intent": str, "extras": dict, "id": int}
_REMEDY = "give {} of github.com/UbiquitousLearning/DroidCall"
_EMPTY = (None, "", "None", {}, [])  # how the files say that an intent has no URI, MIME type or value
_INSTRUCTION = "These Android intents can be called, each with some of its arguments:"
_EXAMPLES = "The right call for each request, in JSON:"


@dataclass(frozen=True)
class DroidCall(Task):
    """DroidCall (arXiv 2412.00402): which intent a request calls, with which arguments; the answer is the call.

    `path` holds the queries that are asked, a JSON object a line (annotation_data.jsonl), of which the first `documents` are
    taken; `intents` the descriptions (intents.jsonl); `examples` solved queries (machine_generated.jsonl). A prompt describes
    `offered` intents, the right one among others drawn by `seed`, in random order; then come `shots` solved examples of
    intents that are offered, and the query. No query that is asked serves as an example: most of them are in both files. Its call
    may: an intent without arguments is called alike by every request, so that with the default settings 22 of the 48 prompts show
    the very call that is asked for. With `tokens`, further intents are offered, in random order, while prompt and answer take no
    more. Nothing is cut: a run refuses a prompt beyond the model's context.

    A call is written as JSON with `intent`, `uri`, `mime` and `extras`, each only where it is not empty. It has to match token by
    token. The metrics of DroidCall and of shadowAttn (arXiv 2508.16703, section 4: top 5 single-step complete accuracy, with 5
    examples in prompts of 4096 tokens, which `tokens=4096` comes near to) are more lenient: DroidCall compares arguments one by
    one, leaves out some, and judges texts by their meaning. The files are those of DroidCall's repository before its release:
    48 test queries, where the released data have 200.
    """

    path: str
    intents: str
    examples: str
    documents: int = 48
    shots: int = 5
    offered: int = 4
    tokens: int | None = None
    seed: int = 0
    chat: bool = False

    def __post_init__(self):
        check_count("documents", self.documents)
        check_count("offered", self.offered)
        check_count("shots", self.shots, least=0)
        if self.tokens is not None:
            check_count("tokens", self.tokens)

    @property
    def source(self) -> str:
        return ", ".join(Published(path).source for path in (self.path, self.intents, self.examples))

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """`filler` is not used. Raises `InputError` where a file is missing or holds something else or less."""
        remedy = _REMEDY.format("intents.jsonl")
        intents = {one["id"]: one for one in read_records("intents", self.intents, _INTENT_ENTRIES, remedy)}
        queries = _calls("path", self.path, intents, _REMEDY.format("annotation_data.jsonl"))
        check_at_most("documents", self.documents, len(queries), "queries of the file")
        check_at_most("offered", self.offered, len(intents), "intents of the file")
        asked = {query["query"] for query in queries}
        solved = _calls("examples", self.examples, intents, _REMEDY.format("machine_generated.jsonl"))
        solved = [example for example in solved if example["query"] not in asked]
        rng = evaluation_rng(f"task/droidcall/{self.seed}")
        return [self._question(tokenizer, rng, intents, solved, query) for query in queries[: self.documents]]

    def _question(
        self,
        tokenizer: PreTrainedTokenizerBase,
        rng: random.Random,
        intents: Mapping[int, Mapping[str, Any]],
        solved: Sequence[Mapping[str, Any]],
        query: Mapping[str, Any],
    ) -> ExactMatch:
        others = rng.sample([number for number in intents if number != query["id"]], self.offered - 1)
        offered = rng.sample([query["id"], *others], self.offered)
        fitting = [example for example in solved if example["id"] in offered]
        if len(fitting) < self.shots:
            raise InputError(
                f"task.shots: expected at most the {len(fitting)} examples of the intents that are offered, got {self.shots}; "
                "use fewer, or raise task.offered"
            )
        shots = rng.sample(fitting, self.shots)
        asked = self._asked(tokenizer, [intents[number] for number in offered], shots, query)
        if self.tokens is None:
            return asked
        check_fits(asked.tokens, self.tokens, f"{self.offered} intents and {self.shots} examples")
        for number in rng.sample([number for number in intents if number not in offered], len(intents) - self.offered):
            more = [*offered]
            more.insert(rng.randrange(len(more) + 1), number)
            longer = self._asked(tokenizer, [intents[number] for number in more], shots, query)
            if longer.tokens <= self.tokens:
                offered, asked = more, longer
        return asked

    def _asked(
        self,
        tokenizer: PreTrainedTokenizerBase,
        offered: Sequence[Mapping[str, Any]],
        shots: Sequence[Mapping[str, Any]],
        query: Mapping[str, Any],
    ) -> ExactMatch:
        lines = [_INSTRUCTION, *(_described(intent) for intent in offered)]
        lines += ["", _EXAMPLES, *(f"{_request(shot)}{call(shot)}" for shot in shots), _request(query)]
        return encode_prompt(tokenizer, "\n".join(lines), call(query), self.chat)


def call(record: Mapping[str, Any]) -> str:
    """The call of a record in JSON, after a space; what is empty is left out."""
    extras = {name: value for name, value in record["extras"].items() if value not in _EMPTY}
    entries = {"intent": record["intent"], "uri": record.get("uri"), "mime": record.get("mime"), "extras": extras}
    return " " + json.dumps({name: value for name, value in entries.items() if value not in _EMPTY}, ensure_ascii=False)


def _described(intent: Mapping[str, Any]) -> str:
    entries = {"intent": intent["action"].strip('"'), "uri": intent.get("uri"), "mime": intent.get("mime")}
    entries |= {"description": " ".join(intent["desc"].split())}
    entries |= {"extras": {name: " ".join(text.split()) for name, text in intent["extras"].items()}}
    return json.dumps({name: value for name, value in entries.items() if value not in _EMPTY}, ensure_ascii=False)


def _request(record: Mapping[str, Any]) -> str:
    return f"Request: {' '.join(record['query'].split())}\nCall:"


def _calls(setting: str, path: str, intents: Mapping[int, Mapping[str, Any]], remedy: str) -> list[dict[str, Any]]:
    """The calls of a file whose intent is the one that their number names; a few of the published ones name another."""
    calls = read_records(setting, path, _CALL_ENTRIES, remedy)
    return [one for one in calls if one["id"] in intents and intents[one["id"]]["action"].strip('"') == one["intent"].strip('"')]
