"""One prompt, answered by the engine: the text as it is made, and where the time goes."""

import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import pandas as pd
from matplotlib.figure import Figure
from rich.console import Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from experiments.cells import attachment, method_row
from experiments.engines import build_engine, check_engine
from experiments.lab import Lab
from experiments.own_process import begin_peak, peak_resident_bytes
from experiments.part_building import part_name
from experiments.progress import bar, say
from experiments.refusals import check_count
from experiments.studies.base import Study
from shadowattn.engine.drafts import PromptLookup
from shadowattn.engine.engine import cannot_draft
from shadowattn.engine.generation import Generation, check_context
from shadowattn.engine.sampling import Sampling
from shadowattn.engine.text import TextStream, end_tokens, prompt_tokens
from shadowattn.errors import InputError
from shadowattn.reporting.figures.generation import draw as draw_generation
from shadowattn.reporting.rows import Row

READER = 5.0  # words a second that a person reads


@dataclass(frozen=True)
class GenerationRow(Row):
    """A row about one answer. `phase` is prefill, decode, or empty for both; `stage` is one of `engine.STAGES` or `AHEAD_STAGES`,
    or empty.

    `prompt_tokens` and `new_tokens` are those of the answer; `precision` and `weights` are the blocks', `attention_dtype` that of
    Q, K and V, `chunk` the tokens of a chunk. `text` stands in the row of the metric `new_tokens`.
    """

    phase: str = ""
    stage: str = ""
    prompt_tokens: int = 0
    new_tokens: int = 0
    precision: str = ""
    output_layer: str = ""  # `engine.head`
    weights: str = ""
    attention_dtype: str = ""
    look_ahead: int = 0  # the first layer whose lists were made a layer early; 0: none
    chunk: int = 0
    text: str = ""


@dataclass(frozen=True)
class Generate(Study):
    """The answer to `prompt`, or to the text of the file `path`, of at most `new_tokens` tokens.

    `chat`: whether the prompt is a message by the model's chat template; null: where it has one. `temperature`, `top_k` and
    `top_p` as in `engine.sampling.Sampling`; `drafts` tokens are looked up behind the last `ngram` and checked at once, 0: none.
    """

    new_tokens: int = 256
    path: str | None = None
    chat: bool | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    drafts: int = 0
    ngram: int = 3
    needs: ClassVar[tuple[str, ...]] = (
        *("model", "data", "evaluation", "seed", "retention", "method", "estimator", "allocator", "selection", "importance"),
        *("sensitivity", "calibration", "key_offset", "grid", "graphs", "device", "kernel", "dense_above", "decode"),
        *("pipeline", "scheduler", "engine", "prompt", "threads"),
    )
    headline: ClassVar[tuple[str, ...]] = ("time_to_first_token", "tokens_per_second")

    def __post_init__(self):
        check_count("study.new_tokens", self.new_tokens)
        check_count("study.drafts", self.drafts, least=0)
        check_count("study.ngram", self.ngram)
        Sampling(self.temperature, self.top_k, self.top_p)

    def check(self, lab: Lab) -> None:
        check_engine(lab)
        if self.drafts >= (chunk := lab.of("engine").chunk_tokens):
            raise InputError(
                f"study.drafts: expected fewer than engine.chunk_tokens={chunk}, which check them at once, got {self.drafts}"
            )
        ranks = (lab.main.within or lab.main).estimator_class
        if self.drafts and (reason := cannot_draft(ranks.sees, part_name(lab.main.estimator), lab.of("decode"))):
            raise InputError(f"study.drafts: {reason}; use decode=dense, or study.drafts=0")
        tokens = self._tokens(lab)
        lab.asked_tokens = [len(tokens)]
        check_context(lab.shape.context_tokens, len(tokens), self.new_tokens)

    def measure(self, lab: Lab) -> list[GenerationRow]:
        method, at = lab.main, lab.of("retention")
        attached = attachment(lab, method, lab.offline.profile(method.allocator, at))
        engine = build_engine(lab, attached.method(lab))
        sampling = Sampling(self.temperature, self.top_k, self.top_p, lab.seed)
        drafts = PromptLookup(self.ngram, self.drafts) if self.drafts else None
        tokens, tokenizer = self._tokens(lab), lab.loaded.tokenizer
        ends = end_tokens(lab.loaded.model, tokenizer)
        say(f"generate: {len(tokens)} tokens of prompt, up to {self.new_tokens} new ones, blocks in {engine.form.precision}")
        prefill = bar([], "prefill", total=len(tokens))
        run = engine.generate(  # refuses what it cannot do now, and begins with the first token that is asked for
            tokens, new_tokens=self.new_tokens, stop=ends, sampling=sampling, drafts=drafts, progress=prefill.update
        )
        counted, began = begin_peak(), time.perf_counter()
        engine.compile(len(tokens), drafts=self.drafts)
        compiling = time.perf_counter() - began
        text = _streamed(run, TextStream(tokenizer), prefill)
        row = method_row(lab, lab.row(GenerationRow), method, at)
        settings = lab.of("engine")
        row = replace(
            row, path_kind="timing", n=1, data="prompt", corpus_sha256="", prompt_tokens=len(tokens),
            new_tokens=run.spent.new_tokens, context_tokens=len(run.cache), precision=settings.precision,
            output_layer=settings.head,
            weights=settings.weights, attention_dtype=settings.attention_dtype, chunk=settings.chunk_tokens,
            look_ahead=settings.look_ahead or 0,
        )  # fmt: skip
        return _rows(row, run, text, compiling, engine.attention.counters.density, peak_resident_bytes() if counted else None)

    def figures(self, rows: pd.DataFrame) -> dict[str, Figure]:
        return {"generation": draw_generation(rows)}

    def table(self, rows: pd.DataFrame, title: str) -> Group:
        """The answer, and what it took."""
        text = rows[rows.metric == "new_tokens"].text.iloc[0]
        whole = rows[rows.stage == ""].set_index("metric")
        table = Table("metric", "value", "unit", title=title, title_justify="left")
        for metric, one in whole.iterrows():
            table.add_row(str(metric).replace("_", " "), f"{one.value:.4g}", "" if one.unit == "1" else one.unit)
        return Group(Panel(Text(text), title="answer", title_align="left"), table)

    @cached_property
    def _prompt_of_file(self) -> str:
        try:
            return Path(self.path).expanduser().read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"study.path: expected a text file, got {self.path!r} ({error}); set study.path=FILE") from error

    def _tokens(self, lab: Lab) -> list[int]:
        prompt = lab.of("prompt")
        if bool(prompt) == bool(self.path):
            got = "both" if prompt else "neither"
            raise InputError(f"prompt: expected a text or a file, got {got}; set prompt='TEXT' or study.path=FILE")
        return prompt_tokens(lab.loaded.tokenizer, prompt or self._prompt_of_file, chat=self.chat, setting="study.chat")


