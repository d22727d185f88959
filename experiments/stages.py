"""The offline and the graph stage of a run: each is done once for its inputs, kept, and found again."""

import copy
import math
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from filelock import FileLock
from hydra.utils import instantiate
from omegaconf import OmegaConf

from experiments.config import SelectionConfig
from experiments.progress import bar, say, work_bar
from experiments.setup import (
    OBSERVE,
    Setup,
    by_content,
    make_pipeline,
    needs_bank,
    needs_importance,
    needs_sensitivity,
    part_name,
    rule_options,
)
from experiments.source import stage_code
from shadowattn.artifacts import Stage, content_hash, sha256, write_text
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.planner import (
    ShapePlan,
    best_capacities,
    chunk_lengths,
    launch_sizes,
    plan_capacities,
    plan_shapes,
    with_top_k,
)
from shadowattn.graphs.storage import MANIFEST
from shadowattn.kernels import choose
from shadowattn.models.load import DTYPES
from shadowattn.offline import (
    Race,
    ScaleObservations,
    measure_ablations,
    measure_sensitivity,
    observe_scales,
    race_ablations,
    scale_grid,
    summarise,
)
from shadowattn.offline.allocators import allot
from shadowattn.offline.fake_quant import (
    fake_quantised,
    load_activation_scales,
    observe_activations,
    save_activation_scales,
)
from shadowattn.offline.outputs import OutputObservations, observe_outputs
from shadowattn.online.executor import ScorePool
from shadowattn.online.latency import SCHEMA_VERSION, Latency, LatencyProfile
from shadowattn.online.pipeline import Pipeline
from shadowattn.online.probe import Probe
from shadowattn.online.selection import Rule
from shadowattn.threads import thread_budget
from shadowattn.types import AblationLosses, Importance, Requant, RetentionProfile, ScaleGrid, Sensitivity


@dataclass(frozen=True)
class Offline:
    """What calibration found out, and the stages it is stored in. What no allocator of the run looks at is not measured."""

    losses: AblationLosses | None
    importance: Importance | None
    sensitivities: dict[str, Sensitivity]  # by measure
    observations: ScaleObservations
    grid: ScaleGrid
    stages: tuple[str, ...]


class ShardDoneError(Exception):
    """This shard has measured its share, and other shards have not: there is nothing to go on with yet."""


def run_offline(setup: Setup) -> Offline:
    """Importance by ablation, sensitivities, and observed scales. Raises `ShardDoneError` where other shards' work is missing."""
    allocators = [method.allocator for method in setup.methods.values()]
    losses, importance, stages = None, None, []
    if setup.config.study in ("gates", "offline") or any(map(needs_importance, allocators)):
        losses, stage = _importance(setup)
        importance = summarise(losses, batch=_weighting(setup))
        stages.append(stage)
    sensitivities = {}
    for measure in sorted({allocator.measure for allocator in allocators if needs_sensitivity(allocator)}):
        sensitivities[measure], stage = _sensitivity(setup, measure)
        stages.append(stage)
    observations, stage = _scales(setup)
    grid = scale_grid(observations, instantiate(setup.config.grid))
    names = tuple(stage.folder.name for stage in [*stages, stage])
    return Offline(losses, importance, sensitivities, observations, grid, names)


def make_profile(setup: Setup, offline: Offline, allocator, retention: float) -> RetentionProfile:
    """The retention of every head by one allocator."""
    built = {"sensitivity": offline.sensitivities[allocator.measure]} if needs_sensitivity(allocator) else {}
    table = allot(replace(instantiate(allocator), **built), setup.shape, retention, offline.importance)
    return RetentionProfile(
        retention=tuple(map(tuple, table)),
        scales=offline.grid,
        head_dim=setup.shape.head_dim,
        fingerprint=setup.loaded.fingerprint,
        model=setup.loaded.name,
        allocator=part_name(allocator),
    )


def build_bank(setup: Setup, offline: Offline) -> tuple[GraphBank, str]:
    """The compiled bank for this model, lengths and grid, and the name of its folder."""
    form = graph_form(setup, offline)
    shapes, plan = graph_shapes(setup, form, pairs=len(offline.grid.pairs))
    return _bank(setup, offline, form, shapes, plan)


