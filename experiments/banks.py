"""The graph stage of a run: the form and shapes that the configuration asks for, and banks of compiled graphs, kept on disk."""

import math
import shutil
from collections import Counter
from dataclasses import asdict, replace
from functools import cached_property
from typing import TYPE_CHECKING

from filelock import FileLock

from experiments.offline import UNIFORM
from experiments.progress import bar, say
from experiments.source import stage_code
from shadowattn.artifacts import content_hash, write_text
from shadowattn.errors import InputError
from shadowattn.graphs import GraphBank, GraphForm, GraphShape
from shadowattn.graphs.estimation import inputs_for
from shadowattn.graphs.nncf_graph import NNCFGraph, compiled_nncf_graph
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
from shadowattn.offline.nncf_samples import nncf_samples
from shadowattn.offline.requantisation import ProductObservations, observe_products
from shadowattn.threads import thread_budget
from shadowattn.types import Requant, RetentionProfile, ScaleGrid

if TYPE_CHECKING:
    from experiments.lab import Lab, MethodSettings

# What the graphs give out: float32 scores, or INT8 ones by one of the two rules of `types.Requant`.
OUTPUTS = ("float", "target_requant", "fixed_output")
# Retentions are counted in steps of this share when k buckets are chosen.
_SHARES = 1000


