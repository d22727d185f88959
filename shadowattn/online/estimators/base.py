"""What an estimator is: how important a key looks to a query row. Only the order of the scores of a row matters."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple, NoReturn

import torch
from torch import Tensor

from shadowattn import checks
from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.graphs.buckets import heads_at_once
from shadowattn.kernels import Kernels
from shadowattn.online.chunk import Chunk
from shadowattn.online.plan import Group
from shadowattn.online.selection import Rule
from shadowattn.types import EstimateCost, Heads, KeyOffset, Lists, RetentionProfile, ScaleGrid, Selection

GRANULARITIES = ("head", "group", "layer")
SEES = ("row", "earlier_rows", "chunk")

# What a class says of its own scores and lists.
_FLAGS = ("sees", "selects", "scores_are_finite", "lists_are_sound", "sets_budgets", "single_rows", "is_native")


class FirstLook(NamedTuple):
    """How a ranking begins that is not of every key: see `hierarchical`."""

    candidates: float
    block_rows: int


class Estimator(ABC):
    """Scores of keys for query rows. `shadowattn.check_estimator` tells whether a new one keeps the contract.

    To add one: a class with `scores` in a file of its own, and a YAML that names it. What else a class may say:

    - `needs`: what a run has to make for it: `bank`, a bank of graphs; `grid`, a profile's static scales; `key_offset`, the
      calibrated `types.KeyOffset` or None; `channels`, the calibrated `types.ChannelStatistics`; `indexer`, the trained
      `types.IndexerWeights` of its `heads` and `dims`; `first_look`, the measured `types.FirstLookLosses` of its `candidates` and
      `block_rows`, unless its `flat_share` is 0; `nncf_graph`, a calibrated `NNCFGraph`. They are arguments of those names.
    - `granularity`: whose ranking the scores are: of each `head`, of a key/value `group`, or of the whole `layer`, whose heads
      then get copies. A chunk may hold any of a layer's heads, so scores of a group or a layer must not depend on which: they
      may go by keys, positions and `chunk.layer_q`, not by `chunk.q`.
    - `sees`: what a row's ranking may go by. The `row` itself and the keys up to it, as the paper's estimate does: then it is the
      same however a prompt is cut into chunks. Also `earlier_rows`, those of the chunks before. Or the whole `chunk`, whose later
      rows then have a say in what earlier ones keep: a prefill method of that kind looks into the future of its chunk.
    - `selects`: `select` makes lists without scores, and `scores` is never asked for in a prompt. A class that defines `select`
      does.
    - `attends`: whether `attend` estimates, selects and attends in one pass, for a rule and kernels; then a batch of heads goes
      through it, and a list is made only where somebody wants it. It gives what the other three give one after the other.
    - `lists_are_sound`: what `select` makes is what `lists` calls for, whatever it is given: then nobody looks.
    - `sets_budgets`: `select` decides how many keys each single row keeps, whatever `lists` calls for.
    - `single_rows`: its lists are of single rows; a rule by which rows share them is refused.
    - `scores_are_finite`: every score is finite, whatever finite q and k it is given: then nobody looks.
    - `is_native`: the native kernels do its arithmetic, and what torch computes beside them is small.
    - `is_papers`: it is the paper's estimate, so that a method with it is called `shadowattn`; never inherited.
    - `short_name`: what `sparse_attention` calls it, where that is not its file's name.
    - `reads_cpu_memory`: q and k have to be there, as OpenVINO's graphs read them; refused where a model is elsewhere. All others
      make their tensors where q is.
    - `goes_by`: what a row's ranking goes by in all, for tables: what it `sees`, or the `chunk` that its scales are measured on.
    - `counts`: what it did so far, for tables.
    - `check_settings`: which of its settings no model of a certain shape allows; asked before what it needs is made.

    A class that derives from one of ours and defines `scores` is asked for those, and inherits neither these flags nor `units`,
    `launches`, `launch`, `room`, `select`, `shared_scores`, `attend_shared`, `attends`, `look_of` and `goes_by`.
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    granularity: ClassVar[str] = "head"
    sees: ClassVar[str] = "row"
    selects: ClassVar[bool] = False
    scores_are_finite: ClassVar[bool] = False
    lists_are_sound: ClassVar[bool] = False
    sets_budgets: ClassVar[bool] = False
    single_rows: ClassVar[bool] = False
    is_native: ClassVar[bool] = False
    is_papers: ClassVar[bool] = False
    short_name: ClassVar[str] = ""
    reads_cpu_memory: ClassVar[bool] = False
    # What it did so far: launches of graphs, and heads whose measured scale exceeded the static one that served them.
    launched = 0
    clipped = 0

    def __init_subclass__(cls, **options):
        super().__init_subclass__(**options)
        if "select" in vars(cls) and "selects" not in vars(cls):
            cls.selects = True
        cls.is_papers = vars(cls).get("is_papers", False)
        if "select" in vars(cls) and "lists_are_sound" not in vars(cls):
            cls.lists_are_sound = False
        if not {"select", "attend"}.isdisjoint(vars(cls)) and "is_native" not in vars(cls):
            cls.is_native = False
        if _place(cls, "launch") < _place(cls, "room"):  # a launch of one's own may not know that it is given memory
            cls.room = Estimator.room
        if "select" in vars(cls) and "attends" not in vars(cls):
            cls.attends = Estimator.attends
        if "shared_scores" in vars(cls) and "attend_shared" not in vars(cls):
            cls.attend_shared = Estimator.attend_shared
        if "scores" in vars(cls):  # then what its parent made of other scores is not to be asked
            for name in (
                *_FLAGS,
                "units",
                "launches",
                "launch",
                "room",
                "select",
                "shared_scores",
                "attend_shared",
                "attends",
                "look_of",
                "goes_by",
            ):
                if name not in vars(cls):
                    setattr(cls, name, vars(Estimator)[name])
        checks.one_of(f"{cls.__name__}.granularity", cls.granularity, GRANULARITIES)
        checks.one_of(f"{cls.__name__}.sees", cls.sees, SEES)

    @classmethod
    def of(cls, q: Tensor, k: Tensor) -> "Estimator":
        """The default one, for these tensors alone: what measures scales takes those of all of q [H, Q, D] and k [G, K, D]."""
        return cls()

    @classmethod  # noqa: B027 - most fit every model
    def check_settings(cls, head_dim: int, kv_heads: int, /, **settings: Any) -> None:
        """Raises `InputError` on settings that do not fit a model of `kv_heads` key heads of `head_dim` dimensions.

        Asked of the class before anything is calibrated or measured. An estimator within this one is given by its class.
        """

    @classmethod
    def look_of(cls, settings: Mapping[str, Any]) -> FirstLook | None:
        """The first look of an estimator with these settings; None: every key is ranked."""
        return None

    @property
    def look(self) -> FirstLook | None:
        """Its own first look."""
        return self.look_of(vars(self))

    @abstractmethod
    def scores(self, chunk: Chunk) -> Tensor:
        """Scores float32, float16 or int8 [H, Q, K], finite; larger is more important ([G, Q, K] or [1, Q, K] by `granularity`).

        For the rows of `chunk`, all of its heads and all of its keys. Causality is not the estimator's business: selection never
        offers a key to a row before it. But the score of a key must not depend on keys after the row, or it would leak them
        (static INT8 scales, and what a class says that it `sees`, are the documented exceptions). Raises `InputError` on NaN or
        infinity where scales are measured.
        """

    def units(self, chunk: Chunk) -> Tensor | None:
        """What a score of 1 is worth in q·k, float32 [H]; None where scores have no unit, so that no softmax can be estimated."""
        return None

    def prepare(self, chunk: Chunk) -> None:  # noqa: B027 - most have nothing to prepare
        """Derives what all heads share, so that no head's stage has to, and two stages at once do not both."""

    def launches(self, chunk: Chunk) -> list[Group]:
        """Every head in exactly one group, by its place in q: those that one launch serves.

        By default those of one key head, or each alone where they have more scores of their own than a launch may hold
        (`heads_at_once`).
        """
        most = heads_at_once(chunk.q.shape[1], chunk.keys) if self.granularity == "head" else len(chunk.heads)
        groups = [tuple(range(part.start, part.stop)) for _, part in chunk.heads.grouped()]
        return [Group(some) for heads in groups for some in ([heads] if len(heads) <= most else [(head,) for head in heads])]

    def launch(self, chunk: Chunk, group: Group) -> Tensor:
        """Scores [h, Q, K] of one group of `launches`, or of a part of one. The next launch may overwrite them."""
        return self.scores(chunk[group.heads])

    def room(self, chunk: Chunk, group: Group) -> int | None:
        """Bytes that a launch of one head computes its scores in, where an estimator that `reuses_scores` and ranks head by head
        can be told in which memory: `launch` is then given it as `out`, uint8 [bytes], and returns a view of it. None: it is not
        given any.
        """
        return None

    def select(self, chunk: Chunk, rule: Rule, lists: Lists, kernels: Kernels) -> Selection:
        """The lists that `rule` and `lists` call for: by default scores, pooled and ranked."""
        scored = rule.scored(chunk)
        scores = check_scores(self.scores(scored), self, scored)
        return kernels.select(rule.pool(scores, chunk.positions, logit_scales(self, rule, scored)), lists)

    def shared_scores(self, chunk: Chunk) -> Tensor:
        """What the heads of a key head share a list by in a decoding step, of q [H, 1, D]: float32 [G, 1, K].

        A key's score is the sum of its scores over the group's heads, each divided by its standard deviation over the keys, so
        that no head outweighs the others.
        """
        scores = check_scores(self.scores(chunk), self, chunk).float()
        spread = scores.std(2, keepdim=True, correction=0)
        # A head whose scores are all alike (but for rounding) has no say.
        alike = spread <= 1e-6 * scores.abs().amax(2, keepdim=True)
        return torch.where(alike, 0.0, scores / spread).view(chunk.k.shape[0], -1, 1, chunk.keys).sum(1)

    def attend_shared(self, chunk: Chunk, lists: Lists, kernels: Kernels) -> Tensor:
        """Attention of one row, q [H, 1, D], on a list for each key head by `shared_scores`. Returns [H, 1, D]."""
        groups, heads, dim = chunk.k.shape[0], len(chunk.heads) // chunk.k.shape[0], chunk.q.shape[2]
        chosen = kernels.select(self.shared_scores(chunk), lists)
        # The group's heads are the rows of one block, all at the last position.
        rows = Selection(chosen.indices, chosen.indptr, chunk.positions.expand(heads).contiguous(), heads)
        folded, of = chunk.q.reshape(groups, heads, dim), Heads.all(groups, groups, chunk.q.device)
        return kernels.attend(folded, chunk.k, chunk.v, rows, of, scale=chunk.scale).view(chunk.q.shape)

    def attends(self, rule: Rule, kernels: Kernels) -> bool:
        """Whether `attend` can serve lists of this rule, with these kernels."""
        return False

    def attend(self, chunk: Chunk, rule: Rule, lists: Callable[[], Lists], *, listed: bool) -> tuple[Tensor, Selection | int]:
        """Output [H, Q, D] of all heads, and their lists or, unless they are to be `listed`, how many (head, row, key) pairs
        these keep; for who says that he `attends`. `lists()` makes the budgets and places of all lists, for who needs them.
        """
        raise NotImplementedError

    def cost(self, head_dim: int, rows: int, keys: int) -> EstimateCost | None:
        """What a score takes in a chunk of so many rows that see so many keys; None: not known."""
        return None

    @property
    def goes_by(self) -> str:
        """What a row's ranking goes by: what it `sees`, or the whole `chunk` where a scale is measured on it, or picked by it, as
        where a bank has several pairs of scales."""
        return self.sees if self.graphs is None or len(self.graphs.pairs) == 1 else "chunk"

    @property
    def ranked_together(self) -> tuple[int, int]:
        """How many rows share one ranking, 0: all of a chunk; and how many neighbouring keys share one score."""
        return 1, 1

    def figures(self, chunk: Chunk, scores: Tensor, visible: Tensor) -> dict[str, float]:
        """What it has to say of its work on a chunk: shares and counts by name.

        `scores` [H, rows, K] are those of some of the rows, which see `visible` [rows] keys.
        """
        return {}

    def counts(self) -> dict[str, float]:
        """What it did so far, by metric: launches of graphs, heads that a static scale clipped, and shares of its own."""
        return {"graph_launches": float(self.launched), "clipped_heads": float(self.clipped)}

    def check_profile(self, profile: RetentionProfile) -> None:
        """Raises `InputError` where it quantises by other static scales than the profile's."""
        if self.graphs is not None:
            self.graphs.check_profile(profile)

    @property
    def made_for(self) -> str:
        """The `models.fingerprint` of the model that it was calibrated on; empty: of no model, or of one that nobody named."""
        return "" if self.graphs is None else self.graphs.built_for.fingerprint

    @property
    def graphs(self) -> GraphBank | None:
        """The bank that scores come from; None: no static graphs."""
        return None

    @property
    def device(self) -> str:
        """Where the estimate runs, as OpenVINO names it."""
        return "CPU" if self.graphs is None else self.graphs.device

    @property
    def reuses_scores(self) -> bool:
        """Whether a launch overwrites the scores of the one before."""
        return self.graphs is not None

    def use(self) -> AbstractContextManager:
        """The memory that calls share, a bank's, for the calling thread's work alone until left.

        For work that holds it, scores are what a launch left in that memory; else they are copies.
        """
        return nullcontext() if self.graphs is None else self.graphs.exclusive.use()


