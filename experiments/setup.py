"""What a configuration stands for: the loaded model, the token windows, the device. Everything is checked before any work."""

import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from experiments.config import ImportanceConfig, MethodConfig, SelectionConfig
from experiments.source import Code, current_code
from experiments.targets import check_targets
from shadowattn.artifacts import content_hash, sha256, versions
from shadowattn.data.text import Corpus, line_windows, token_windows
from shadowattn.devices import EstimateDevice, drivers, find_estimate_device
from shadowattn.errors import InputError
from shadowattn.evaluation.tasks import Question
from shadowattn.graphs.buckets import DISTANCES
from shadowattn.graphs.estimation import INPUTS
from shadowattn.graphs.planner import POLICIES, launch_sizes
from shadowattn.kernels import break_even, choose, native
from shadowattn.models import LoadedModel, ModelShape, model_shape
from shadowattn.models.linear import LINEARS
from shadowattn.models.load import DTYPES
from shadowattn.offline.ablations import BY_NAME as ABLATIONS
from shadowattn.offline.racing import Race
from shadowattn.offline.sensitivity import sensitivity_grid
from shadowattn.offline.work import shard
from shadowattn.online.attention import DECODES, check_dense_above
from shadowattn.online.estimators.int8_device import Int8Device
from shadowattn.online.executor import Threads
from shadowattn.online.latency import LatencyProfile
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.selection import Rule
from shadowattn.online.simulation.description import load_device

# What is local to a machine, or stands in the hash by its content instead.
_OUTSIDE_HASH = ("model", "data", "paths", "threads", "shard", "reuse")
# Settings that name a file: its content is hashed, not where it lies.
_FILES = ("path", "activation_scales", "profile")
# In place of a file of activation scales: take them from the calibration windows.
OBSERVE = "observe"
_DEFAULT_CONTEXT = 1024
# What the graphs give out: float32 scores, or INT8 ones by one of the two rules of `types.Requant`.
OUTPUTS = ("float", "target_requant", "fixed_output")


@dataclass(frozen=True)
class Setup:
    config: DictConfig
    config_hash: str
    loaded: LoadedModel
    shape: ModelShape
    corpus: Corpus
    context_tokens: int
    device: EstimateDevice
    kernel: str
    methods: dict[str, MethodConfig]
    retentions: list[float]
    questions: tuple[Question, ...]
    code: Code

    def dense_above(self, query_block: int) -> float:
        """The retention from which heads go dense, a number also where the config says `auto`."""
        if self.config.dense_above != "auto":
            return float(self.config.dense_above)
        dtype = self.loaded.model.dtype
        return break_even(choose(self.kernel, head_dim=self.shape.head_dim, dtype=dtype), dtype, query_block)

    @property
    def prompt_tokens(self) -> list[int]:
        """The lengths of all prompts of the run: what the bank must serve."""
        windows = [self.context_tokens] * self.config.evaluation.windows
        return windows + [question.tokens for question in self.questions]

    def calibration(
        self, *, tokens: int, windows: int, lines: str = "document", key: str = "evaluation.context_tokens"
    ) -> Tensor:
        """Windows of the corpus's calibration text, 0 for all; its lines taken as they are or as the artifact takes them.

        `key`: the setting that their length comes from, for the error where the text is shorter than one.
        """
        cut = line_windows if lines == "artifact" else token_windows
        return self._windows(cut, "calibration", self.corpus.calibration, tokens, windows, key)

    def heldout(self, *, windows: int | None = None) -> Tensor:
        """The windows that results are measured on, `evaluation.windows` of them where no other number is given."""
        count = self.config.evaluation.windows if windows is None else windows
        key = "evaluation.context_tokens"
        return self._windows(token_windows, "held-out", self.corpus.heldout, self.context_tokens, count, key)

    def _windows(self, cut, kind: str, text: str, tokens: int, windows: int, key: str) -> Tensor:
        source = f"data {self.corpus.name}, {kind} text"
        return cut(text, self.loaded.tokenizer, tokens=tokens, windows=windows, source=source, key=key)


