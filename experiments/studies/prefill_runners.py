"""Who reads a prompt in `+exp=ttft`: each makes a function of token ids that returns the first token, and then some more."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from experiments.engines import build_engine
from experiments.lab import Lab
from shadowattn import checks
from shadowattn.engine.engine import Engine
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import losses_of
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.method import Method
from shadowattn.models.load import DTYPES

Read = Callable[[list[int], int], Iterable[int]]
"""(prompt, new tokens) → tokens, one by one."""


@dataclass(frozen=True)
class Runner(ABC):
    """One way to run a model. `retention` is that of its attention, 1 where it is dense."""

    @property
    def retention(self) -> float:
        return 1.0

    @abstractmethod
    def reader(self, lab: Lab) -> Read:
        """What reads prompts with the lab's model."""

    def losses(self, lab: Lab, windows: Tensor) -> list[float]:
        """The loss of each window [W, T], nat. Raises `InputError` where it gives no logits."""
        raise InputError(f"{type(self).__name__}: gives no logits, so that its loss cannot be measured")


@dataclass(frozen=True)
class Transformers(Runner):
    """The model as transformers runs it, attention by torch's SDPA, the whole prompt at once."""

    dtype: str = "float32"

    def __post_init__(self):
        checks.one_of("dtype", self.dtype, tuple(DTYPES))

    def reader(self, lab: Lab) -> Read:
        model = lab.loaded.model if lab.loaded.model.dtype == DTYPES[self.dtype] else _cast(lab, self.dtype)

        @torch.no_grad()
        def read(prompt: list[int], new_tokens: int) -> Iterable[int]:
            ids, cache = torch.tensor([prompt]), None
            for _ in range(new_tokens):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                yield int(ids)

        return read

    def losses(self, lab: Lab, windows: Tensor) -> list[float]:
        model = lab.loaded.model if lab.loaded.model.dtype == DTYPES[self.dtype] else _cast(lab, self.dtype)
        return losses_of(lambda window: prefill_chunks(model, window, chunk_tokens=512), windows).tolist()


@dataclass(frozen=True)
class OwnEngine(Runner):
    """`shadowattn.Engine`: blocks as `form` says, attention dense or of `keep`, the share of the keys, by `estimator`."""

    form: BlockForm = field(default_factory=BlockForm)
    keep: float = 1.0
    estimator: str = "int8_fused"
    query_block: int = 1
    block_score: str = "leading_query"
    attention_dtype: str = "float32"
    chunk_tokens: int = 512

    def __post_init__(self):
        self._method  # noqa: B018 - refuses what does not fit

    @property
    def retention(self) -> float:
        return self.keep

    @property
    def _method(self) -> Method:
        return Method(self.keep, estimator=self.estimator, query_block=self.query_block, block_score=self.block_score)

    def reader(self, lab: Lab) -> Read:
        engine = self._engine(lab)
        return lambda prompt, new_tokens: engine.generate(prompt, new_tokens=new_tokens)

    def losses(self, lab: Lab, windows: Tensor) -> list[float]:
        return losses_of(self._engine(lab).prefill_chunks, windows).tolist()

    def _engine(self, lab: Lab) -> Engine:
        options = {"chunk_tokens": self.chunk_tokens, "attention_dtype": self.attention_dtype}
        return build_engine(lab, self._method, self.form, **options)


def _cast(lab: Lab, dtype: str) -> PreTrainedModel:
    return copy.deepcopy(lab.loaded.model).to(DTYPES[dtype])
