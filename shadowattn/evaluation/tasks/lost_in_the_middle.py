"""Key-value retrieval of "Lost in the Middle": one of many records, at a place of one's choice, from the published file."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks.base import Task, check_at_most, check_count, encode_prompt
from shadowattn.evaluation.tasks.files import Published, read_records, read_text
from shadowattn.evaluation.tasks.questions import ExactMatch

_REMEDY = "give a kv-retrieval file of github.com/nelson-liu/lost-in-the-middle, such as kv-retrieval-75_keys.jsonl.gz"
_ENTRIES = {"ordered_kv_records": [(str, str)], "key": str, "value": str}
_RECORDS, _KEY = "{formatted_kv_records}", "{key}"  # what the published prompts call them
_TEMPLATE = f'This JSON object has a value for every key.\n\n{_RECORDS}\n\nWhich value does the key "{_KEY}" have?\nIts value is:'


@dataclass(frozen=True)
class LostInTheMiddle(Task):
    """Key-value retrieval in a JSON object of random UUIDs (arXiv 2307.03172, section 3); the answer is the value of one key.

    `path` is a published file, a JSON object a line with `ordered_kv_records`, `key` and `value`; its first `documents` lines are
    asked. The record asked for is moved to `position`, 0 for the first; with `pairs`, the first so many of the other records
    stay, so that it stands among `pairs` records. `template` is a file with {formatted_kv_records} and {key}, such as the
    published kv_retrieval.prompt; without one the wording is ours. Nothing is cut: a run refuses a prompt beyond the model's
    context.

    Departures: the prompt ends with the quotation mark that opens the value, and all tokens of the value have to match; the paper
    looks for the value anywhere in the reply. The paper's other task is `MultiDocumentQA`.
    """

    path: str
    documents: int = 50
    position: int = 0
    pairs: int | None = None
    template: str | None = None
    chat: bool = False

    def __post_init__(self):
        check_count("documents", self.documents)
        if self.pairs is not None:
            check_count("pairs", self.pairs)
        checks.integer("task.position", self.position)

    @property
    def source(self) -> str:
        return ", ".join(Published(path).source for path in (self.path, self.template) if path is not None)

    def questions(self, tokenizer: PreTrainedTokenizerBase, filler: str) -> list[ExactMatch]:
        """`filler` is not used. Raises `InputError` where a file is missing or holds something else."""
        template = _TEMPLATE if self.template is None else self._template(self.template)
        lines = read_records("path", self.path, _ENTRIES, _REMEDY)
        check_at_most("documents", self.documents, len(lines), "lines of the file")
        return [
            self._question(tokenizer, template, line["ordered_kv_records"], line["key"], line["value"])
            for line in lines[: self.documents]
        ]

    def _question(
        self, tokenizer: PreTrainedTokenizerBase, template: str, records: Sequence[Sequence[str]], key: str, value: str
    ) -> ExactMatch:
        others = [(name, text) for name, text in records if name != key]
        pairs = len(others) + 1 if self.pairs is None else self.pairs
        check_at_most("pairs", pairs, len(others) + 1, "records of a line")
        if self.position >= pairs:
            raise InputError(f"task.position: expected 0 to {pairs - 1}, with {pairs} records, got {self.position}")
        kept = others[: pairs - 1]
        kept.insert(self.position, (key, value))
        written = "{" + ",\n ".join(f'"{name}": "{text}"' for name, text in kept) + "}"
        prompt = template.replace(_RECORDS, written).replace(_KEY, key).rstrip() + ' "'
        return encode_prompt(tokenizer, prompt, value, self.chat)

    def _template(self, path: str) -> str:
        remedy = "give the published kv_retrieval.prompt, or leave it out for our wording"
        template = read_text("template", path, remedy)
        if _RECORDS not in template or _KEY not in template:
            raise InputError(f"task.template: expected a text with {_RECORDS} and {_KEY}, got {path!r} without; {remedy}")
        return template