def device_bank(setup: Setup, offline: Offline, profile: RetentionProfile, selection: SelectionConfig) -> GraphBank:
    """The bank whose graphs select for one profile: static k in a few sizes, for heads of different retention."""
    pool = (selection.query_block, selection.key_block)
    form = replace(graph_form(setup, offline), mask=True, pool=pool, indices=True)
    counts = Counter(round(value * _SHARES) for layer in profile.retention for value in layer if value < 1)
    counts = counts or Counter({_SHARES: 1})  # every head is dense: the graphs are built, and never run
    buckets = best_capacities(counts, max(counts), setup.config.graphs.top_k_buckets)
    pairs = len(offline.grid.pairs) * len(buckets)
    shapes, plan = graph_shapes(setup, form, pairs=pairs, step=math.lcm(*pool))
    shapes = with_top_k(shapes, [min(1.0, (bucket + 0.5) / _SHARES) for bucket in buckets], key_block=selection.key_block)
    return _bank(setup, offline, form, shapes, plan)[0]


def graph_form(setup: Setup, offline: Offline) -> GraphForm:
    """The form that the configuration asks for."""
    graphs = setup.config.graphs
    requant = None if graphs.output == "float" else output_requant(setup, offline.grid, graphs.output, graphs.lookup)
    return GraphForm(graphs.inputs, requant)


def output_requant(setup: Setup, grid: ScaleGrid, mode: str, distance: str) -> Requant:
    """How products become INT8 scores with a grid; observed once on calibration text."""
    graphs = setup.config.graphs
    own = {
        "chunk_tokens": graphs.chunk_tokens,
        "context_tokens": setup.context_tokens,
        "windows": graphs.calibration_windows,
        "pairs": grid.pairs,
        "lookup": distance,
    }
    stage = _stage(setup, "outputs", _inputs(setup) | own)
    if not stage.done:
        say(f"outputs: integer products of {setup.shape.layers * setup.shape.heads} heads")
        observations = observe_outputs(
            setup.loaded.model,
            setup.calibration(tokens=setup.context_tokens, windows=graphs.calibration_windows),
            grid,
            chunk_tokens=graphs.chunk_tokens,
            distance=distance,
            progress=lambda w: bar(w, "observe"),
        )
        stage.finish(asdict(observations))
    return OutputObservations(tuple(tuple(pair) for pair in stage.read()["observed"])).requant(mode)


def graph_shapes(setup: Setup, form: GraphForm, *, pairs: int, step: int = 1) -> tuple[tuple[GraphShape, ...], ShapePlan]:
    """Shapes for the prompts of this run, and their plan. Where scales are built in, each takes `pairs` graphs."""
    graphs, model = setup.config.graphs, setup.shape
    heads = {"heads": model.heads, "kv_heads": model.kv_heads, "launch_heads": tuple(graphs.launch_heads), "fold": graphs.fold}
    sizes = len(launch_sizes(**heads))
    each = sizes * (pairs if form.bakes_scales else 1)
    if graphs.limit < each:
        raise InputError(
            f"graphs.limit: a single shape takes {sizes} × {each // sizes} graphs, launch sizes × buckets, got a limit of "
            f"{graphs.limit}; raise it, or use graphs.inputs=unit, fewer graphs.launch_heads or a smaller grid"
        )
    lengths = chunk_lengths(setup.prompt_tokens, graphs.chunk_tokens)
    plan = plan_capacities(
        lengths, context_tokens=max(setup.prompt_tokens), limit=graphs.limit // each, policy=graphs.shapes, step=step
    )
    return plan_shapes(plan, head_dim=model.head_dim, **heads), plan


def _bank(
    setup: Setup, offline: Offline, form: GraphForm, shapes: tuple[GraphShape, ...], plan: ShapePlan
) -> tuple[GraphBank, str]:
    graphs = setup.config.graphs
    inputs = {"shapes": [asdict(shape) for shape in shapes], "grid": asdict(offline.grid)}
    inputs |= {"form": asdict(form), "lookup": graphs.lookup}
    folder = _root(setup) / f"bank-{content_hash(inputs)}"
    blobs = folder.with_name(f"{folder.name}-compiled")
    _root(setup).mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):  # another run may want the same bank now
        code, built_by = stage_code(), folder.with_suffix(".code")
        if not (folder / MANIFEST).exists() or not built_by.exists() or built_by.read_text() != code:
            built_by.unlink(missing_ok=True)
            shutil.rmtree(blobs, ignore_errors=True)
            profile = make_profile(setup, offline, OmegaConf.create({"_target_": UNIFORM}), 1.0)
            GraphBank.build(profile, shapes, device=setup.device.name, form=form, distance=graphs.lookup).save(folder)
            write_text(built_by, code)
        bank = GraphBank.load(folder, device=setup.device.name)
        say(
            f"graphs: {len(bank)} static INT8 Q·K graphs on {setup.device.label} ({setup.device.reason}), "
            f"{plan.waste:.0%} of their scores padding"
        )
        with thread_budget(make_pipeline(setup.config).budgets(setup.device.name).estimate):
            bank.compile(
                blobs=blobs,
                threads=graphs.compile_threads,
                progress=lambda models: bar(models, "compile", total=len(bank)),
            )
    return bank, folder.name