def _place(kind: type, name: str) -> int:
    """How far up the class that defines a method is."""
    return next(at for at, parent in enumerate(kind.__mro__) if name in vars(parent))


def check_estimator_type(estimator: Estimator) -> Estimator:
    """What it is given. Raises `InputError` where that is a class, a bank, or anything else that is no estimator."""
    if isinstance(estimator, type):
        raise InputError(f"estimator: expected an object, got the class {estimator.__name__}; give {estimator.__name__}(…)")
    if not isinstance(estimator, Estimator):
        raise InputError(
            f"estimator: expected a shadowattn.Estimator, got {checks.shown(estimator)}; derive the class from it and define "
            "`scores`; of a GraphBank make one with shadowattn.online.estimators.int8_graph.Int8Graph(bank)"
        )
    return estimator


def check_place(device: torch.device, kind: type[Estimator]) -> None:
    """Raises `InputError` where a kind of estimator cannot rank the keys of a model on this device."""
    if kind.reads_cpu_memory and device.type != "cpu":
        raise InputError(
            f"estimator: {kind.__name__} runs OpenVINO's graphs on the CPU's memory, got a model on {device}; use "
            "estimator=int8_fused, which ranks the same keys, or a model on the CPU"
        )


def check_scores(scores: Tensor, estimator: Estimator, chunk: Chunk) -> Tensor:
    """Scores [H, Q, K] of every head of the chunk. Raises `InputError` where they are not what the estimator should give.

    Selection would take NaN for the largest score or for the least, and go on; infinities become NaN where rows are pooled.
    Looking for them takes a read of all scores, half the time of a copy, which is spared where the class itself says that they
    are finite.
    """
    name = f"scores of {type(estimator).__name__}"
    checks.tensors((torch.float32, torch.float16, torch.int8), **{name: scores})
    checks.placed(chunk.q.device, **{name: scores})
    groups, counts = chunk.heads.kv.unique_consecutive(return_counts=True)
    rankings = {"head": len(chunk.heads), "group": len(groups), "layer": 1}[estimator.granularity]
    expected = [rankings, len(chunk.positions), chunk.keys]
    if list(scores.shape) != expected:
        letter = {"head": "H", "group": "G", "layer": "1"}[estimator.granularity]
        raise InputError(f"{name}: expected [{letter}, Q, K] = {expected}, got {list(scores.shape)}; correct the estimator")
    # NaN and infinities make a sum anything but finite; so may large scores, which the second look tells from them.
    unsure = scores.dtype != torch.int8 and not estimator.scores_are_finite
    if unsure and not scores.sum().isfinite() and not scores.isfinite().all():
        raise InputError(
            f"{name}: got NaN or infinity; a ranking of keys would mean nothing; correct the estimator, or its inputs"
        )
    if estimator.granularity == "head":
        return scores
    return scores.repeat_interleave(counts, 0) if estimator.granularity == "group" else scores.expand(len(chunk.heads), -1, -1)


