"""The schema of the configuration that studies share: names and types, so that a misspelt key or a wrong type is an error.

Values live in `conf/`. What a part, a study or a group takes is told by its class alone (`part_settings`); what belongs to no
class of the library is written here.
"""

from dataclasses import dataclass, field, fields, make_dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import II, MISSING

from experiments.part_settings import schema_of

# When `method: racing` stops an ablation.
Race = schema_of("shadowattn.offline.racing.Race")
# Which keys a list ranks, and by which scores.
Rule = schema_of("shadowattn.online.selection.Rule")
# How the heads of a chunk go through the stages, without what a run builds.
Pipeline = schema_of("shadowattn.online.pipeline.Pipeline")


@dataclass
class ImportanceConfig:
    """`method` shared, plain or racing; `windows` 0 for all there are; `lines` document, or artifact for its handling of lines;
    `weighting` windows, or batches for equal weight of each batch; `dtype` null for the model's own; `linear` auto, onednn or
    torch; `activation_scales` a JSON for W8A8 fake quantisation, or `observe` to take them from the windows."""

    ablation: str = MISSING
    method: str = "shared"
    window_tokens: int = 128
    windows: int = 32
    batch: int = 8
    lines: str = "document"
    weighting: str = "windows"
    dtype: str | None = None
    linear: str = "auto"
    activation_scales: str | None = None
    clip_threshold: float = 64.0
    race: Race = field(default_factory=Race)


@dataclass
class ShardConfig:
    """Which part of the ablations and of the cells this process measures; all parts end in the same files, so none of it is in a
    hash."""

    index: int = 0
    count: int = 1


@dataclass
class SensitivityConfig:
    """What the allocator error_greedy is measured on. `window_tokens` null: as long as the windows of the evaluation."""

    retentions: list[float] = field(default_factory=lambda: [0.02, 0.05, 0.1, 0.2, 0.3, 0.5])
    window_tokens: int | None = None
    windows: int = 4
    batch: int = 8


@dataclass
class SelectionConfig(Rule):
    """Beside the rule, `place` host or device, where whole blocks of `key_block` keys can be chosen."""

    place: str = "host"
    key_block: int = 1


@dataclass
class PipelineConfig(Pipeline):
    """Beside the modes and `threads`, `profile`: what `+exp=latency_profile` leaves, for `planned`."""

    profile: str | None = None


# As the main method's, each setting by itself: a comparison differs in what is set for one method, and nothing else.
_MainSelection = make_dataclass(
    "MainSelection",
    [(one.name, one.type, field(default=II(f"selection.{one.name}"))) for one in fields(SelectionConfig)],
    bases=(SelectionConfig,),
)


@dataclass
class MethodConfig:
    """What makes up a method. The groups of the same names fill it in."""

    estimator: Any = MISSING
    allocator: Any = MISSING
    selection: _MainSelection = field(default_factory=_MainSelection)


@dataclass
class GraphsConfig:
    """What the bank is built of.

    `chunk_tokens` rows a graph; `launch_heads` how many heads may share a launch, `fold` those of one key head, which is then
    passed once. `inputs` static, unit, runtime or int8, or auto: int8 on an NPU, static elsewhere; `output` float,
    target_requant or fixed_output; `lookup` raw or log.
    `shapes` planned, powers, multiples or single, with at most `limit` graphs: a launch size, a length and a bucket each.
    `top_k_buckets`: how many k there are, for graphs that select. `compile_threads` null for all cores.
    `nncf_samples`: of the calibration text, for `estimator=nncf`. `ahead`: a folder of banks that `experiments.npu_bank` compiled
    for this machine's NPU, whose blobs are imported; null: the device's own driver compiles.
    """

    chunk_tokens: int = 128
    launch_heads: list[int] = field(default_factory=lambda: [1, 2, 4])
    fold: bool = True
    inputs: str = "auto"
    output: str = "float"
    lookup: str = "raw"
    shapes: str = "planned"
    limit: int = 108
    top_k_buckets: int = 4
    compile_threads: int | None = None
    calibration_windows: int = 4
    nncf_samples: int = 64
    ahead: str | None = None


