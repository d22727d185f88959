"""The offline and the graph stage of a run: each is done once for its inputs, kept, and found again."""

from dataclasses import asdict, dataclass
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.progress import bar, say
from experiments.setup import Setup, part_name
from shadowattn.artifacts import Stage, content_hash
from shadowattn.graphs.bank import MANIFEST, GraphBank
from shadowattn.graphs.buckets import plan_shapes
from shadowattn.offline import ScaleObservations, measure_importance, observe_scales, scale_grid
from shadowattn.types import Importance, RetentionProfile, ScaleGrid


@dataclass(frozen=True)
class Offline:
    """What calibration found out, and the stages it is stored in."""

    importance: Importance
    observations: ScaleObservations
    grid: ScaleGrid
    stages: tuple[str, ...]


def run_offline(setup: Setup) -> Offline:
    """Importance by ablation, and observed scales."""
    importance, importance_stage = _importance(setup)
    observations, scales_stage = _scales(setup)
    grid = scale_grid(observations, tuple(setup.config.graphs.multipliers))
    return Offline(importance, observations, grid, (importance_stage.folder.name, scales_stage.folder.name))


def make_profile(setup: Setup, offline: Offline, allocator, retention: float) -> RetentionProfile:
    """The retention of every head by one allocator."""
    importance = offline.importance
    allocated = instantiate(allocator).allocate(
        importance.head_ppl, importance.layer_ppl, base_ppl=importance.base_ppl, retention=retention
    )
    return RetentionProfile(
        retention=tuple(tuple(layer) for layer in allocated),
        scales=offline.grid,
        head_dim=setup.shape.head_dim,
        fingerprint=setup.loaded.fingerprint,
        model=setup.loaded.name,
        allocator=part_name(allocator),
    )


def build_bank(setup: Setup, offline: Offline) -> tuple[GraphBank, str]:
    """The compiled bank for this model, context and grid, and the name of its folder."""
    graphs = setup.config.graphs
    shapes = plan_shapes(
        heads=setup.shape.heads,
        head_dim=setup.shape.head_dim,
        chunk_tokens=graphs.chunk_tokens,
        context_tokens=setup.longest_tokens,
        launch_heads=tuple(graphs.launch_heads),
    )
    inputs = {"shapes": [asdict(shape) for shape in shapes], "grid": asdict(offline.grid)}
    folder = _root(setup) / f"bank-{content_hash(inputs)}"
    if not (folder / MANIFEST).exists():
        profile = make_profile(setup, offline, OmegaConf.create({"_target_": UNIFORM}), 1.0)
        GraphBank.build(profile, shapes, device=setup.device.name).save(folder)
    bank = GraphBank.load(folder, device=setup.device.name)
    say(f"graphs: {len(bank)} static INT8 Q·K graphs on {setup.device.name} ({setup.device.reason})")
    bank.compile(progress=lambda graphs: bar(graphs, "compile"))
    return bank, folder.name


UNIFORM = "shadowattn.offline.allocators.uniform.Uniform"


def _importance(setup: Setup) -> tuple[Importance, Stage]:
    settings = setup.config.importance
    stage = Stage(_root(setup), "importance", _inputs(setup) | OmegaConf.to_container(settings))
    if not stage.done:
        shape = setup.shape
        say(f"importance: {shape.layers * shape.heads} heads and {shape.layers} layers, one ablation each")
        windows = setup.calibration(tokens=settings.window_tokens, windows=settings.windows)
        measured = measure_importance(
            setup.loaded.model,
            windows,
            stage.units,
            ablation=settings.ablation,
            batch=settings.batch,
            progress=lambda work: bar(work, "ablate"),
        )
        stage.finish(asdict(measured))
    content = stage.read()
    content["head_ppl"] = tuple(tuple(layer) for layer in content["head_ppl"])
    content["layer_ppl"] = tuple(content["layer_ppl"])
    return Importance(**content), stage


def _scales(setup: Setup) -> tuple[ScaleObservations, Stage]:
    graphs = setup.config.graphs
    own = {
        "chunk_tokens": graphs.chunk_tokens,
        "context_tokens": setup.context_tokens,
        "windows": graphs.calibration_windows,
    }
    stage = Stage(_root(setup), "scales", _inputs(setup) | own)
    if not stage.done:
        say(f"scales: Q and K of {setup.shape.layers * setup.shape.heads} heads")
        windows = setup.calibration(tokens=setup.context_tokens, windows=graphs.calibration_windows)
        observations = observe_scales(
            setup.loaded.model, windows, chunk_tokens=graphs.chunk_tokens, progress=lambda w: bar(w, "calibrate")
        )
        stage.finish(asdict(observations))
    return ScaleObservations(tuple((layer, head, q, k) for layer, head, q, k in stage.read()["pairs"])), stage


def _inputs(setup: Setup) -> dict:
    return {
        "model": setup.loaded.fingerprint,
        "dtype": setup.config.model.dtype,
        "corpus": setup.corpus.sha256,
        "seed": setup.config.seed,
    }


def _root(setup: Setup) -> Path:
    return Path(setup.config.paths.results) / "artifacts"