def latency_probe(setup: Setup, bank: GraphBank | None, pipeline: Pipeline) -> Probe:
    """What measures the main method's parts under the pipeline's thread budgets."""
    method, dtype = setup.methods[setup.config.method], setup.loaded.model.dtype
    estimator = instantiate(method.estimator, **({"bank": bank} if needs_bank(method.estimator) else {}))
    return Probe(
        heads=setup.shape.heads,
        kv_heads=setup.shape.kv_heads,
        head_dim=setup.shape.head_dim,
        rows=min(setup.config.graphs.chunk_tokens, max(setup.prompt_tokens)),
        dtype=dtype,
        estimator=estimator,
        rule=Rule(**rule_options(method.selection)),
        kernels=choose(setup.kernel, head_dim=setup.shape.head_dim, dtype=dtype),
        threads=pipeline.budgets(setup.device.name),
        seed=setup.config.seed,
        pool=None if pipeline.mode == "off" else ScorePool(),
    )


def measure_latency(setup: Setup, bank: GraphBank | None, pipeline: Pipeline) -> tuple[LatencyProfile, Path]:
    """The latency profile of the main method's parts under the pipeline's thread budgets, and the file that it is in."""
    settings, probe = setup.config.latency, latency_probe(setup, bank, pipeline)
    lengths, retentions = probe.key_lengths(max(setup.prompt_tokens)), sorted(settings.retentions)
    bound = probe.binding()
    how = {"keys": lengths, "retentions": retentions, "repeats": settings.repeats, "schema_version": SCHEMA_VERSION}
    # By the compiled kernels, too: they are what is timed.
    stage = Stage(_root(setup), "latency", {"binding": bound} | how, code=setup.code.hash)
    path = stage.folder / "latency_profile.json"
    if not stage.done:
        layouts = len(probe.layouts(retentions, probe.sizes))
        say(f"latency: {layouts} chunks of mixed buckets and {len(retentions)} retentions, up to {lengths[-1]} keys")
        points = []
        for keys in bar(lengths, "measure"):
            measured = stage.units.get(
                str(keys), lambda keys=keys: [asdict(p) for p in probe.measure(keys, retentions, repeats=settings.repeats)]
            )
            points += [Latency(**point) for point in measured]
        LatencyProfile(bound, tuple(points)).save(path)
        stage.finish({"sha256": sha256(path)})
    stage.read()
    return LatencyProfile.load(path), path


# Retentions are counted in steps of this share when k buckets are chosen.
_SHARES = 1000
UNIFORM = "shadowattn.offline.allocators.uniform.Uniform"


def _importance(setup: Setup) -> tuple[AblationLosses, Stage]:
    settings = setup.config.importance
    inputs, parts = _inputs(setup) | by_content(OmegaConf.to_container(settings, resolve=True)), []
    if settings.method == "racing":  # what is settled depends on what the losses are for
        allocator = by_content(OmegaConf.to_container(setup.config.allocator, resolve=True))
        inputs, parts = inputs | {"allocator": allocator, "retention": setup.retentions[0]}, [allocator]
    stage = _stage(setup, "importance", inputs, *parts)
    if not stage.done:
        losses = _measure_importance(setup, stage)
        if losses is None:
            raise ShardDoneError(
                f"importance: shard {setup.config.shard.index} of {setup.config.shard.count} has done its share; the rest is for "
                "the other shards, and the same command then goes on"
            )
        stage.finish(asdict(losses))
    content = stage.read()
    content["base"] = tuple(content["base"])
    content["layers"] = tuple(map(tuple, content["layers"]))
    content["heads"] = tuple(tuple(map(tuple, layer)) for layer in content["heads"])
    return AblationLosses(**content), stage


