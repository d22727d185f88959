"""The schema of every configuration: names and types, so that a misspelt key or a wrong type is an error.

Values live in `conf/`; a YAML of a group names its schema first in its defaults.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import II, MISSING

from experiments import parts


@dataclass
class RaceConfig:
    """When `method: racing` stops an ablation; see `shadowattn.offline.racing`."""

    first: int = 48
    z: float = 3.0
    tolerance: float = 0.08
    overlap: float = 0.2
    seed: int = 0


@dataclass
class ImportanceConfig:
    """`method` exact, plain or racing; `windows` 0 for all there are; `lines` document, or artifact for its handling of lines;
    `weighting` windows, or batches for equal weight of each batch; `dtype` null for the model's own; `linear` auto, onednn or
    torch; `activation_scales` a JSON for W8A8 fake quantisation, or `observe` to take them from the windows."""

    ablation: str = MISSING
    method: str = "exact"
    window_tokens: int = 128
    windows: int = 32
    batch: int = 8
    lines: str = "document"
    weighting: str = "windows"
    dtype: str | None = None
    linear: str = "auto"
    activation_scales: str | None = None
    clip_threshold: float = 64.0
    race: RaceConfig = field(default_factory=RaceConfig)


@dataclass
class ShardConfig:
    """Which part of the ablations this process measures; all parts end in the same files, so none of it is in a hash."""

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
class SelectionConfig:
    """`place` host or device, where whole blocks of `key_block` keys can be chosen. The rest is `online.selection.Rule`."""

    query_block: int = 1
    block_score: str = "first_row"
    sinks: int = 0
    recent: int = 0
    place: str = "host"
    key_block: int = 1


@dataclass
class PipelineConfig:
    """`mode` as in `shadowattn.online.pipeline.Pipeline`; threads null: all where one stage runs at a time, else a share each.

    `profile` is what `+exp=latency_profile` leaves, for `planned`.
    """

    mode: str = "batched"
    queue_heads: int = 2
    estimate_threads: int | None = None
    select_threads: int | None = None
    attend_threads: int | None = None
    profile: str | None = None


@dataclass
class LatencyConfig:
    """What `+exp=latency_profile` measures: up to the run's longest prompt, at these retentions, so often."""

    retentions: list[float] = field(default_factory=lambda: [0.05, 0.1, 0.2, 0.4, 0.7, 1.0])
    repeats: int = 25


@dataclass
class MethodConfig:
    """What makes up a method. The groups of the same names fill it in."""

    estimator: Any = MISSING
    allocator: Any = MISSING
    selection: SelectionConfig = II("selection")  # as the main method, so that a comparison differs in one thing


@dataclass
class GraphsConfig:
    """What the bank is built of.

    `chunk_tokens` rows a graph; `launch_heads` how many heads may share a launch, `fold` those of one key head, which is then
    passed once. `inputs` static, unit or runtime; `output` float, target_requant or fixed_output; `lookup` raw or log.
    `shapes` planned, powers, multiples or single, with at most `limit` graphs: a launch size, a length and a bucket each.
    `top_k_buckets`: how many k there are, for graphs that select. `compile_threads` null for all cores.
    """

    chunk_tokens: int = 128
    launch_heads: list[int] = field(default_factory=lambda: [1, 2, 4])
    fold: bool = True
    inputs: str = "static"
    output: str = "float"
    lookup: str = "raw"
    shapes: str = "planned"
    limit: int = 108
    top_k_buckets: int = 4
    compile_threads: int | None = None
    calibration_windows: int = 4


@dataclass
class EvaluationConfig:
    """`context_tokens` null: 1024, or the model's context where that is shorter. Fidelity is measured on the first windows."""

    context_tokens: int | None = None
    windows: int = 8
    fidelity_windows: int = 2


@dataclass
class SchedulingConfig:
    """What the study of schedulers draws: `works` of each kind, the optimum searched for `limit_s` seconds each."""

    works: int = 12
    limit_s: float = 5.0


@dataclass
class SimulationConfig:
    """`figure` fig10, fig15, table8, scale or parameters; `device` a shipped description or a .yaml file of your own."""

    figure: str = "fig10"
    device: str = "snapdragon_8_gen_3"
    chunk_tokens: int = 128


@dataclass
class EstimateConfig:
    """One way to estimate.

    `dynamic`: scales of the tensors themselves, else a grid of mean × σ^±steps, see `types.ScaleGrid`. `output` float,
    target_requant or fixed_output. `nncf`: the graph that NNCF makes, whatever else is set. `quality`: measure the loss of the
    whole model with it, too.
    """

    dynamic: bool = False
    sigma: float = 0.5
    steps: int = 1
    pattern: str = "product"
    lookup: str = "raw"
    bits: int = 8
    smooth: bool = False
    output: str = "float"
    nncf: bool = False
    quality: bool = False