def check_lists(selection: Selection, lists: Lists, estimator: Estimator) -> Selection:
    """The lists of an estimator that selects. Raises `InputError` where they are not those that `lists` calls for.

    A key after its row, or one that is not there, would be attended to; a repeated one would count twice.
    """
    if estimator.lists_are_sound:
        return selection
    name = f"lists of {type(estimator).__name__}"
    checks.instance(name, selection, Selection, "make them with shadowattn.types.Selection")
    checks.tensors((torch.int32,), **{f"indices of the {name}": selection.indices})
    checks.tensors((torch.int64,), **{f"indptr of the {name}": selection.indptr, f"positions of the {name}": selection.positions})
    if estimator.sets_budgets:
        lists = replace(lists, indptr=_checked_indptr(selection, lists, name))
    expected = (lists.indptr, lists.positions)
    if not all(x.equal(y) for x, y in zip((selection.indptr, selection.positions), expected, strict=True)):
        raise InputError(
            f"{name}: expected the indptr and the positions that it was asked for, got others; correct the estimator"
        )
    if selection.query_block != lists.query_block or len(selection.indices) != lists.size:
        raise InputError(
            f"{name}: expected {lists.size} keys in lists of {lists.query_block} rows, got {len(selection.indices)} in lists of "
            f"{selection.query_block}; correct the estimator"
        )
    lengths, ends = lists.indptr.diff(), lists.candidates + lists.tail
    end = ends.repeat(len(lengths) // len(ends)).repeat_interleave(lengths)
    ascending = selection.indices.diff() > 0
    ascending[(lists.indptr[1:-1] - 1).clamp(min=0)] = True  # from one list to the next
    within = (selection.indices >= 0) & (selection.indices < end)
    if not bool(within.all()) or not bool(ascending.all()):
        raise InputError(
            f"{name}: expected ascending keys up to the last that the list may hold, each once, got others; a key after its row "
            "would be attended to; correct the estimator"
        )
    return selection


def _checked_indptr(selection: Selection, lists: Lists, name: str) -> Tensor:
    """The indptr of lists of lengths of their own. Raises `InputError` where a list is empty, or they are not as many."""
    indptr = selection.indptr
    if indptr.shape != lists.indptr.shape or int(indptr[0]) != 0 or int(indptr.diff().min()) < 1:
        raise InputError(
            f"{name}: expected {len(lists.indptr) - 1} lists of a key or more each, got others; correct the estimator"
        )
    return indptr


def check_scales(**named: Tensor) -> None:
    """Raises `InputError` on INT8 scales that are no float32 vectors of positive finite values."""
    checks.tensors((torch.float32,), **named)
    for name, scales in named.items():
        if scales.dim() != 1 or not bool(((scales > 0) & scales.isfinite()).all()):
            raise InputError(
                f"{name}: expected a vector of positive finite scales, one for each head, got {checks.shown(scales)} "
                f"{scales.flatten()[:4].tolist()}; measure them with Int8Tensor.of(q, k)"
            )


def key_offset_of(grid: ScaleGrid | None, key_offset: KeyOffset | None) -> KeyOffset | None:
    """What an estimator subtracts from K before it quantises: its grid's offset, or, without a grid, its own.

    Raises `InputError` where both a grid and an offset are given: the scales of a grid belong to the grid's own offset.
    """
    if grid is None:
        return KeyOffset.read(key_offset)
    checks.instance("grid", grid, ScaleGrid, "make one with shadowattn.offline.scale_grid(observations)")
    if key_offset is not None:
        raise InputError(
            f"key_offset: expected none beside a grid, whose K scales are those of its own offset ({grid.key_offset}), got "
            f"{checks.shown(key_offset)}; use ScaleGrid(…, key_offset=…)"
        )
    return grid.key_offset


def check_rule(rule: Rule, kind: type[Estimator]) -> None:
    """Raises `InputError` where rows share a list, and a kind of estimator makes those of single rows; where a rule pools
    probabilities, and its scores have no unit; or where a rule scores one row of a block, and the estimator goes by all rows.
    """
    if rule.query_block > 1 and kind.single_rows:
        raise InputError(
            f"{kind.__name__}: makes lists for single rows, got query_block={rule.query_block}; use query_block=1 "
            "(selection=per_row), or an estimator whose lists rows may share, such as int8_fused"
        )
    if rule.pooling == "probability" and kind.units is Estimator.units:
        _refuse_unitless(kind)
    if rule.query_block > 1 and rule.pooling == "rows" and kind.sees != "row":
        raise InputError(
            f"block_score={rule.block_score}: scores one row of a block, and {kind.__name__} goes by what all rows attend to; "
            "use block_score=max, or query_block=1"
        )


def _refuse_unitless(kind: type[Estimator]) -> NoReturn:
    raise InputError(
        "block_score=probability: expected an estimator whose scores are q·k in known units, such as oracle or int8, got "
        f"{kind.__name__}; use block_score=max"
    )


def logit_scales(estimator: Estimator, rule: Rule, chunk: Chunk) -> Tensor | None:
    """What scores are multiplied by to become the softmax's logits, float32 [H]; None where `rule` does not ask.

    Raises `InputError` where the rule needs it and the estimator's scores have no unit.
    """
    if rule.pooling != "probability":
        return None
    name, units = type(estimator).__name__, estimator.units(chunk)
    if units is None:
        _refuse_unitless(type(estimator))
    checks.vector(f"units of {name}", units, len(chunk.heads), dtype=torch.float32, device=chunk.q.device)
    scales = units * chunk.scale
    if not bool((scales.isfinite() & (scales > 0)).all()):
        raise InputError(
            f"units of {name}: expected positive finite numbers, also times scale={chunk.scale:.3g}, got {units.tolist()}; "
            "correct the estimator"
        )
    return scales
