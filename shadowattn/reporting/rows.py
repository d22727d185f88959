"""Tidy rows: one measurement each, complete enough to be understood alone."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd

# How a value came about: of something that ran; of the simulator; counted; or of a device's compiler, which ran nothing.
MEASURED = ("measured", "simulated", "counted", "compiled")


@dataclass(frozen=True)
class Row:
    """One measured value and everything that decides it.

    `path_kind` is `quality` or `timing`; `measured` is one of `MEASURED`; `n` counts what was averaged (tokens, or windows),
    `flag` says why a reader should be wary, and is empty most of the time.
    """

    experiment: str
    config_hash: str
    metric: str
    value: float
    unit: str
    method: str
    model: str
    retention: float
    n: int
    seed: int
    path_kind: str
    estimate_device: str
    measured: str
    kernel: str
    estimator: str
    allocator: str
    query_block: int
    block_score: str
    context_tokens: int
    data: str
    corpus_sha256: str
    flag: str
    sinks: int = 0
    recent: int = 0
    dense_above: float = 1.0  # heads of this retention or more went dense
    place: str = "host"  # where the selection was made: host or device
    key_block: int = 1  # keys that are chosen together
    model_device: str = "cpu"  # where the model ran: cpu, or a GPU by its name
    min_budget: int = 1  # keys that a row keeps whatever its retention, or all that it sees


@dataclass(frozen=True)
class SpreadRow(Row):
    """A row about a median: `low` and `high` are the quartiles. `chunk_rows` query rows were computed."""

    low: float = 0.0
    high: float = 0.0
    chunk_rows: int = 0


@dataclass(frozen=True)
class PlacedRow(Row):
    """A row about one layer, or one head of it; −1 where it is about neither."""

    layer: int = -1
    head: int = -1


@dataclass(frozen=True)
class LayerTimeRow(PlacedRow):
    """A row about time in one layer or in all, of `chunk_rows` rows at the end of a context.

    `low` and `high` are the quartiles of the rounds.
    """

    chunk_rows: int = 0
    low: float = 0.0
    high: float = 0.0
    dtype: str = ""
    processor: str = ""
    threads: int = 0


@dataclass(frozen=True)
class TaskRow(Row):
    """A row about a task's questions, which n counts; the fields say nothing in a row about something else.

    `task` is its name. `source` is where its questions are from: generated, with the seed; a file, with the beginning of its
    SHA-256; or a data set of the hub, with the commit that was read. `chat`: whether the chat template asks. `cut` is what of a
    prompt is cut to its length, and on which side. `tokens` is the length that prompts were made for, where none was asked for
    that of the longest with its answer; `context_tokens` then is the length of the longest prompt with its answer, as it is read.
    """

    task: str = ""
    source: str = ""
    chat: bool = False
    cut: str = ""
    tokens: int = 0


@dataclass(frozen=True)
class QualityRow(PlacedRow, TaskRow):
    """A row of a quality study: about held-out text, the questions of the run's task, or the keys of one head.

    `octave`: it is about the rows of a window that see so many keys or more, and fewer than the next octave's, twice as many (the
    first, 1, ends below 16); 0: about all.
    """

    octave: int = 0


@dataclass(frozen=True)
class EstimatorRow(QualityRow):
    """A row about an estimator: its `granularity`, what it goes by (`sees`) and what it `needs`, by the names of `Estimator`.

    `ranked_rows` and `ranked_keys` are its `ranked_together`.
    """

    granularity: str = ""
    sees: str = ""
    needs: str = ""
    ranked_rows: int = 1
    ranked_keys: int = 1


# Whose queries decide what a row keeps, by `Estimator.goes_by`.
GOES_BY = {"row": "the row", "earlier_rows": "earlier rows", "chunk": "later rows too"}

_RANKED_FOR = {"head": "each head", "group": "a key head's heads", "layer": "all heads"}


def list_for(granularity: str, rows: float | None) -> str:
    """Whose list a ranking makes, for a reader: of which heads, and of how many rows, where that was recorded."""
    heads = _RANKED_FOR[granularity]
    if rows is None or rows != rows:
        return heads
    return f"{heads}, {({0: 'a chunk', 1: 'a row'}).get(rows, f'{rows:g} rows')}"


@dataclass(frozen=True)
class StageRow(PlacedRow):
    """A row about a stage of the pipeline (`estimate`, `select`, `attend`; empty: about all of them).

    `heads` lists the places of the heads of a span, `start` is where it begins, in the row's unit; `launch_heads`, `bucket` and
    `capacity` name a launch of the estimate as in `online.latency.Latency`. `scheduler` is who ordered the heads; empty: nobody.
    """

    stage: str = ""
    heads: str = ""
    start: float = 0.0
    bytes: int = 0
    launch_heads: int = 1
    bucket: int = -1
    capacity: int = 0
    scheduler: str = ""


def write_rows(rows: Sequence[Row], path: Path) -> pd.DataFrame:
    """Writes rows as parquet, atomically, and returns them as a frame."""
    path.parent.mkdir(parents=True, exist_ok=True)
    frame = pd.DataFrame([asdict(row) for row in rows])
    staged = path.with_name(f".{path.name}")
    frame.to_parquet(staged, index=False)
    staged.replace(path)
    return frame


def with_graphs_named(rows: pd.DataFrame) -> pd.DataFrame:
    """Methods by today's names: published rows may be of code that called `int8` what is `int8_graph`."""
    return rows.assign(method=rows.method.str.replace(r"\bint8\b", "int8_graph", regex=True))