def prepare(config: DictConfig) -> Setup:
    """Loads and checks. Raises `InputError` on the first thing that does not fit, before anything is written."""
    methods = {config.method: _main_method(config)} | {str(name): method for name, method in config.compare.items()}
    retentions = list(config.retentions) or [config.retention]
    check_targets(config)
    code = current_code(config)
    _check(config, methods, retentions)
    torch.manual_seed(config.seed)
    torch.set_num_threads(config.threads or os.cpu_count() or 1)
    device = find_estimate_device(config.device)
    if device.name != "CPU" and config.graphs.inputs != "static":
        raise InputError(
            f"graphs.inputs: {config.graphs.inputs} gives scores in integer steps, beyond the 16-bit floats that "
            f"{device.name} computes in; use graphs.inputs=static, or device=cpu"
        )
    loaded = instantiate(config.model)
    shape = model_shape(loaded.model)
    corpus = instantiate(config.data)
    context_tokens = config.evaluation.context_tokens or min(_DEFAULT_CONTEXT, shape.context_tokens)
    sensitivity_tokens = config.sensitivity.window_tokens or context_tokens
    longest = max(context_tokens, config.importance.window_tokens, sensitivity_tokens)
    if longest > shape.context_tokens:
        raise InputError(
            f"evaluation.context_tokens: the model's context is {shape.context_tokens} tokens, got {longest}; "
            "set evaluation.context_tokens, importance.window_tokens or sensitivity.window_tokens to no more"
        )
    _check_fixed_budgets(methods, retentions, shape)
    questions = _questions(config, loaded, corpus, shape)
    kernel = choose(config.kernel, head_dim=shape.head_dim, dtype=loaded.model.dtype).name
    hashed = {k: v for k, v in OmegaConf.to_container(config, resolve=True).items() if k not in _OUTSIDE_HASH}
    hashed = by_content(hashed)
    if config.study == "simulation":
        hashed["simulation"]["device"] = asdict(load_device(config.simulation.device))
    hashed |= {
        "model": loaded.fingerprint,
        "dtype": config.model.dtype,
        "corpus": corpus.sha256,
        "context_tokens": context_tokens,
        "device": device.label,
        "kernel": kernel,
        "shadowattn": versions()["shadowattn"],
    }
    if config.study == "selfcheck":  # its subject is what is installed here
        hashed |= {"drivers": drivers(), "openvino": versions()["openvino"]}
    setup = Setup(
        config, content_hash(hashed), loaded, shape, corpus, context_tokens, device, kernel, methods, retentions, questions,
        code,
    )  # fmt: skip
    setup.heldout()
    lengths = {"evaluation.context_tokens": context_tokens, "importance.window_tokens": config.importance.window_tokens}
    setup.calibration(tokens=max(lengths.values()), windows=1, key=max(lengths, key=lengths.get))
    return setup


def make_pipeline(config: DictConfig) -> Pipeline:
    """The pipeline that a configuration asks for. Raises `InputError` on options or a profile that do not fit."""
    given = config.pipeline
    profile = LatencyProfile.load(Path(given.profile).expanduser()) if given.profile else None
    threads = Threads(given.estimate_threads, given.select_threads, given.attend_threads)
    scheduler = instantiate(config.scheduler)
    return Pipeline(given.mode, queue_heads=given.queue_heads, threads=threads, scheduler=scheduler, profile=profile)


def by_content(settings: Any) -> Any:
    """Settings with the SHA-256 of a file in place of its path."""
    if isinstance(settings, dict):
        return {
            key: _file_hash(key, value) if key in _FILES and value not in (None, OBSERVE) else by_content(value)
            for key, value in settings.items()
        }
    return [by_content(value) for value in settings] if isinstance(settings, list) else settings


def _file_hash(key: str, path: str) -> str:
    try:
        return sha256(Path(path).expanduser())
    except OSError as error:
        raise InputError(f"{key}: expected a file, got {path!r}, which cannot be read; set {key}=FILE") from error


