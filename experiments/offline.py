"""The offline stage of a run: importance, sensitivity and scales, each measured when it is asked for, kept, and found again."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from experiments.errors import ShardDoneError
from experiments.first_looks import FirstLook
from experiments.part_building import OBSERVE, build, by_content, part_name
from experiments.progress import bar, say, work_bar
from shadowattn.artifacts import Stage
from shadowattn.models.load import DTYPES
from shadowattn.offline import (
    Race,
    ScaleObservations,
    measure_ablations,
    measure_sensitivity,
    observe_block_ranges,
    observe_channels,
    observe_key_offset,
    observe_scales,
    race_ablations,
    scale_grid,
    summarise,
    train_indexer,
)
from shadowattn.offline.allocators import allot
from shadowattn.offline.attention_ranges import observe_attention_ranges
from shadowattn.offline.fake_quant import (
    fake_quantised,
    load_activation_scales,
    observe_activations,
    save_activation_scales,
)
from shadowattn.offline.profile import allocated_profile
from shadowattn.offline.top_p import TopPShare, observe_top_p
from shadowattn.online.estimators.top_p import TopP
from shadowattn.online.full_int8 import AttentionRanges
from shadowattn.online.selection import Rule
from shadowattn.types import (
    AblationLosses,
    BlockRanges,
    ChannelStatistics,
    FirstLookLosses,
    Importance,
    IndexerWeights,
    KeyOffset,
    RetentionProfile,
    ScaleGrid,
    Sensitivity,
)

if TYPE_CHECKING:
    from experiments.lab import Lab

_LOOK_WINDOWS = 2  # at most

UNIFORM = {"_target_": "shadowattn.offline.allocators.uniform.Uniform"}


class Offline:
    """What calibration tells of the lab's model. Nothing is measured that nobody asks for."""

    def __init__(self, lab: "Lab"):
        self._lab = lab
        self.sensitivities: dict[str, Sensitivity] = {}  # those measured so far, by measure
        self._key_offsets: dict[str, KeyOffset | None] = {"none": None}
        self._observations: dict[str, ScaleObservations] = {}  # by key offset

    @cached_property
    def losses(self) -> AblationLosses:
        """Losses of every ablation, window by window. Raises `ShardDoneError` where other shards' work is missing."""
        return self.losses_by(self._lab.of("importance").method)

    def losses_by(self, method: str) -> AblationLosses:
        """The same by another `importance.method` than the configuration's."""
        lab, settings = self._lab, OmegaConf.merge(self._lab.of("importance"), {"method": method})
        inputs, parts = by_content(OmegaConf.to_container(settings, resolve=True)), []
        if settings.method == "racing":  # what is settled depends on what the losses are for
            allocator = by_content(OmegaConf.to_container(lab.of("allocator"), resolve=True))
            inputs, parts = inputs | {"allocator": allocator, "retention": lab.retentions[0]}, [allocator]
        stage = lab.stage("importance", inputs, *parts)
        return stage.result(AblationLosses, lambda: self._measure_losses(stage, settings))

    @cached_property
    def importance(self) -> Importance:
        """Perplexity without each head and layer."""
        settings = self._lab.of("importance")
        return summarise(self.losses, batch=settings.batch if settings.weighting == "batches" else None)

    def sensitivity(self, measure: str) -> Sensitivity:
        """What each head loses as it keeps fewer keys, by one of `types.MEASURES`."""
        if measure not in self.sensitivities:
            self.sensitivities[measure] = self._measure_sensitivity(measure)
        return self.sensitivities[measure]

    @property
    def key_offset(self) -> KeyOffset | None:
        """What the estimate subtracts from K before it quantises; None for `none`."""
        return self.key_offset_by(self._lab.of("key_offset"))

    def key_offset_by(self, how: str) -> KeyOffset | None:
        """The same by another `key_offset` than the configuration's."""
        if how not in self._key_offsets:
            self._key_offsets[how] = self._measure_key_offset(how)
        return self._key_offsets[how]

    @cached_property
    def channels(self) -> ChannelStatistics:
        """What the channels of Q and K are like."""
        lab = self._lab
        stage = lab.stage("channels", self._calibration_inputs)

        def measure() -> ChannelStatistics:
            say(f"channels: Q and K of {lab.shape.layers * lab.shape.heads} heads")
            return self._observed(observe_channels)

        return stage.result(ChannelStatistics, measure)

    @cached_property
    def block_ranges(self) -> BlockRanges:
        """How large the channels are that enter the engine's projections."""
        lab, engine = self._lab, self._lab.of("engine")
        inputs = {"windows": engine.calibration_windows, "tokens": engine.calibration_tokens}
        stage = lab.stage("block_ranges", inputs)

        def measure() -> BlockRanges:
            windows = lab.calibration(
                tokens=engine.calibration_tokens, windows=engine.calibration_windows, key="engine.calibration_tokens"
            )
            say(f"engine: the channels that enter {lab.shape.layers} layers' projections, on {len(windows)} windows")
            return observe_block_ranges(
                lab.loaded.model, windows, chunk_tokens=engine.chunk_tokens, progress=lambda work: bar(work, "observe")
            )

        return stage.result(BlockRanges, measure)

    def indexer(self, heads: int, dims: int) -> IndexerWeights:
        """A trained indexer of so many heads and dimensions for every layer."""
        stage = self._lab.stage("indexer", self._calibration_inputs | {"heads": heads, "dims": dims})

        def measure() -> IndexerWeights:
            say(f"indexer: {heads} heads of {dims} dimensions, trained for each of {self._lab.shape.layers} layers")
            return self._observed(train_indexer, heads=heads, dims=dims)

        return stage.result(IndexerWeights, measure)

    def first_look(self, candidates: float, block_rows: int) -> FirstLookLosses:
        """What first looks of these settings cost each head."""
        lab, graphs = self._lab, self._lab.of("graphs")
        windows = min(_LOOK_WINDOWS, graphs.calibration_windows)
        look = FirstLook(lab.context_tokens, windows, graphs.chunk_tokens, candidates, block_rows)
        return look.losses(lab, self.key_offset)

    def top_p(self, estimator: TopP, part: dict[str, Any], profile: RetentionProfile, rule: Rule) -> float:
        """The share of the weights at which a method of these settings and this rule keeps as many keys as a profile asks for."""
        lab = self._lab
        how = lab.of("key_offset") if "key_offset" in lab.needs else "none"
        inputs = {"estimator": by_content(part), "retention": profile.retention, "key_offset": how} | vars(rule)
        stage = lab.stage("top_p", self._calibration_inputs | inputs, part)

        def measure() -> TopPShare:
            say(f"top-p: the share that keeps {profile.mean_retention:.4g} of the keys in the mean")
            return self._observed(observe_top_p, profile=profile, estimator=estimator, rule=rule)

        return stage.result(TopPShare, measure).share

    @property
    def observations(self) -> ScaleObservations:
        """The INT8 scales of Q and K, of every head and chunk."""
        return self.observations_by(self._lab.of("key_offset"))

    def observations_by(self, key_offset: str) -> ScaleObservations:
        """The same by another `key_offset` than the configuration's."""
        if key_offset not in self._observations:
            self._observations[key_offset] = self._observe_scales(key_offset)
        return self._observations[key_offset]

    @cached_property
    def grid(self) -> ScaleGrid:
        """The static scales that graphs are built for."""
        return scale_grid(self.observations, build(self._lab.of("grid")))

    def attention_ranges(self, key_offset: str) -> AttentionRanges:
        """The largest magnitudes of the whole attention, for the static scales of `full` methods with this `key_offset`."""
        lab = self._lab
        offset = self.key_offset_by(key_offset)
        stage = lab.stage("attention_ranges", self._calibration_inputs | {"key_offset": key_offset})

        def measure() -> AttentionRanges:
            say(f"ranges: Q, K, V and scores of {lab.shape.layers * lab.shape.heads} heads")
            return self._observed(observe_attention_ranges, key_offset=offset)

        return stage.result(AttentionRanges, measure)

    def profile(self, allocator: Any, retention: float) -> RetentionProfile:
        """The retention of every head by one allocator, whose settings are given."""
        lab = self._lab
        return allocated_profile(
            build(allocator),
            lab.shape,
            retention,
            importance=lambda: self.importance,
            sensitivity=self.sensitivity,
            scales=self.grid,
            fingerprint=lab.loaded.fingerprint,
            model=lab.loaded.name,
            name=part_name(OmegaConf.create(allocator)),
        )

    def allot(self, importance: Importance) -> list[list[float]]:
        """Retentions [L][H] by the configuration's allocator at its first retention; a race is over when they are settled."""
        return allot(build(self._lab.of("allocator")), self._lab.shape, self._lab.retentions[0], importance)

    @property
    def _calibration_inputs(self) -> dict[str, Any]:
        """What of the settings decides the Q and K that are calibrated on."""
        graphs = self._lab.of("graphs")
        return {
            "chunk_tokens": graphs.chunk_tokens,
            "context_tokens": self._lab.context_tokens,
            "windows": graphs.calibration_windows,
        }

    def _observed(self, observe: Callable[..., Any], *, windows: int | None = None, **options: Any) -> Any:
        """What `observe` makes of the model's Q and K on some or all calibration windows, in chunks as high as the graphs."""
        lab, graphs = self._lab, self._lab.of("graphs")
        text = lab.calibration(tokens=lab.context_tokens, windows=windows or graphs.calibration_windows)
        how = {"chunk_tokens": graphs.chunk_tokens, "progress": lambda w: bar(w, "calibrate")}
        return observe(lab.loaded.model, text, **how, **options)

    def _measure_key_offset(self, how: str) -> KeyOffset:
        lab = self._lab
        stage = lab.stage("key_offset", self._calibration_inputs | {"how": how})

        def measure() -> KeyOffset:
            say(f"key offset: {how} of the keys of {lab.shape.layers * lab.shape.kv_heads} key heads")
            return self._observed(observe_key_offset, how=how)

        return stage.result(KeyOffset, measure)

    def _observe_scales(self, key_offset: str) -> ScaleObservations:
        lab = self._lab
        offset = self.key_offset_by(key_offset)
        inputs = self._calibration_inputs | {
            "calibration": OmegaConf.to_container(lab.of("calibration"), resolve=True),
            "key_offset": key_offset,
        }
        stage = lab.stage("scales", inputs, inputs["calibration"])

        def measure() -> ScaleObservations:
            say(f"scales: Q and K of {lab.shape.layers * lab.shape.heads} heads")
            return self._observed(observe_scales, calibration=build(lab.of("calibration")), key_offset=offset)

        return stage.result(ScaleObservations, measure)

    def _measure_losses(self, stage: Stage, settings: Any) -> AblationLosses:
        lab, shape = self._lab, self._lab.shape
        windows = lab.calibration(
            tokens=settings.window_tokens, windows=settings.windows, lines=settings.lines, key="importance.window_tokens"
        )
        say(
            f"importance: {shape.layers * shape.heads} heads and {shape.layers} layers, one ablation each ({settings.method}) on "
            f"{len(windows)} windows of {settings.window_tokens} tokens"
        )
        model = lab.loaded.model
        dtype = DTYPES[settings.dtype] if settings.dtype else model.dtype
        model = model if dtype == model.dtype else copy.deepcopy(model).to(dtype)
        options = {
            "ablation": settings.ablation,
            "batch": settings.batch,
            "linear": settings.linear,
            "shard_index": lab.of("shard").index,
            "shard_count": lab.of("shard").count,
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
            if settings.method == "racing":
                losses = race_ablations(model, windows, stage.units, self.allot, race=Race(**settings.race), **options)
            else:
                losses = measure_ablations(model, windows, stage.units, method=settings.method, **options)
        if losses is None:
            shard = lab.of("shard")
            raise ShardDoneError("importance", shard.index, shard.count)
        return losses

    def _measure_sensitivity(self, measure: str) -> Sensitivity:
        lab, settings = self._lab, self._lab.of("sensitivity")
        tokens = settings.window_tokens or lab.context_tokens
        inputs = OmegaConf.to_container(settings, resolve=True) | {"window_tokens": tokens, "measure": measure}
        stage = lab.stage("sensitivity", inputs)

        def measured() -> Sensitivity:
            heads = lab.shape.layers * lab.shape.heads
            say(f"sensitivity: {measure} of {heads} heads at {len(settings.retentions)} retentions")
            return measure_sensitivity(
                lab.loaded.model,
                lab.calibration(tokens=tokens, windows=settings.windows, key="sensitivity.window_tokens"),
                stage.units,
                measure=measure,
                retentions=list(settings.retentions),
                batch=settings.batch,
                seed=lab.seed,
                progress=lambda work: work_bar(work, "sensitivity"),
            )

        return stage.result(Sensitivity, measured)


def check_fixed_budget(allocator: Any, retention: float, shape: Any) -> None:
    """Draws up a budget that nothing measured goes into, so that a file that does not fit is refused before any work."""
    part = build(allocator)
    if not part.needs:
        table = [[1.0] * shape.heads] * shape.layers
        part.allocate(table, [1.0] * shape.layers, base_ppl=1.0, retention=retention)
