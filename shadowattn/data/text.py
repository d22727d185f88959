"""Corpora: a calibration text and a held-out text, each from its own part of the source."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from shadowattn.data.overlap import load_runs
from shadowattn.data.stdlib import heldout_text, stdlib_text
from shadowattn.errors import InputError

# All runs of four lines that the bundled model was trained on, whatever Python's version runs here.
TRAINING_RUNS = Path(__file__).parents[1] / "models" / "bundled" / "training_runs.npy"
_SHORT_LINE = 10  # characters; the artifact skips lines no longer than this


@dataclass(frozen=True)
class Corpus:
    """`calibration` is what the offline stage may read, `heldout` what results are measured on."""

    name: str
    calibration: str
    heldout: str

    @property
    def sha256(self) -> str:
        """Hash of both texts: which corpus a result was measured on."""
        digest = hashlib.sha256()
        for text in (self.calibration, self.heldout):
            digest.update(hashlib.sha256(text.encode()).digest())
        return digest.hexdigest()


def stdlib_corpus() -> Corpus:
    """Python's standard library: modules on each side that the bundled model was not trained on.

    No four lines of the held-out text stand in the training text; of the calibration text, which importance and scales come
    from, 7 % of the runs of four lines do (`python -m experiments.reference_model.overlap`).
    """
    return Corpus("stdlib", stdlib_text("calibration"), heldout_text(load_runs(TRAINING_RUNS)))


def text_corpus(path: str | None, *, pattern: str = "*.txt", heldout: str | None = None) -> Corpus:
    """A UTF-8 text file, or all files of a folder that match `pattern`, in name order.

    The first half calibrates, the second is held out, cut at a line end; with another text in `heldout`, all of `path`
    calibrates. Raises `InputError` on a path that is not there, and on empty or binary text.
    """
    if not path:
        raise InputError("data=text: expected a file or folder, got none; set data.path=FILE")
    text = _gather("path", path, pattern)
    name = Path(path).expanduser().resolve().name
    if not heldout:
        return _halves(name, text)
    return Corpus(name, _filled(name, text), _filled(name, _gather("heldout", heldout, pattern)))


def hub_corpus(
    id: str | None,
    *,
    name: str | None = None,
    split: str = "validation",
    column: str = "text",
    files: str | None = None,
) -> Corpus:
    """A `datasets` id (or one of its file builders, such as `text` or `json`, with `files`), one column of one split.

    Halved as in `text_corpus`. The corpus is called by `id`, and by the configuration `name` where there is one. Raises
    `InputError` where it cannot be loaded.
    """
    if not id:
        raise InputError("data=hub: expected a datasets id, got none; set data.id=ORGANISATION/NAME")
    import datasets  # two seconds to import, and only this needs it

    try:
        rows = datasets.load_dataset(id, name, split=split, data_files=files)
        lines = rows[column]
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())[:300]
        raise InputError(
            f"data.id: {id!r} could not be loaded ({type(error).__name__}: {reason}); check data.id, data.split and "
            "data.column, or use data=text data.path=FILE"
        ) from error
    return _halves(f"{id} {name}" if name else id, "\n".join(str(line) for line in lines))


def leading_token(tokenizer) -> list[int]:
    """The beginning token that the tokenizer puts before plain text, alone; empty where it puts none."""
    begin = tokenizer.bos_token_id
    return [begin] if begin is not None and tokenizer("a").input_ids[:1] == [begin] else []


def token_windows(text: str, tokenizer, *, tokens: int, windows: int, source: str, key: str = "tokens") -> Tensor:
    """Non-overlapping windows spread evenly over the text, int64 [W, tokens] with W ≤ `windows`, or all of them for 0.

    Each begins with the tokenizer's beginning-of-sequence token where it adds one. Fewer windows come back where the text holds
    fewer; raises `InputError`, which names `key` as the setting of `tokens`, where it does not hold one.
    """
    return windows_of(token_ids(text, tokenizer), tokenizer, tokens=tokens, windows=windows, source=source, key=key)


def token_ids(text: str, tokenizer) -> Tensor:
    """All tokens of a text, int64 [T], without any special one."""
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False).input_ids, dtype=torch.int64)


def windows_of(ids: Tensor, tokenizer, *, tokens: int, windows: int, source: str, key: str = "tokens") -> Tensor:
    """`token_windows` of a text whose tokens [T] are known."""
    lead = torch.tensor(leading_token(tokenizer), dtype=torch.int64)
    body = tokens - len(lead)
    whole = len(ids) // body
    if whole < 1:
        raise _too_short(source, body, len(ids), key)
    count = min(windows or whole, whole)
    starts = [index * whole // count * body for index in range(count)]
    return torch.stack([torch.cat([lead, ids[start : start + body]]) for start in starts])


def line_windows(text: str, tokenizer, *, tokens: int, windows: int, source: str, key: str = "tokens") -> Tensor:
    """The artifact's windows: the first `windows` complete ones of the stream of lines, or all of them for 0; int64 [W, tokens].

    Lines are stripped, those of at most 10 characters skipped, and each is tokenised by itself, with whatever special tokens the
    tokenizer adds to it; what is left over at the end is dropped. Raises `InputError`, which names `key`, where no window is.
    """
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if len(line) > _SHORT_LINE]
    ids = [token for line in lines for token in tokenizer(line, verbose=False).input_ids]
    whole = len(ids) // tokens
    if whole < 1:
        raise _too_short(source, tokens, len(ids), key)
    count = min(windows or whole, whole)
    return torch.tensor(ids[: count * tokens]).view(count, tokens)


def _too_short(source: str, tokens: int, count: int, key: str) -> InputError:
    remedy = f"give more text, or shorter windows by {key}"
    return InputError(f"{source}: expected at least one window of {tokens} tokens, got {count} tokens; {remedy}")


def _gather(key: str, path: str, pattern: str) -> str:
    """The text of a file, or of a folder's files."""
    source = Path(path).expanduser()
    if not source.exists():
        raise InputError(f"data.{key}: expected a text file or folder, got {path!r}, which does not exist; set data.{key}=FILE")
    files = sorted(p for p in source.rglob(pattern) if p.is_file()) if source.is_dir() else [source]
    if not files:
        raise InputError(f"data.{key}: expected files {pattern} in {path!r}, found none; set data.pattern=GLOB")
    return "\n\n".join(_read(file) for file in files)


def _read(file: Path) -> str:
    content = file.read_bytes()
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"data.path: expected UTF-8 text, got bytes that are not in {str(file)!r}; convert it") from error
    if "\0" in text:
        raise InputError(f"data.path: expected text, got a binary file: {str(file)!r}; give a text file")
    return text


def _filled(name: str, text: str) -> str:
    if not text.strip():
        raise InputError(f"data {name}: expected text, got an empty one; give a file with text in it")
    return text


def _halves(name: str, text: str) -> Corpus:
    text = _filled(name, text)
    cut = text.find("\n", len(text) // 2) + 1 or len(text) // 2
    return Corpus(name, text[:cut], text[cut:])
