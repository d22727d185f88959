"""`Method`: what runs instead of dense attention, as one value; and `attach`, which makes one and uses it at once."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, fields

from torch import Tensor
from transformers import PreTrainedModel

from shadowattn import checks
from shadowattn.budget import head_retentions
from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.kernels import choose
from shadowattn.models.registry import replace_attention
from shadowattn.models.shape import ModelShape, check_device, fingerprint, model_shape
from shadowattn.online.attention import Attended, SparseAttention
from shadowattn.online.estimators import Estimator, check_estimator_type
from shadowattn.online.estimators.int8_graph import Int8Graph
from shadowattn.online.estimators.oracle import Oracle
from shadowattn.online.functional import ESTIMATORS, check_attention, estimator_of, named_estimator
from shadowattn.online.pipeline import Pipeline
from shadowattn.types import RetentionProfile

CHUNK_TOKENS = 128
# Names that stand for the graphs of a bank, where one is given.
_OF_BANK = (None, "int8", "int8_graph")


@dataclass(frozen=True)
class Method:
    """An estimator, a rule of selection, retentions, kernels and a pipeline: all that decides what a model computes and how.

    `retention`: a number, which every head keeps of the keys that a row sees, or a `RetentionProfile`, each head its own. The
    estimate comes from `bank`, from `estimator` (an `Estimator`, or the name of one of ours), or of neither: `int8`, with
    scales measured on each chunk, of Q over its rows and of K over all keys so far. Rounding then depends on the chunk as a
    whole, its length and later tokens in it; with a bank only the choice of a bucket does.

    `chunk_tokens` rows go through at a time: as high as the bank's graphs, or 128. `query_block`, `block_score`, `sinks`,
    `recent` and `min_budget` say how lists are made (`selection.Rule`), `dense_above`, `decode`, `pipeline` and `observers` are
    those of `SparseAttention`, `kernel` that of `kernels.choose`.
    """

    retention: float | RetentionProfile = 0.2
    bank: GraphBank | None = None
    estimator: str | Estimator | None = None
    query_block: int = 1
    block_score: str = "leading_query"
    sinks: int = 0
    recent: int = 0
    min_budget: int = 1
    kernel: str = "auto"
    dense_above: float | str = 1.0
    decode: str = "dense"
    pipeline: Pipeline | None = None
    chunk_tokens: int | None = None
    observers: Sequence[Callable[[Attended], None]] = field(default=())

    def __post_init__(self):
        if not isinstance(self.retention, RetentionProfile):
            head_retentions(checks.number("retention", self.retention), 1)
        if self.bank is not None:
            checks.instance("bank", self.bank, GraphBank, "build one with GraphBank.build(profile, shapes)")
        if isinstance(self.estimator, str):
            checks.one_of("estimator", self.estimator, ESTIMATORS)
        elif self.estimator is not None:
            check_estimator_type(self.estimator)
        if self.bank is not None and isinstance(self.estimator, str) and self.estimator not in _OF_BANK:
            raise InputError(
                f"bank: estimator={self.estimator} does not use one; leave out the bank, or give estimator=int8_graph"
            )
        self._attention([[1.0]], Oracle())  # whatever else is wrong is refused now

    @property
    def has_graphs(self) -> bool:
        """Whether graphs make its estimates, which have a height of their own."""
        return self.bank is not None or (isinstance(self.estimator, Estimator) and self.estimator.graphs is not None)

    @contextmanager
    def __call__(self, model: PreTrainedModel) -> Iterator[SparseAttention]:
        """Makes a Hugging Face causal LM use this method for its prompts, and undoes it on leaving.

        Yields the `SparseAttention` in use, whose `counters` tell what ran. A forward pass of one token behind a cache with
        tokens is a decoding step; `with shadowattn.models.prompt():` says that it is the end of a prompt. Passes that verify
        drafted tokens go inside `with shadowattn.models.decoding():`. A profile has a row for each layer that attends, in the
        order of the layers (`models.attended_layers` names them): a hybrid's recurrent layers have none and stay as they are.
        Layers with a sliding window are computed dense within their window, whatever their row says, and counted in
        `counters.windowed_rows`. Copies and pickles of the model made inside are dense.
        docs/models.md says for each family of transformers whether it works, and if not, why.

        Attention runs where the model is. On a GPU that takes the torch kernels, no bank and pipeline=batched, and only counts
        and positions come back to the CPU.

        Raises `InputError` where the profile is another model's, the bank was not built for the model's head dimension or the
        profile's scales, the weights are on several devices or on one where a part of the method does not run, or the model's
        attention cannot be replaced; in a forward pass inside, where a gradient is needed, where a layer's attention is not
        plain causal softmax attention (a mask, a bias, padding, sinks, a soft cap, dropout), and where a layer that should have
        attended did not.
        """
        sparse = self.attention(model)
        with replace_attention(model, sparse, sparse.windowed):
            yield sparse

    def attention(self, model: PreTrainedModel) -> SparseAttention:
        """What computes the attention of this model's layers, as `__call__` puts it in place. Raises `InputError` as there."""
        shape, device = model_shape(model), check_device(model)
        table = self._table(model, shape)
        estimator = self._estimator(model, shape)
        if isinstance(self.retention, RetentionProfile):
            estimator.check_profile(self.retention)
        elif (bank := estimator.graphs) is not None and bank.built_for.fingerprint not in ("", fingerprint(model)):
            raise InputError(
                f"bank: it was built for {bank.built_for.model or 'another model'}, whose scales are not this model's; "
                "build one for this model: shadowattn.calibrate(model, tokenizer, text).bank(max_tokens)"
            )
        if estimator.graphs is None and estimator.made_for not in ("", fingerprint(model)):
            raise InputError(
                f"estimator: {type(estimator).__name__} was calibrated on another model ({estimator.made_for[:12]}); calibrate "
                "it on this one"
            )
        sparse = self._attention(table, estimator)
        sparse.check_place(device)
        choose(self.kernel, head_dim=shape.head_dim, dtype=model.dtype, device=device)
        return sparse

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, causal_offset: int, layer: int = 0, scale: float | None = None
    ) -> Tensor:
        """The same for one layer's tensors, without a model: q [H, Q, D], k and v [G, K, D], as for `sparse_attention`.

        `layer`: whose retentions, of a profile. INT8 scales that nothing else gives are those of the whole tensors.
        """
        causal_offset, scale = check_attention(q, k, v, causal_offset, scale)
        retention, layer = self.retention, checks.integer("layer", layer)
        if isinstance(retention, RetentionProfile):
            checks.integer("layer", layer, most=len(retention.retention) - 1)
            table = [list(row) for row in retention.retention]
            head_retentions(table[layer], q.shape[0])
        else:
            table = [[float(retention)] * q.shape[0]] * (layer + 1)
        if isinstance(self.estimator, Estimator):
            estimator = self.estimator
        else:
            estimator = Int8Graph(self.bank) if self.bank is not None else estimator_of(self._name, q, k)
        if isinstance(retention, RetentionProfile):
            estimator.check_profile(retention)
        end = causal_offset + q.shape[1]
        return self._attention(table, estimator)(layer, q[None], k[None, :, :end], v[None, :, :end], scale)[0]

    def _attention(self, table: list[list[float]], estimator: Estimator) -> SparseAttention:
        chunk_tokens = self.chunk_tokens
        if chunk_tokens is None:
            chunk_tokens = CHUNK_TOKENS if self.bank is None else max(shape.rows for shape in self.bank.shapes)
        return SparseAttention(
            table, estimator, chunk_tokens=chunk_tokens, query_block=self.query_block, block_score=self.block_score,
            sinks=self.sinks, recent=self.recent, min_budget=self.min_budget, kernel=self.kernel, dense_above=self.dense_above,
            decode=self.decode, pipeline=self.pipeline, observers=self.observers,
        )  # fmt: skip

    def _table(self, model: PreTrainedModel, shape: ModelShape) -> list[list[float]]:
        """Retentions [L][H] for this model."""
        profile = self.retention
        if not isinstance(profile, RetentionProfile):
            return [[float(profile)] * shape.heads] * shape.layers
        digest = fingerprint(model)
        if profile.fingerprint != digest:
            raise InputError(
                f"profile: it was made for {profile.model} ({profile.fingerprint[:12]}), the model is {digest[:12]}; "
                "run the offline stage for this model"
            )
        table = profile.retention
        if (len(table), len(table[0])) != (shape.layers, shape.heads):
            raise InputError(
                f"profile: expected {shape.layers} layers × {shape.heads} heads, got {len(table)} × {len(table[0])}; "
                "run the offline stage for this model"
            )
        return [list(layer) for layer in table]

    def _estimator(self, model: PreTrainedModel, shape: ModelShape) -> Estimator:
        """The given one, the bank's, or the fastest that measures its INT8 scales itself."""
        if isinstance(self.estimator, Estimator):
            return self.estimator
        if self.bank is not None and self.estimator in _OF_BANK:
            dims = sorted({s.head_dim for s in self.bank.shapes})
            if shape.head_dim not in dims:
                raise InputError(
                    f"head_dim: the model's is {shape.head_dim}, the bank was built for {dims}; build a bank for this model"
                )
            return Int8Graph(self.bank)
        return named_estimator(self._name, head_dim=shape.head_dim, dtype=model.dtype, device=model.device)

    @property
    def _name(self) -> str:
        """Of an estimator without a bank. Modes that launch for scores take graphs: the native kernels give lists."""
        launches = self.pipeline is not None and self.pipeline.mode in ("grouped", "planned")
        return "int8_graph" if launches and self.estimator in (None, "int8") else self.estimator or "int8"


def attach(
    model: PreTrainedModel,
    retention: float | RetentionProfile,
    bank: GraphBank | None = None,
    *,
    estimator: str | Estimator | None = None,
    **options,
) -> AbstractContextManager[SparseAttention]:
    """`Method(retention, bank, estimator, …)(model)`: `with attach(model, 0.2) as run:` is all it takes.

    `retention` is a number, which every head keeps, or a `RetentionProfile`; `options` are the other fields of `Method`, which
    says all the rest, and what is refused.
    """
    option_names = sorted({option.name for option in fields(Method)} - {"retention", "bank", "estimator"})
    unknown = sorted(set(options) - set(option_names))
    if unknown:
        raise InputError(f"attach: expected options out of {', '.join(option_names)}, got {', '.join(unknown)}")
    return Method(retention, bank, estimator, **options)(model)