@dataclass
class RecallConfig:
    """What the study of recall compares, and at which retentions.

    The loss of estimates with `quality` is measured on `quality_windows` windows, and compared with that of `reference`, one of
    them; null: the first.
    """

    quality_windows: int = 16
    reference: str | None = None
    retentions: list[float] = field(default_factory=lambda: [0.2, 0.3, 0.4, 0.5, 0.8])
    estimates: dict[str, EstimateConfig] = field(default_factory=dict)


@dataclass
class Paths:
    """Where things go on this machine; never part of a config hash."""

    results: str = "results"


@dataclass
class Config:
    experiment: str = "default"
    # quality: methods against retention; gates: the reference model's bars; offline: that stage alone; allocators; query_block;
    # latency_profile, fig9, schedulers, simulation: the pipeline; graphs, recall, selfcheck: the estimate
    study: str = "quality"
    seed: int = 0
    retention: float = 0.2
    retentions: list[float] = field(default_factory=list)  # several in one run; empty: `retention` alone
    method: str = "shadowattn"  # what the method put together from the groups below is called in rows
    compare: dict[str, MethodConfig] = field(default_factory=dict)  # further methods, by name; dense always runs
    model: Any = MISSING
    data: Any = MISSING
    importance: ImportanceConfig = MISSING
    allocator: Any = MISSING
    sensitivity: SensitivityConfig = field(default_factory=SensitivityConfig)
    calibration: Any = MISSING
    grid: Any = MISSING
    estimator: Any = MISSING
    selection: SelectionConfig = field(default_factory=SelectionConfig)
    task: Any = MISSING
    graphs: GraphsConfig = field(default_factory=GraphsConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    recall: RecallConfig = field(default_factory=RecallConfig)
    scheduling: SchedulingConfig = field(default_factory=SchedulingConfig)
    simulation: SimulationConfig = field(default_factory=SimulationConfig)
    device: str = "auto"
    kernel: str = "auto"  # auto, native, torch
    dense_above: Any = 1.0  # heads that keep this share or more go dense; 1: those that keep all; auto: the break-even
    decode: str = "dense"  # dense, shared
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    scheduler: Any = MISSING  # who plans where pipeline=planned
    latency: LatencyConfig = field(default_factory=LatencyConfig)
    threads: int | None = None
    shard: ShardConfig = field(default_factory=ShardConfig)
    reuse: str = "same"  # results made before: same, those of the code that is here; any, of whatever code, and say so
    paths: Paths = field(default_factory=Paths)


# The schemas of the parts of each group, by name.
PARTS = {
    "model": {
        "bundled": parts.Bundled,
        "local": parts.Local,
        "smollm2": parts.SmolLM2,
        "hub": parts.Hub,
        "random": parts.RandomModel,
    },
    "data": {"stdlib": parts.StdlibData, "text": parts.TextData, "hub": parts.HubData},
    "importance": {"base": ImportanceConfig},
    "allocator": {
        "uniform": parts.UniformAllocator,
        "paper": parts.PaperAllocator,
        "artifact": parts.ArtifactAllocator,
        "waterfill": parts.WaterfillAllocator,
        "first_layers_dense": parts.FirstLayersDenseAllocator,
        "error_greedy": parts.ErrorGreedyAllocator,
        "file": parts.FileAllocator,
    },
    "calibration": {"absmax": parts.AbsmaxCalibration, "percentile": parts.PercentileCalibration, "mse": parts.MseCalibration},
    "grid": {"mean": parts.MeanGrid, "quantile": parts.QuantileGrid},
    "estimator": {
        "int8": parts.Int8Estimator,
        "int8_fused": parts.Int8FusedEstimator,
        "oracle": parts.OracleEstimator,
        "streaming": parts.StreamingEstimator,
        "random": parts.RandomEstimator,
    },
    "selection": {"base": SelectionConfig},
    "pipeline": {"base": PipelineConfig},
    "scheduler": {
        "sequential": parts.SequentialScheduler,
        "fifo": parts.FifoScheduler,
        "greedy": parts.GreedyScheduler,
        "greedy_guarded": parts.GreedyGuardedScheduler,
        "johnson": parts.JohnsonScheduler,
        "local_search": parts.LocalSearchScheduler,
        "optimal": parts.OptimalScheduler,
    },
    "task": {"text": parts.TextTask, "retrieval_kv": parts.RetrievalKVTask, "needle": parts.NeedleTask},
}


def register() -> None:
    """Puts every schema where the YAML files look for it: `schema` for the whole, `schema/GROUP/NAME` for the parts."""
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    for group, schemas in PARTS.items():
        for name, node in schemas.items():
            store.store(group=f"schema/{group}", name=name, node=node)