def _measure_importance(setup: Setup, stage: Stage) -> AblationLosses | None:
    settings, shape = setup.config.importance, setup.shape
    windows = setup.calibration(
        tokens=settings.window_tokens, windows=settings.windows, lines=settings.lines, key="importance.window_tokens"
    )
    say(
        f"importance: {shape.layers * shape.heads} heads and {shape.layers} layers, one ablation each ({settings.method}) on "
        f"{len(windows)} windows of {settings.window_tokens} tokens"
    )
    model = setup.loaded.model
    dtype = DTYPES[settings.dtype] if settings.dtype else model.dtype
    model = model if dtype == model.dtype else copy.deepcopy(model).to(dtype)
    options = {
        "ablation": settings.ablation,
        "batch": settings.batch,
        "linear": settings.linear,
        "shard_index": setup.config.shard.index,
        "shard_count": setup.config.shard.count,
        "progress": lambda work: work_bar(work, "ablate"),
    }
    quantised = nullcontext()
    if settings.activation_scales:
        path = Path(settings.activation_scales)
        if settings.activation_scales == OBSERVE:
            path = stage.units.folder / "activation_scales.json"
            if not path.exists():
                save_activation_scales(observe_activations(model, windows, batch=settings.batch), path)
        ranges = load_activation_scales(path)
        quantised = fake_quantised(model, ranges, clip_threshold=settings.clip_threshold)
    with quantised:
        if settings.method != "racing":
            return measure_ablations(model, windows, stage.units, method=settings.method, **options)

        def retentions(importance: Importance) -> list[list[float]]:
            return allot(instantiate(setup.config.allocator), setup.shape, setup.retentions[0], importance)

        return race_ablations(model, windows, stage.units, retentions, race=Race(**settings.race), **options)


def _weighting(setup: Setup) -> int | None:
    settings = setup.config.importance
    return settings.batch if settings.weighting == "batches" else None


def _sensitivity(setup: Setup, measure: str) -> tuple[Sensitivity, Stage]:
    settings = setup.config.sensitivity
    tokens = settings.window_tokens or setup.context_tokens
    own = OmegaConf.to_container(settings, resolve=True) | {"window_tokens": tokens, "measure": measure}
    stage = _stage(setup, "sensitivity", _inputs(setup) | own)
    if not stage.done:
        say(f"sensitivity: {measure} of {setup.shape.layers * setup.shape.heads} heads at {len(settings.retentions)} retentions")
        found = measure_sensitivity(
            setup.loaded.model,
            setup.calibration(tokens=tokens, windows=settings.windows, key="sensitivity.window_tokens"),
            stage.units,
            measure=measure,
            retentions=list(settings.retentions),
            batch=settings.batch,
            progress=lambda work: work_bar(work, "sensitivity"),
        )
        stage.finish(asdict(found))
    content = stage.read()
    content["retentions"] = tuple(content["retentions"])
    content["cost"] = tuple(tuple(map(tuple, layer)) for layer in content["cost"])
    return Sensitivity(**content), stage


def _scales(setup: Setup) -> tuple[ScaleObservations, Stage]:
    graphs = setup.config.graphs
    own = {
        "chunk_tokens": graphs.chunk_tokens,
        "context_tokens": setup.context_tokens,
        "windows": graphs.calibration_windows,
        "calibration": OmegaConf.to_container(setup.config.calibration, resolve=True),
    }
    stage = _stage(setup, "scales", _inputs(setup) | own, own["calibration"])
    if not stage.done:
        say(f"scales: Q and K of {setup.shape.layers * setup.shape.heads} heads")
        windows = setup.calibration(tokens=setup.context_tokens, windows=graphs.calibration_windows)
        observations = observe_scales(
            setup.loaded.model,
            windows,
            chunk_tokens=graphs.chunk_tokens,
            calibration=instantiate(setup.config.calibration),
            progress=lambda w: bar(w, "calibrate"),
        )
        stage.finish(asdict(observations))
    return ScaleObservations(tuple((layer, head, q, k) for layer, head, q, k in stage.read()["pairs"])), stage


def _stage(setup: Setup, name: str, inputs: dict, *parts: dict) -> Stage:
    """A stage of today's code; `parts` are the settings of swappable parts that take part in it."""
    stage = Stage(_root(setup), name, inputs, code=stage_code(*parts))
    if stage.outdated:
        say(f"{name}: {stage.folder.name} was measured with other code, measuring again")
    return stage


def _inputs(setup: Setup) -> dict:
    return {
        "model": setup.loaded.fingerprint,
        "dtype": setup.config.model.dtype,
        "corpus": setup.corpus.sha256,
        "seed": setup.config.seed,
    }


def _root(setup: Setup) -> Path:
    return Path(setup.config.paths.results) / "artifacts"