def _streamed(run: Generation, stream: TextStream, prefill) -> str:
    """The whole text; on a terminal it is shown as it is made."""
    shows = sys.stderr.isatty()
    for token in run:
        prefill.close()
        new = stream.add(token)
        if shows:
            print(new, end="", file=sys.stderr, flush=True)
    if shows:
        print(stream.rest(), file=sys.stderr)
    return stream.text


def _rows(
    row: GenerationRow, run: Generation, text: str, compiling: float, density: float, peak: int | None
) -> list[GenerationRow]:
    """`peak`: bytes of the process at most from compiling on, model and graphs included; None where the system does not tell."""
    spent, words = run.spent, len(text.split())
    read = READER * spent.new_tokens / words if words else float("nan")
    figures = {
        "compile_seconds": (compiling, "s"),  # of the graphs, before the prompt
        "time_to_first_token": (spent.first_token, "s"),
        "prefill_tokens_per_second": ((spent.prompt_tokens - spent.reused_tokens) / spent.first_token, "tokens/s"),
        "tokens_per_second": (spent.tokens_per_second, "tokens/s"),
        "reader_tokens_per_second": (read, "tokens/s"),
        "cpu_seconds": (spent.cpu_seconds, "s"),
        "prefill_cpu_seconds": (spent.first_token_cpu, "s"),
        "decode_cpu_seconds": (spent.decoding_cpu, "s"),
        "cpu_share": (spent.cpu_seconds / (spent.first_token + spent.decoding), "cores"),
        "kv_cache": (float(run.cache.bytes), "bytes"),
        "density": (density, "1"),
        "drafted_tokens": (float(spent.drafted_tokens), "tokens"),
        "accepted_tokens": (float(spent.accepted_tokens), "tokens"),
    }
    if peak is not None:
        figures["peak_memory"] = (float(peak), "bytes")
    rows = [replace(row, metric="new_tokens", value=float(spent.new_tokens), unit="tokens", text=text)]
    rows += [replace(row, metric=metric, value=value, unit=unit) for metric, (value, unit) in figures.items()]
    for phase, stages in (("prefill", spent.prefill), ("decode", spent.decode)):
        rows += [replace(row, metric="time", value=value, unit="s", phase=phase, stage=name) for name, value in stages.items()]
    return rows
