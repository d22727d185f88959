"""What the tasks of this folder ask: generated, or read from a text file. The harness calls these with a task's `dataset_kwargs`
and its `metadata`, which they do not need."""

from pathlib import Path
from typing import Any

from datasets import Dataset

from shadowattn.data.retrieval import evaluation_rng, key_value_records


def records(*, documents: int, pairs: int, choices: int, seed: int, **_: Any) -> dict[str, Dataset]:
    """`documents` prompts of `pairs` records, the last line of which asks for a key again; other choices are others' values."""
    rng, made = evaluation_rng(f"lm_eval/records/{seed}"), []
    for _document in range(documents):
        example = key_value_records(rng, pairs=pairs)
        answer = example.answer.strip()
        values = [line.rsplit(maxsplit=1)[-1] for line in example.prompt.splitlines()[:pairs]]
        offered = rng.sample([value for value in values if value != answer], choices - 1)
        offered.insert(place := rng.randrange(choices), answer)
        made.append({"prompt": example.prompt, "choices": offered, "answer": place})
    return {"test": Dataset.from_list(made)}


def pieces(*, path: str, documents: int, characters: int, **_: Any) -> dict[str, Dataset]:
    """The first `documents` pieces of a UTF-8 text, of whole lines and as many `characters` as fit; a line may have more."""
    found, piece = [], ""
    for line in Path(path).expanduser().read_text(encoding="utf-8").splitlines(keepends=True):
        if piece.strip() and len(piece) + len(line) > characters:
            found.append({"text": piece})
            piece = ""
        piece += line
    if len(found) < documents:
        raise ValueError(f"{path}: expected text for {documents} pieces of {characters} characters, got {len(found)}; use fewer")
    return {"test": Dataset.from_list(found[:documents])}
