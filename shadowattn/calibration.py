"""`calibrate`: the offline stage for one model, without any configuration: from text to retentions, scales and graphs."""

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowattn import checks
from shadowattn.artifacts import Stage, library_code
from shadowattn.data.text import token_windows
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank, check_device
from shadowattn.graphs.estimation import GraphForm, inputs_for
from shadowattn.graphs.planner import chunk_lengths, launch_sizes, plan_capacities, plan_shapes
from shadowattn.models.layerwise import check_layerwise
from shadowattn.models.shape import ModelShape, fingerprint, model_shape
from shadowattn.offline.ablations import BY_NAME as BY_NAME_ABLATION
from shadowattn.offline.allocators import BY_NAME, Allocator, allot
from shadowattn.offline.attention_ranges import observe_attention_ranges
from shadowattn.offline.channels import observe_channels
from shadowattn.offline.first_looks import observe_first_look
from shadowattn.offline.importance import measure_ablations, summarise
from shadowattn.offline.indexers import train_indexer
from shadowattn.offline.key_offsets import observe_key_offset
from shadowattn.offline.profile import allocated_profile
from shadowattn.offline.scales import ScaleObservations, observe_scales, scale_grid
from shadowattn.offline.sensitivity import measure_sensitivity
from shadowattn.online.full_int8 import AttentionRanges
from shadowattn.types import (
    KEY_OFFSETS,
    AblationLosses,
    ChannelStatistics,
    FirstLookLosses,
    Importance,
    IndexerWeights,
    KeyOffset,
    RetentionProfile,
    ScaleGrid,
    Sensitivity,
)

RETENTIONS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5)


@dataclass(frozen=True)
class Windows:
    """So many windows of so many tokens of the calibration text, spread evenly over it; as many as there are for 0."""

    tokens: int
    count: int

    def __post_init__(self):
        object.__setattr__(self, "tokens", checks.integer("tokens", self.tokens, least=2))
        object.__setattr__(self, "count", checks.integer("count", self.count))