class Banks:
    """Banks for the lab's model, prompts and scales."""

    def __init__(self, lab: "Lab"):
        self._lab = lab

    @cached_property
    def bank(self) -> GraphBank:
        """The compiled bank whose graphs estimate."""
        shapes, plan = self.shapes(self.form, pairs=len(self._lab.offline.grid.pairs))
        return self._made(self.form, shapes, plan)

    def selecting(self, method: "MethodSettings", profile: RetentionProfile) -> GraphBank:
        """The bank whose graphs select for one profile: static k in a few sizes, for heads of different retention."""
        selection = method.selection
        pool = (selection.query_block, selection.key_block)
        form = replace(self.form, mask=True, pool=pool, indices=True)
        counts = Counter(round(value * _SHARES) for layer in profile.retention for value in layer if value < 1)
        counts = counts or Counter({_SHARES: 1})  # every head is dense: the graphs are built, and never run
        buckets = best_capacities(counts, max(counts), self._lab.of("graphs").top_k_buckets)
        pairs = len(self._lab.offline.grid.pairs) * len(buckets)
        shapes, plan = self.shapes(form, pairs=pairs, step=math.lcm(*pool))
        shares = [min(1.0, (bucket + 0.5) / _SHARES) for bucket in buckets]
        shapes = with_top_k(shapes, shares, key_block=selection.key_block, min_budget=selection.min_budget)
        return self._made(form, shapes, plan)

    @cached_property
    def form(self) -> GraphForm:
        """The form that the configuration asks for."""
        graphs = self._lab.of("graphs")
        requant = None if graphs.output == "float" else self.requant(self._lab.offline.grid, graphs.output, graphs.lookup)
        return GraphForm(inputs_for(graphs.inputs, self._lab.device_name), requant)

    def requant(self, grid: ScaleGrid, mode: str, distance: str) -> Requant:
        """How products become INT8 scores with a grid; observed once on calibration text."""
        lab, graphs = self._lab, self._lab.of("graphs")
        inputs = {
            "chunk_tokens": graphs.chunk_tokens,
            "context_tokens": lab.context_tokens,
            "windows": graphs.calibration_windows,
            "pairs": grid.pairs,
            "key_offset": None if grid.key_offset is None else grid.key_offset.digest,
            "lookup": distance,
        }
        stage = lab.stage("requantisation", inputs)
        if not stage.done:
            say(f"requantisation: integer products of {lab.shape.layers * lab.shape.heads} heads")
            observations = observe_products(
                lab.loaded.model,
                lab.calibration(tokens=lab.context_tokens, windows=graphs.calibration_windows),
                grid,
                chunk_tokens=graphs.chunk_tokens,
                distance=distance,
                progress=lambda w: bar(w, "observe"),
            )
            stage.finish(asdict(observations))
        return ProductObservations(tuple(tuple(pair) for pair in stage.read()["observed"])).requant(mode)

    def nncf_graph(self, keys: int, *, samples: int) -> NNCFGraph:
        """The graph that NNCF quantises from calibration text, for chunks of the run's rows and up to so many keys."""
        lab, graphs, model = self._lab, self._lab.of("graphs"), self._lab.shape
        group = model.heads // model.kv_heads
        shape = GraphShape(group, graphs.chunk_tokens, model.head_dim, keys, group)
        say(f"nncf: one graph of {group} query heads, {shape.rows} rows and {keys} keys, calibrated on {samples} samples")
        windows = lab.calibration(tokens=keys, windows=graphs.calibration_windows)
        pairs = nncf_samples(lab.loaded.model, windows, shape, count=samples)
        return compiled_nncf_graph(shape, pairs, fingerprint=lab.loaded.fingerprint)

    def shapes(self, form: GraphForm, *, pairs: int, step: int = 1) -> tuple[tuple[GraphShape, ...], ShapePlan]:
        """Shapes for the prompts of this run, and their plan. Where scales are built in, each takes `pairs` graphs."""
        lab, graphs, model = self._lab, self._lab.of("graphs"), self._lab.shape
        heads = {
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "launch_heads": tuple(graphs.launch_heads),
            "fold": graphs.fold,
        }
        sizes = len(launch_sizes(**heads))
        each = sizes * (pairs if form.bakes_scales else 1)
        if graphs.limit < each:
            raise InputError(
                f"graphs.limit: a single shape takes {sizes} × {each // sizes} graphs, launch sizes × buckets, got a limit of "
                f"{graphs.limit}; raise it, or use graphs.inputs=unit, fewer graphs.launch_heads or a smaller grid"
            )
        lengths = chunk_lengths(lab.prompt_tokens, graphs.chunk_tokens)
        plan = plan_capacities(
            lengths, context_tokens=max(lab.prompt_tokens), limit=graphs.limit // each, policy=graphs.shapes, step=step
        )
        return plan_shapes(plan, head_dim=model.head_dim, **heads), plan

    def _made(self, form: GraphForm, shapes: tuple[GraphShape, ...], plan: ShapePlan) -> GraphBank:
        lab, graphs, grid = self._lab, self._lab.of("graphs"), self._lab.offline.grid
        inputs = {"shapes": [asdict(shape) for shape in shapes], "grid": asdict(grid)}
        inputs |= {"form": asdict(form), "lookup": graphs.lookup}
        folder = lab.artifacts / f"bank-{content_hash(inputs)}"
        blobs = folder.with_name(f"{folder.name}-compiled")
        lab.artifacts.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):  # another run may want the same bank now
            code, built_by = stage_code(), folder.with_suffix(".code")
            if not (folder / MANIFEST).exists() or not built_by.exists() or built_by.read_text() != code:
                built_by.unlink(missing_ok=True)
                shutil.rmtree(blobs, ignore_errors=True)
                profile = lab.offline.profile(UNIFORM, 1.0)
                GraphBank.build(profile, shapes, device=lab.device.name, form=form, distance=graphs.lookup).save(folder)
                write_text(built_by, code)
            bank = GraphBank.load(folder, device=lab.device.name)
            say(
                f"graphs: {len(bank)} static INT8 Q·K graphs on {lab.device.label} ({lab.device.reason}), "
                f"{plan.waste:.0%} of their scores padding"
            )
            with thread_budget(lab.pipeline.budgets(lab.device.name).estimate):
                bank.compile(
                    blobs=None if graphs.ahead else blobs,
                    ahead=graphs.ahead,
                    threads=graphs.compile_threads,
                    progress=lambda models: bar(models, "compile", total=len(bank)),
                )
        if folder.name not in lab.stages:
            lab.stages.append(folder.name)
        return bank
