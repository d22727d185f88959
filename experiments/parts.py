"""The schemas of parts that can be swapped: one dataclass for each YAML of a group, with the class that it builds."""

from dataclasses import dataclass, field


@dataclass
class Bundled:
    _target_: str = "shadowattn.models.load_bundled"
    dtype: str = "float32"


@dataclass
class Local:
    _target_: str = "shadowattn.models.load_local"
    path: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False


@dataclass
class SmolLM2:
    _target_: str = "shadowattn.models.load_smollm2"
    dtype: str = "float32"


@dataclass
class Hub:
    _target_: str = "shadowattn.models.load_hub"
    id: str | None = None
    revision: str | None = None
    dtype: str = "float32"
    trust_remote_code: bool = False


@dataclass
class RandomModel:
    _target_: str = "shadowattn.models.load_random"
    shape: str = "qwen2_0_5b"
    layers: int | None = None  # fewer than published; so are the next two
    hidden: int | None = None
    vocabulary: int | None = None
    dtype: str = "float32"


@dataclass
class StdlibData:
    _target_: str = "shadowattn.data.text.stdlib_corpus"


@dataclass
class TextData:
    _target_: str = "shadowattn.data.text.text_corpus"
    path: str | None = None
    pattern: str = "*.txt"
    heldout: str | None = None  # another text to measure on; all of `path` then calibrates


@dataclass
class HubData:
    _target_: str = "shadowattn.data.text.hub_corpus"
    id: str | None = None
    name: str | None = None
    split: str = "validation"
    column: str = "text"
    files: str | None = None


@dataclass
class UniformAllocator:
    _target_: str = "shadowattn.offline.allocators.uniform.Uniform"


@dataclass
class PaperAllocator:
    _target_: str = "shadowattn.offline.allocators.paper.Paper"
    clamp: float = 1e-3
    metric: str = "loss"


@dataclass
class ArtifactAllocator:
    _target_: str = "shadowattn.offline.allocators.artifact.Artifact"
    clamp: float = 102400.0


@dataclass
class WaterfillAllocator:
    _target_: str = "shadowattn.offline.allocators.waterfill.Waterfill"
    floor: float = 0.25


@dataclass
class FirstLayersDenseAllocator:
    _target_: str = "shadowattn.offline.allocators.first_layers_dense.FirstLayersDense"
    layers: int = 2
    floor: float = 0.25


@dataclass
class ErrorGreedyAllocator:
    _target_: str = "shadowattn.offline.allocators.error_greedy.ErrorGreedy"
    measure: str = "error"


@dataclass
class FileAllocator:
    _target_: str = "shadowattn.offline.allocators.file.File"
    path: str | None = None


@dataclass
class AbsmaxCalibration:
    _target_: str = "shadowattn.offline.calibrations.absmax.Absmax"


@dataclass
class PercentileCalibration:
    _target_: str = "shadowattn.offline.calibrations.percentile.Percentile"
    share: float = 0.999


@dataclass
class MseCalibration:
    _target_: str = "shadowattn.offline.calibrations.mse.MeanSquaredError"
    steps: int = 20
    least: float = 0.2


@dataclass
class MeanGrid:
    _target_: str = "shadowattn.offline.grids.mean.Mean"
    sigma: float = 0.5
    steps: int = 1
    pattern: str = "product"


@dataclass
class QuantileGrid:
    _target_: str = "shadowattn.offline.grids.quantile.Quantile"
    quantiles: list[float] = field(default_factory=lambda: [0.25, 0.75, 1.0])


@dataclass
class Int8Estimator:
    _target_: str = "shadowattn.online.estimators.int8.Int8"


@dataclass
class OracleEstimator:
    _target_: str = "shadowattn.online.estimators.oracle.Oracle"


@dataclass
class StreamingEstimator:
    _target_: str = "shadowattn.online.estimators.streaming.Streaming"
    sinks: int = 4


@dataclass
class RandomEstimator:
    _target_: str = "shadowattn.online.estimators.random.Random"
    seed: int = 0


@dataclass
class Int8FusedEstimator:
    _target_: str = "shadowattn.online.estimators.int8_fused.Int8Fused"


@dataclass
class SequentialScheduler:
    _target_: str = "shadowattn.online.schedulers.sequential.Sequential"


@dataclass
class FifoScheduler:
    _target_: str = "shadowattn.online.schedulers.fifo.Fifo"


@dataclass
class GreedyScheduler:
    _target_: str = "shadowattn.online.schedulers.greedy.Greedy"


@dataclass
class GreedyGuardedScheduler:
    _target_: str = "shadowattn.online.schedulers.greedy_guarded.GreedyGuarded"
    machines: int = 3


@dataclass
class JohnsonScheduler:
    _target_: str = "shadowattn.online.schedulers.johnson.Johnson"


@dataclass
class LocalSearchScheduler:
    _target_: str = "shadowattn.online.schedulers.local_search.LocalSearch"
    machines: int = 3
    limit_us: float = 700.0


@dataclass
class OptimalScheduler:
    _target_: str = "shadowattn.online.schedulers.optimal.Optimal"
    machines: int = 3
    limit_s: float = 10.0
    workers: int = 8


@dataclass
class TextTask:
    """No questions: perplexity and fidelity are measured in any case."""


@dataclass
class RetrievalKVTask:
    _target_: str = "shadowattn.evaluation.tasks.RetrievalKV"
    documents: int = 50
    pairs: int = 40
    seed: int = 0
    fewer: int = 0


@dataclass
class NeedleTask:
    _target_: str = "shadowattn.evaluation.tasks.Needle"
    documents: int = 20
    tokens: int = 1024
    depths: list[float] = field(default_factory=lambda: [0.0, 0.25, 0.5, 0.75, 1.0])
    seed: int = 0