Progress = Callable[[Iterable], Iterable]


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str | Path,
    *,
    retention: float = 0.2,
    allocator: str | Allocator = "error_greedy",
    importance: str = "zero",
    folder: str | Path | None = None,
    importance_windows: Windows = Windows(128, 32),
    windows: Windows | None = None,
    chunk_tokens: int = 128,
    key_offset: str = "none",
    progress: Progress = iter,
) -> "Calibration":
    """What a model's calibration text says of it. Nothing is measured yet: each part is when it is first asked for.

    `text`: the text itself, or a file of it. `retention` is the mean to spread, `allocator` what spreads it (a name of
    `offline.allocators.BY_NAME`), `importance` the ablation that it may rest on (`zero` or `uniform`), on `importance_windows`.
    Scales and sensitivities are measured on `windows` (None: 4 of 1024 tokens, or of the model's context where that is shorter),
    in chunks of `chunk_tokens`. With a `folder` everything is kept there: what was measured by the same code on the same model
    and text is not measured again, and an interrupted measurement goes on. `progress` may wrap what takes long in a bar.

    `key_offset`: a vector for each layer and key head that is subtracted from K before the estimate quantises it, the `mean` or
    the `midrange` of the calibrated keys (`offline.key_offsets`), or `none`; scales and ranges are then those of such keys. It
    changes a row's ranking by rounding alone. Lists that rows share by `block_score=max` compare scores of different rows, whose
    constants differ, and change.

    Raises `InputError` on anything that does not fit, before any work.
    """
    shape = model_shape(model)
    retention = checks.number("retention", retention)
    if not 0 < retention <= 1:
        raise InputError(f"retention: expected a value in (0, 1], got {retention:g}; 1 keeps every key")
    if isinstance(allocator, str):
        allocator = BY_NAME[checks.one_of("allocator", allocator, tuple(BY_NAME))]()
    checks.instance("allocator", allocator, Allocator, f"give a name: {', '.join(BY_NAME)}")
    checks.one_of("importance", importance, tuple(BY_NAME_ABLATION))
    checks.one_of("key_offset", key_offset, KEY_OFFSETS)
    windows = Windows(min(1024, shape.context_tokens), 4) if windows is None else windows
    for name, setting in (("importance_windows", importance_windows), ("windows", windows)):
        checks.instance(name, setting, Windows, "make it with shadowattn.calibration.Windows(tokens, count)")
        if setting.tokens > shape.context_tokens:
            raise InputError(f"{name}: the model's context is {shape.context_tokens} tokens, got {setting.tokens}")
    if isinstance(text, Path):
        text = _read(text)
    checks.instance("text", text, str, "give the text itself, or a Path to it")
    if len(text) < 4096 and "\n" not in text and Path(text).is_file():
        raise InputError(f"text: expected the text itself, got the name of a file; give Path({text!r})")
    for name, function in (("tokenizer", tokenizer), ("progress", progress)):
        if not callable(function):
            raise InputError(f"{name}: expected one that can be called, got {checks.shown(function)}")
    if not hasattr(tokenizer, "bos_token_id"):
        raise InputError(f"tokenizer: expected the model's, by AutoTokenizer.from_pretrained, got {checks.shown(tokenizer)}")
    if folder is not None and not isinstance(folder, str | Path):
        raise InputError(f"folder: expected a path, got {checks.shown(folder)}")
    calibration = Calibration(
        model=model,
        shape=shape,
        retention=retention,
        allocator=allocator,
        ablation=importance,
        folder=None if folder is None else Path(folder).expanduser(),
        importance_tokens=_cut(text, tokenizer, importance_windows, "importance_windows"),
        tokens=_cut(text, tokenizer, windows, "windows"),
        chunk_tokens=checks.integer("chunk_tokens", chunk_tokens, least=1),
        offset_kind=key_offset,
        progress=progress,
    )
    entries = model.get_input_embeddings().num_embeddings
    largest = int(max(calibration.tokens.max(), calibration.importance_tokens.max()))
    if largest >= entries:
        raise InputError(f"tokenizer: it gives tokens up to {largest}, the model knows {entries}; give the model's own tokenizer")
    _ = calibration._root  # a folder that cannot be written to is refused now
    pieces = 2 if calibration.tokens.shape[1] > calibration.chunk_tokens else 1
    # So is a model with sliding windows, or one that cannot take a prompt in chunks, or whose layers cannot be taken apart.
    observe_prefill(model, calibration.tokens[:1, :8], lambda chunk: None, chunk_tokens=8 // pieces)
    if allocator.needs & {"importance", "sensitivity"}:
        check_layerwise(model)
    if not allocator.needs:
        allot(allocator, shape, retention)  # and so is one whose file is missing
    return calibration


@dataclass(frozen=True)
class Calibration:
    """The offline stage of one model. Made by `calibrate`, which says what its settings are."""

    model: PreTrainedModel = field(repr=False)
    shape: ModelShape
    retention: float
    allocator: Allocator
    ablation: str
    folder: Path | None
    importance_tokens: Tensor = field(repr=False)  # int64 [W, T]
    tokens: Tensor = field(repr=False)
    chunk_tokens: int
    offset_kind: str
    progress: Progress = field(repr=False)

    @cached_property
    def importance(self) -> Importance:
        """How much worse the model gets without each head, and without each layer (section 3.2)."""
        stage = self._stage("importance", self.importance_tokens, ablation=self.ablation)
        how = {"ablation": self.ablation, "progress": self.progress}
        measure = partial(measure_ablations, self.model, self.importance_tokens, stage.units, **how)
        return summarise(stage.result(AblationLosses, measure))

    @cached_property
    def sensitivity(self) -> Sensitivity:
        """What it costs that one head alone keeps less, by what the allocator asks for."""
        measure = self.allocator.measure
        stage = self._stage("sensitivity", self.tokens, measure=measure, retentions=RETENTIONS)
        how = {"measure": measure, "retentions": RETENTIONS, "progress": self.progress}
        return stage.result(Sensitivity, partial(measure_sensitivity, self.model, self.tokens, stage.units, **how))

    @cached_property
    def key_offset(self) -> KeyOffset | None:
        """What the estimate subtracts from K before it quantises; None for `none`."""
        if self.offset_kind == "none":
            return None
        stage = self._stage("key_offset", self.tokens, chunk_tokens=self.chunk_tokens, how=self.offset_kind)
        how = {"chunk_tokens": self.chunk_tokens, "how": self.offset_kind, "progress": self.progress}
        return stage.result(KeyOffset, partial(observe_key_offset, self.model, self.tokens, **how))

    @cached_property
    def channels(self) -> ChannelStatistics:
        """What the channels of Q and K are like: for estimators that look at a few of them, such as `Loki`."""
        stage = self._stage("channels", self.tokens, chunk_tokens=self.chunk_tokens)
        how = {"chunk_tokens": self.chunk_tokens, "progress": self.progress}
        return stage.result(ChannelStatistics, partial(observe_channels, self.model, self.tokens, **how))

    def first_look(self, candidates: float = 2.0, block_rows: int = 64) -> FirstLookLosses:
        """Which heads a first look by a block's mean query serves badly: for `Hierarchical(first_look=…, flat_share=…)` of the
        same settings. On a CPU it needs the native kernels. Raises `InputError` without them, and on settings that do not fit.
        """
        looks = {"candidates": candidates, "block_rows": block_rows}
        stage = self._stage("first_look", self.tokens, chunk_tokens=self.chunk_tokens, key_offset=self.offset_kind, **looks)
        how = looks | {"chunk_tokens": self.chunk_tokens, "key_offset": self.key_offset, "progress": self.progress}
        return stage.result(FirstLookLosses, partial(observe_first_look, self.model, self.tokens, **how))

    def indexer(self, heads: int = 4, dims: int = 32) -> IndexerWeights:
        """A small scorer for every layer, trained on what its heads attend to together: for `LightningIndexer`."""
        stage = self._stage("indexer", self.tokens, chunk_tokens=self.chunk_tokens, heads=heads, dims=dims)
        how = {"heads": heads, "dims": dims, "chunk_tokens": self.chunk_tokens, "progress": self.progress}
        return stage.result(IndexerWeights, partial(train_indexer, self.model, self.tokens, **how))

    @cached_property
    def observations(self) -> ScaleObservations:
        """The INT8 scales of Q and K, of every head and chunk."""
        stage = self._stage("scales", self.tokens, chunk_tokens=self.chunk_tokens, key_offset=self.offset_kind)
        how = {"chunk_tokens": self.chunk_tokens, "key_offset": self.key_offset, "progress": self.progress}
        return stage.result(ScaleObservations, partial(observe_scales, self.model, self.tokens, **how))

    @cached_property
    def ranges(self) -> AttentionRanges:
        """The largest magnitudes of the whole attention: what the baseline `FullInt8` takes its static scales from."""
        stage = self._stage("attention_ranges", self.tokens, chunk_tokens=self.chunk_tokens, key_offset=self.offset_kind)
        how = {"chunk_tokens": self.chunk_tokens, "key_offset": self.key_offset, "progress": self.progress}
        return stage.result(AttentionRanges, partial(observe_attention_ranges, self.model, self.tokens, **how))

    @cached_property
    def scales(self) -> ScaleGrid:
        """The static scales that graphs are built for: 3 × 3 buckets around the mean (section 3.3)."""
        return scale_grid(self.observations)

    @cached_property
    def profile(self) -> RetentionProfile:
        """Every head's retention, with the scales. Measures what the allocator needs, and no more."""
        return allocated_profile(
            self.allocator,
            self.shape,
            self.retention,
            importance=lambda: self.importance,
            sensitivity=lambda _: self.sensitivity,
            scales=self.scales,
            fingerprint=self._fingerprint,
            model=self.model.config.name_or_path or type(self.model).__name__,
            name=type(self.allocator).__name__,
        )

    def bank(self, max_tokens: int, *, device: str = "CPU", form: GraphForm | None = None, graphs: int = 108) -> GraphBank:
        """Compiled graphs for prompts of up to `max_tokens` tokens, at most so many of them. `form`: as in `GraphBank.build`.

        With a folder they are kept there too. Raises `InputError` beyond the model's context, and where not even one shape fits
        into the number of graphs.
        """
        max_tokens = checks.integer("max_tokens", max_tokens, least=1, most=self.shape.context_tokens)
        checks.integer("graphs", graphs, least=1)
        check_device(device)
        form = GraphForm(inputs_for("auto", device)) if form is None else form
        heads = {"heads": self.shape.heads, "kv_heads": self.shape.kv_heads, "launch_heads": (1, 2, 4)}
        each = len(launch_sizes(**heads)) * (len(self.scales.pairs) if form.bakes_scales else 1)
        if graphs < each:
            raise InputError(f"graphs: a single shape takes {each}, launch sizes × buckets, got {graphs}; allow more")
        lengths = chunk_lengths([max_tokens], self.chunk_tokens)
        plan = plan_capacities(lengths, context_tokens=max_tokens, limit=graphs // each)
        shapes = plan_shapes(plan, head_dim=self.shape.head_dim, **heads)
        bank = GraphBank.build(replace(self.profile), shapes, device=device, form=form)
        blobs = None if self.folder is None else self.folder / "compiled"
        bank.compile(blobs=blobs, progress=self.progress)
        return bank

    def _stage(self, name: str, tokens: Tensor, **settings: Any) -> Stage:
        inputs = {"model": self._fingerprint, "dtype": str(self.model.dtype), "tokens": tokens.tolist()} | settings
        return Stage(self._root, name, inputs, code=library_code())

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.model)

    @cached_property
    def _root(self) -> Path:
        if self.folder is None:  # units of work need files, and nothing is kept
            folder = tempfile.mkdtemp(prefix="shadowattn-")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            return Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"folder: expected one to write to, got {str(self.folder)!r} ({error.strerror})") from error
        if not os.access(self.folder, os.W_OK):
            raise InputError(f"folder: expected one to write to, got {str(self.folder)!r}, which is read-only")
        return self.folder


def _cut(text: str, tokenizer: PreTrainedTokenizerBase, windows: Windows, key: str) -> Tensor:
    return token_windows(text, tokenizer, tokens=windows.tokens, windows=windows.count, source="text", key=key)


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"text: expected a file of UTF-8 text, got {str(path)!r} ({error})") from error