def needs_importance(allocator: DictConfig) -> bool:
    """Whether an allocator looks at the perplexities of ablations."""
    return "importance" in get_class(allocator._target_).needs


def needs_sensitivity(allocator: DictConfig) -> bool:
    """Whether an allocator is built on a measured sensitivity."""
    return "sensitivity" in get_class(allocator._target_).needs


def needs_bank(estimator: DictConfig) -> bool:
    """Whether an estimator is built on a bank of graphs."""
    return "bank" in get_class(estimator._target_).needs


def needs_grid(estimator: DictConfig) -> bool:
    """Whether an estimator quantises by a profile's static scales without a graph."""
    return "grid" in get_class(estimator._target_).needs


def on_device(method: MethodConfig) -> bool:
    """Whether a method's keys are selected by the graphs themselves."""
    return method.selection.place == "device"


def rule_options(selection: SelectionConfig) -> dict[str, Any]:
    """What of a selection is `online.selection.Rule`; the rest says where it is made."""
    return {key.name: selection[key.name] for key in fields(Rule)}


def part_name(part: Any) -> str:
    """What a swappable part is called in rows: the file that it is in."""
    return part._target_.rsplit(".", 2)[-2]


def _questions(config: DictConfig, loaded: LoadedModel, corpus: Corpus, shape: ModelShape) -> tuple[Question, ...]:
    if "_target_" not in config.task:
        return ()
    questions = tuple(instantiate(config.task).questions(loaded.tokenizer, corpus.heldout))
    longest = max(question.tokens for question in questions)
    if longest > shape.context_tokens:
        raise InputError(
            f"task: the model's context is {shape.context_tokens} tokens, got a prompt of {longest}; make it shorter"
        )
    return questions


def _main_method(config: DictConfig) -> DictConfig:
    return OmegaConf.create({key: config[key] for key in ("estimator", "allocator", "selection")})


def _check_fixed_budgets(methods: dict, retentions: list[float], shape: ModelShape) -> None:
    """Budgets that nothing measured goes into are drawn up once, so that a file that does not fit is refused now."""
    for allocator in (method.allocator for method in methods.values()):
        if not needs_importance(allocator) and not needs_sensitivity(allocator):
            for retention in retentions:
                table = [[1.0] * shape.heads] * shape.layers
                instantiate(allocator).allocate(table, [1.0] * shape.layers, base_ppl=1.0, retention=retention)


def _check_place(name: str, method: MethodConfig) -> None:
    selection = method.selection
    check_choices(f"{name}: selection", selection, {"place": ("host", "device")})
    if not on_device(method):
        if selection.key_block != 1:
            raise InputError(f"{name}: selection.key_block={selection.key_block} needs selection.place=device")
        return
    if not needs_bank(method.estimator):
        raise InputError(
            f"{name}: selection.place=device: expected estimator=int8, whose graphs select, got {part_name(method.estimator)}"
        )
    Int8Device.check(Rule(**rule_options(selection)))
    if selection.key_block < 1:
        raise InputError(f"{name}: selection.key_block: expected at least 1, got {selection.key_block}")


def check_choices(group: str, settings: Any, choices: dict[str, tuple]) -> None:
    for name, known in choices.items():
        if settings[name] not in known:
            listed = ", ".join(str(value or "null") for value in known)
            raise InputError(f"{group}.{name}: expected one of {listed}, got {settings[name]!r}")


def _check_importance(importance: ImportanceConfig) -> None:
    choices = {
        "ablation": tuple(ABLATIONS),
        "method": ("exact", "plain", "racing"),
        "lines": ("document", "artifact"),
        "weighting": ("windows", "batches"),
        "dtype": (None, *DTYPES),
        "linear": LINEARS,
    }
    check_choices("importance", importance, choices)
    Race(**importance.race)
    if importance.method == "racing" and importance.weighting == "batches":
        raise InputError("importance.weighting: expected windows with method=racing, which stops in the middle of batches")


