"""What a study may ask for: model, text, windows, device, kernels, methods; each computed when it is first asked for.

A study names in `needs` what of the configuration it uses. Nothing else is computed, checked, printed or hashed, and a study that
asks for more fails.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.asked import Asked
from experiments.banks import Banks
from experiments.config import ALWAYS, MethodConfig, SelectionConfig
from experiments.errors import ShardDoneError
from experiments.int8_estimate import served
from experiments.offline import Offline
from experiments.part_building import build, by_content, part_name
from experiments.probes import probes
from experiments.progress import bar, say
from experiments.source import Code, current_code, stage_code
from shadowattn.artifacts import Stage, Units, content_hash, versions
from shadowattn.data.text import Corpus, line_windows, token_ids, windows_of
from shadowattn.devices import EstimateDevice, find_estimate_device
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import Question, Task
from shadowattn.kernels import choose, native
from shadowattn.models import LoadedModel, ModelShape, model_shape
from shadowattn.models.place import find_place, place_label
from shadowattn.online.break_even import break_even
from shadowattn.online.estimators import Estimator
from shadowattn.online.estimators.base import FirstLook
from shadowattn.online.executor import Threads
from shadowattn.online.full_int8 import FullInt8
from shadowattn.online.latency import LatencyProfile
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.reporting.rows import Row

AnyRow = TypeVar("AnyRow", bound=Row)
_DEFAULT_CONTEXT = 1024
# What stands in the hash by its content: the weights, both texts, and what was found for `auto`.
_BY_CONTENT = ("model", "data")


@dataclass(frozen=True)
class MethodSettings:
    """The parts of one method, as the configuration names them. `int8`: which estimator serves for that name, and why."""

    name: str
    estimator: DictConfig
    allocator: DictConfig
    selection: SelectionConfig
    int8: str = ""

    @property
    def estimator_class(self) -> type[Estimator]:
        return get_class(self.estimator._target_)

    @property
    def within(self) -> "MethodSettings | None":
        """The same with the estimator that this one's is built around; None where there is none."""
        inner = self.estimator.get("estimator")
        return replace(self, estimator=inner) if inner else None

    @property
    def needs(self) -> frozenset[str]:
        """What has to be made for the estimator: a `bank`, a `grid`, a `key_offset`; as `Estimator.needs`."""
        return self.estimator_class.needs | (self.within.needs if self.within else frozenset())

    @property
    def look(self) -> FirstLook | None:
        """The estimator's first look."""
        return self.estimator_class.look_of(self.estimator)

    @property
    def on_device(self) -> bool:
        """Whether the graphs themselves select."""
        return self.selection.place == "device"

    @property
    def rule(self) -> Rule:
        """Raises `InputError` on a value that does not fit, by the key of the setting."""
        try:
            return Rule(**self.rule_options)
        except InputError as error:
            raise InputError(f"selection.{error}") from error

    @property
    def rule_options(self) -> dict[str, Any]:
        """What of the selection is the rule; the rest says where it is made."""
        return {one.name: self.selection[one.name] for one in fields(Rule)}