@dataclass
class EngineConfig:
    """How the engine runs a model: see `shadowattn.Engine` and `graphs.decoder.BlockForm`.

    Ranges of activations come from `calibration_windows` windows of `calibration_tokens` of the calibration text. `look_ahead`:
    the first layer whose lists are made by what enters the layer before; null: none's.
    """

    precision: str = "float32"
    weights: str = "inputs"
    group: int = 64
    smooth: float = 0.0
    floats: list[str] = field(default_factory=list)
    head: str = "model"
    chunk_tokens: int = 256
    attention_dtype: str = "float32"
    look_ahead: int | None = None
    calibration_windows: int = 4
    calibration_tokens: int = 1024


@dataclass
class EvaluationConfig:
    """`context_tokens` null: 1024, or the model's context where that is shorter. Fidelity is measured on the first windows,
    `fidelity_windows` of them. `divergence_windows`: on how many of the first the next-token distribution is held to dense
    attention's, and methods are compared by that too; null: on those of `fidelity_windows`, and methods are compared by loss
    alone; in a study of recall, on none. `generated_tokens`: of a window of `fidelity_windows`, how many at its
    end greedy decoding replaces, to see where it diverges; 0: none."""

    context_tokens: int | None = None
    windows: int = 8
    fidelity_windows: int = 2
    divergence_windows: int | None = None
    generated_tokens: int = 0


@dataclass
class Paths:
    """Where things go on this machine; never part of a config hash."""

    results: str = "results"


@dataclass
class Config:
    """A study takes its own settings from `study`, and of the rest what it names in its `needs`.

    `key_offset`: what is subtracted from K before the estimate quantises it, `none`, or the `mean` or `midrange` of each channel
    of the calibrated keys (`shadowattn.offline.key_offsets`). A row's own ranking changes by rounding alone. `block_score=max`
    compares scores of different rows, from which the offset takes different constants: its shared lists change. `probability`,
    `sum` and lists of single rows do not depend on a row's constant.
    """

    experiment: str = "default"
    study: Any = MISSING
    seed: int = 0
    retention: float = 0.2
    retentions: list[float] = field(default_factory=list)  # several in one run; empty: `retention` alone
    # What the method put together from the groups below is called in rows; null: `shadowattn` with an INT8 estimator of ours,
    # else as its estimator.
    method: str | None = None
    compare: dict[str, MethodConfig] = field(default_factory=dict)  # further methods, by name; dense always runs
    full: dict[str, Any] = field(default_factory=dict)  # methods that attend to every key, in other arithmetic, by name
    model: Any = MISSING
    data: Any = MISSING
    importance: ImportanceConfig = MISSING
    allocator: Any = MISSING
    sensitivity: SensitivityConfig = field(default_factory=SensitivityConfig)
    calibration: Any = MISSING
    key_offset: str = "none"
    grid: Any = MISSING
    estimator: Any = MISSING
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    task: Any = MISSING
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    prompt: str = ""  # for what generates text
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    device: str = "auto"
    kernel: str = "auto"  # auto, native, torch
    dense_above: Any = 1.0  # heads that keep this share or more go dense; 1: those that keep all; auto: the break-even
    decode: str = "dense"  # dense, shared
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    scheduler: Any = MISSING  # who plans where pipeline=planned
    threads: int | None = None
    shard: ShardConfig = field(default_factory=ShardConfig)
    reuse: str = "same"  # results made before: same, those of the code that is here; any, of whatever code, and say so
    paths: Paths = field(default_factory=Paths)


# What every run has. A study need not name it; what it does name, such as the threads of a timing, is in its hash.
ALWAYS = ("experiment", "study", "threads", "shard", "reuse", "paths")
# Settings that are a part, named by `_target_`, with settings of its own.
PARTS = tuple(one.name for one in fields(Config) if one.type is Any and one.name != "dense_above")


def register() -> None:
    """Puts the schema where `conf/config.yaml` looks for it."""
    ConfigStore.instance().store(name="schema", node=Config)