def _check_pipeline(pipeline: Pipeline, methods: dict, study: str) -> None:
    if study in ("latency_profile", "fig9", "validate_simulator") and pipeline.mode not in ("overlap", "fused"):
        raise InputError(f"pipeline: {study} measures stages that overlap, got {pipeline.mode}; use pipeline=fused")
    for name, method in methods.items():
        if study == "validate_simulator" and (on_device(method) or not needs_bank(method.estimator)):
            given = f"{part_name(method.estimator)} with selection.place={method.selection.place}"
            raise InputError(f"validate_simulator: expected estimator=int8 with selection.place=host, got {given}")
        estimator = get_class(method.estimator._target_)
        selects = on_device(method) or estimator.selects
        if pipeline.mode in ("fused", "planned") and selects:
            raise InputError(
                f"pipeline={pipeline.mode}: {name} selects while it estimates, so that there are no scores to launch "
                "for; use pipeline=batched, off or overlap"
            )
        if pipeline.mode == "planned":
            pipeline.profile.check({"estimator": estimator.__name__})


def _check(config: DictConfig, methods: dict, retentions: list[float]) -> None:
    if not config.latency.retentions:
        raise InputError("latency.retentions: expected at least one value in (0, 1], got none")
    if not config.scheduling.limit_s > 0:
        raise InputError(f"scheduling.limit_s: expected a time above 0 s, got {config.scheduling.limit_s:g}")
    if "dense" in methods:
        raise InputError("method: 'dense' is the baseline's name and always runs; call the method something else")
    counts = {
        "evaluation.windows": config.evaluation.windows,
        "graphs.chunk_tokens": config.graphs.chunk_tokens,
        "graphs.calibration_windows": config.graphs.calibration_windows,
        "graphs.limit": config.graphs.limit,
        "graphs.top_k_buckets": config.graphs.top_k_buckets,
        "graphs.compile_threads": 1 if config.graphs.compile_threads is None else config.graphs.compile_threads,
        "importance.windows": config.importance.windows or 1,
        "importance.window_tokens": config.importance.window_tokens - 1,
        "importance.batch": config.importance.batch,
        "latency.repeats": config.latency.repeats,
        "scheduling.works": config.scheduling.works,
        "simulation.chunk_tokens": config.simulation.chunk_tokens,
        "evaluation.context_tokens": 1 if config.evaluation.context_tokens is None else config.evaluation.context_tokens - 1,
    }
    for name, count in counts.items():
        if count < 1:
            least = 2 if name.endswith("_tokens") and "chunk" not in name else 1
            raise InputError(f"{name}: expected at least {least}, got {config[name.split('.')[0]][name.split('.')[1]]}")
    for part in [*(method.allocator for method in methods.values()), config.calibration, config.grid]:
        instantiate(part)
    if config.study == "simulation":
        load_device(config.simulation.device)
    sensitivity_grid(config.sensitivity.retentions)
    shard([], config.shard.index, config.shard.count)
    _check_importance(config.importance)
    check_choices("graphs", config.graphs, {"inputs": INPUTS, "output": OUTPUTS, "lookup": DISTANCES, "shapes": POLICIES})
    launch_sizes(config.graphs.launch_heads, heads=1, kv_heads=1)
    check_dense_above(config.dense_above)
    _check_pipeline(make_pipeline(config), methods, config.study)
    if config.decode not in DECODES:
        raise InputError(f"decode: expected one of {', '.join(DECODES)}, got {config.decode!r}")
    if config.decode == "shared" and any(map(on_device, methods.values())):
        raise InputError("decode=shared: ranks keys by scores, and graphs that select return none; use decode=dense")
    for name, method in methods.items():
        if needs_grid(method.estimator):  # the native estimate, whatever the attention kernel
            native.require()
        block = method.selection.query_block
        Rule(**rule_options(method.selection))
        _check_place(name, method)
        if config.graphs.chunk_tokens % block:
            raise InputError(
                f"{name}: expected graphs.chunk_tokens to be a multiple of query_block={block}, so that no block straddles "
                f"two chunks, got {config.graphs.chunk_tokens}"
            )