class Lab:
    """`config`: a complete configuration; `needs`: what of it may be asked for; `folder`: where the run's results go."""

    def __init__(self, config: DictConfig, needs: Collection[str]):
        self._config, self.needs = config, frozenset(needs)
        self.root = Path(config.paths.results)
        self.code: Code = current_code({key: config[key] for key in (*sorted(self.needs), "study")})
        self.folder: Path | None = None
        self.stages: list[str] = []  # folders of what was computed or found on the way
        self.asked_tokens: list[int] = []  # the lengths of prompts that the study asks beside windows and the run's task
        torch.set_num_threads(config.threads or os.cpu_count() or 1)

    def __reduce__(self):
        """Another process makes it anew, of the same settings and for the same results."""
        return _lab, (OmegaConf.to_container(self._config, resolve=True), self.needs, self.folder)

    def of(self, key: str) -> Any:
        """A setting, or a group of them. Raises `RuntimeError` where the study did not name it."""
        if key not in self.needs and key not in ALWAYS:
            raise RuntimeError(f"the study uses {key!r} and does not name it in its `needs`: no hash would hold it")
        return self._config[key]

    def units(self, name: str) -> Units:
        """Finished pieces of the run's results, for one purpose."""
        return Units(self.folder / name)

    def measure_pieces(self, units: Units, pieces: dict[str, Callable[[], Any]], what: str) -> None:
        """Measures this shard's share of pieces, every `shard.count`-th, of what is not in `units` yet.

        Raises `ShardDoneError` where pieces of other shards are missing.
        """
        shard = self.of("shard")
        for key in bar(list(pieces)[shard.index :: shard.count], what):
            units.get(key, pieces[key])
        if not all(units.has(key) for key in pieces):
            raise ShardDoneError(what, shard.index, shard.count)

    def settings(self) -> dict[str, Any]:
        """What decides the results, resolved: the study's own settings and what it needs."""
        resolved = OmegaConf.to_container(self._config, resolve=True)
        return {key: value for key, value in resolved.items() if key in self.needs or key in ("experiment", "study")}

    def config_hash(self, inputs: dict[str, Any]) -> str:
        """12 hexadecimal digits for what decides the results, files by their content. `inputs`: what counts in place of
        settings of the study, or beside them."""
        hashed = {key: by_content(value) for key, value in self.settings().items() if key not in _BY_CONTENT}
        if "model" in self.needs:
            hashed |= {"model": self.loaded.fingerprint, "dtype": str(self.loaded.model.dtype)} | self._elsewhere
        if "data" in self.needs:
            hashed["corpus"] = self.corpus.sha256
        if "evaluation" in self.needs:
            hashed["context_tokens"] = self.context_tokens
        if "device" in self.needs:
            hashed["device"] = self.device.label
        if "kernel" in self.needs:
            hashed["kernel"] = self.kernel
        if self.int8:
            hashed["int8"] = {name: part_name(one.estimator) for name, one in self.methods.items()}
        hashed["study"] = hashed["study"] | inputs
        return content_hash(hashed | {"shadowattn": versions()["shadowattn"]})

    @cached_property
    def offline(self) -> Offline:
        """Importance, sensitivity, scales and profiles."""
        return Offline(self)

    @cached_property
    def banks(self) -> Banks:
        """Banks of graphs."""
        return Banks(self)

    @property
    def seed(self) -> int:
        return self.of("seed")

    @cached_property
    def loaded(self) -> LoadedModel:
        part = self.of("model")
        if "seed" in self.needs:
            torch.manual_seed(self.seed)
        return build(part)

    @cached_property
    def place(self) -> torch.device:
        """Where the model is, known before it is loaded. Raises `InputError` where that is no device of this machine."""
        return find_place(self.of("model").get("device", "cpu") if "model" in self.needs else "cpu")

    @property
    def gpu(self) -> str | None:
        """The GPU that the model is on, by name."""
        return None if self.place.type == "cpu" else place_label(self.place)

    @property
    def _elsewhere(self) -> dict[str, str]:
        """What tells results of a model on a GPU from the CPU's."""
        return {} if self.place.type == "cpu" else {"model_device": place_label(self.place)}

    @cached_property
    def shape(self) -> ModelShape:
        return model_shape(self.loaded.model)

    @cached_property
    def corpus(self) -> Corpus:
        return build(self.of("data"))

    @cached_property
    def context_tokens(self) -> int:
        """Tokens of a window that is evaluated."""
        return self.of("evaluation").context_tokens or min(_DEFAULT_CONTEXT, self.shape.context_tokens)

    @cached_property
    def device(self) -> EstimateDevice:
        if self.place.type != "cpu":  # graphs read the CPU's memory, so that none runs, and no device is asked whether it would
            return EstimateDevice("CPU", "the model is on a GPU")
        return find_estimate_device(self.of("device"), partial(probes, self))

    @property
    def device_name(self) -> str:
        """The device of graphs: the CPU for a study that names none."""
        return self.device.name if "device" in self.needs else "CPU"

    @cached_property
    def kernel(self) -> str:
        """The kernels that `kernel` stands for with this model."""
        model = self.loaded.model
        return choose(self.of("kernel"), head_dim=self.shape.head_dim, dtype=model.dtype, device=self.place).name

    @property
    def kernel_level(self) -> str:
        """The same with the instruction set that is used."""
        return self.kernel + (f" ({native.level()})" if self.kernel == "native" else "")

    def dense_above(self, rule: Rule, look: FirstLook | None = None) -> float:
        """The retention from which heads go dense, a number also where the config says `auto`."""
        if self.of("dense_above") != "auto":
            return float(self.of("dense_above"))
        dtype = self.loaded.model.dtype
        kernels = choose(self.kernel, head_dim=self.shape.head_dim, dtype=dtype, device=self.place)
        return break_even(kernels, dtype, rule, look)

    @cached_property
    def main(self) -> MethodSettings:
        """The method put together from the groups."""
        allocator = self.of("allocator") if "allocator" in self.needs else None
        estimator = self.of("estimator")
        ours = get_class(estimator._target_).is_papers
        name = (self.of("method") if "method" in self.needs else None) or ("shadowattn" if ours else part_name(estimator))
        return self._method(name, estimator, allocator, self.of("selection"))

    def _method(self, name: str, estimator: DictConfig, allocator: DictConfig, selection: SelectionConfig) -> MethodSettings:
        estimator, why = served(self, estimator, selection)
        return MethodSettings(name, estimator, allocator, selection, why)

    @cached_property
    def methods(self) -> dict[str, MethodSettings]:
        """The main method and those that it is compared with, by name."""
        rivals = [self._method(str(name), one.estimator, one.allocator, one.selection) for name, one in self._further.items()]
        return {one.name: one for one in (self.main, *rivals)}

    @property
    def _further(self) -> dict[str, MethodConfig]:
        return self.of("compare") if "compare" in self.needs else {}

    @property
    def selections(self) -> list[SelectionConfig]:
        """Those of all methods."""
        return [self.of("selection"), *(one.selection for one in self._further.values())]

    @property
    def int8(self) -> list[str]:
        """What `estimator=int8` is here and why, as methods differ in that; empty where none is named so."""
        methods = self.methods.values() if "estimator" in self.needs else ()
        return list(dict.fromkeys(one.int8 for one in methods if one.int8))

    @cached_property
    def full(self) -> dict[str, FullInt8]:
        """Methods that attend to every key, in other arithmetic, by name."""
        parts = self.of("full") if "full" in self.needs else {}
        return {str(name): build(part) for name, part in parts.items()}

    @property
    def retentions(self) -> list[float]:
        """Those of `retentions`, or `retention` alone."""
        several = self.of("retentions") if "retentions" in self.needs else []
        return list(several) or [self.of("retention")]

    @cached_property
    def pipeline(self) -> Pipeline:
        """Raises `InputError` on options or a latency profile that do not fit."""
        settings = self.of("pipeline")
        profile = LatencyProfile.load(Path(settings.profile).expanduser()) if settings.profile else None
        threads = Threads(**settings.threads)
        scheduler = build(self.of("scheduler")) if "scheduler" in self.needs else None
        return Pipeline(settings.mode, queue_heads=settings.queue_heads, threads=threads, scheduler=scheduler, profile=profile)

    @cached_property
    def asked(self) -> Asked | None:
        """The task with its questions; None for plain text."""
        if "task" not in self.needs:
            return None
        task = build(self.of("task"))
        if not isinstance(task, Task):
            raise InputError(f"task: expected a task, got {type(task).__name__}; see conf/task")
        questions = tuple(task.questions(self.loaded.tokenizer, self.corpus.heldout))
        longest = max((question.tokens for question in questions), default=0)
        if longest > self.shape.context_tokens:
            raise InputError(
                f"task: the model's context is {self.shape.context_tokens} tokens, got a prompt of {longest}; make it "
                "shorter, where the task has such a setting by task.tokens"
            )
        return Asked.of(task.name, task, questions) if questions else None

    @property
    def questions(self) -> Sequence[Question]:
        """Those of the task; none for plain text."""
        return self.asked.questions if self.asked else ()

    @property
    def prompt_tokens(self) -> list[int]:
        """The lengths of all prompts of the run: what the bank must serve."""
        windows = [self.context_tokens] * self.of("evaluation").windows
        return windows + [question.tokens for question in self.questions] + self.asked_tokens

    def calibration(
        self, *, tokens: int, windows: int, lines: str = "document", key: str = "evaluation.context_tokens"
    ) -> Tensor:
        """Windows of the corpus's calibration text, 0 for all; its lines taken as they are or as the artifact takes them.

        `key`: the setting that their length comes from, for the error where the text is shorter than one.
        """
        how = {"tokens": tokens, "windows": windows, "source": self._source("calibration"), "key": key}
        if lines == "artifact":
            return line_windows(self.corpus.calibration, self.loaded.tokenizer, **how)
        return windows_of(self._calibration_ids, self.loaded.tokenizer, **how)

    def heldout(self, *, windows: int | None = None) -> Tensor:
        """The windows that results are measured on, `evaluation.windows` of them where no other number is given."""
        count = self.of("evaluation").windows if windows is None else windows
        how = {"tokens": self.context_tokens, "windows": count, "source": self._source("held-out")}
        return windows_of(self._heldout_ids, self.loaded.tokenizer, **how, key="evaluation.context_tokens")

    @cached_property
    def _calibration_ids(self) -> Tensor:
        return token_ids(self.corpus.calibration, self.loaded.tokenizer)

    @cached_property
    def _heldout_ids(self) -> Tensor:
        return token_ids(self.corpus.heldout, self.loaded.tokenizer)

    def _source(self, kind: str) -> str:
        return f"data {self.corpus.name}, {kind} text"

    def stage(self, name: str, inputs: dict, *parts: dict) -> Stage:
        """A part of the offline stage, by today's code: done once for its inputs, kept, and found again.

        `parts` are the settings of swappable parts that take part in it.
        """
        common = {"model": self.loaded.fingerprint, "dtype": str(self.loaded.model.dtype)} | self._elsewhere
        common |= {"corpus": self.corpus.sha256, "seed": self.seed}
        stage = Stage(self.artifacts, name, common | inputs, code=stage_code(*parts))
        if stage.outdated:
            say(f"{name}: {stage.folder.name} was measured with other code, measuring again")
        if stage.folder.name not in self.stages:
            self.stages.append(stage.folder.name)
        return stage

    @property
    def artifacts(self) -> Path:
        """Where stages are kept, for all runs."""
        return self.root / "artifacts"

    def row(self, kind: type[AnyRow] = Row) -> AnyRow:
        """What all rows of a run have in common, filled in as for dense attention; `none` for what the study does not use."""
        has = self.needs
        return kind(
            experiment=self.of("experiment"),
            config_hash=self.folder.name,
            metric="",
            value=float("nan"),
            unit="1",
            method="dense",
            model=self.loaded.name if "model" in has else "none",
            retention=1.0,
            n=0,
            seed=self.seed if "seed" in has else 0,
            path_kind="quality",
            estimate_device="none",
            measured="measured",
            kernel=self.kernel if "kernel" in has else "none",
            estimator="none",
            allocator="none",
            query_block=1,
            block_score="none",
            context_tokens=self.context_tokens if "evaluation" in has else 0,
            data=self.corpus.name if "data" in has else "none",
            corpus_sha256=self.corpus.sha256 if "data" in has else "",
            flag="",
            dense_above=self.dense_above(Rule()) if "dense_above" in has else 1.0,
            model_device=place_label(self.place),
        )

    def timing_row(self, kind: type[AnyRow] = Row) -> AnyRow:
        """The same for times on random tensors."""
        return replace(self.row(kind), path_kind="timing", data="random tensors", corpus_sha256="")

    def meta(self) -> dict[str, Any]:
        """What of a finished run's `meta.json` is the lab's."""
        has = self.needs
        record: dict[str, Any] = {"config": self.settings(), "stages": self.stages}
        if "model" in has:
            record["model"] = {"name": self.loaded.name, "fingerprint": self.loaded.fingerprint} | asdict(self.shape)
            record["model"]["device"] = place_label(self.place)
        if "data" in has:
            record["data"] = {"name": self.corpus.name, "sha256": self.corpus.sha256}
        if "device" in has:
            record["estimate_device"] = asdict(self.device)
        if "kernel" in has:
            record["kernel"] = self.kernel_level
        if self.int8:
            record["int8"] = self.int8
        return record

    @property
    def subject(self) -> str:
        """What is measured, for headings; empty where no model is."""
        text = f" on {self.corpus.name}" if "data" in self.needs else ""
        return f"{self.loaded.name}{text}" if "model" in self.needs else ""


def _lab(config: dict[str, Any], needs: Collection[str], folder: Path | None) -> Lab:
    lab = Lab(OmegaConf.create(config), needs)
    lab.folder = folder
    return lab
