"""lm-evaluation-harness with a method: its model for transformers, whose prompts go through `attach` (`shadowattn[lm-eval]`)."""

import inspect
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.method import Method
from shadowattn.offline.profile import load_profile
from shadowattn.online.attention import Counters

Attach = Callable[[PreTrainedModel], AbstractContextManager]

_METHOD_OPTIONS = {option.name for option in fields(Method)} - {"observers", "pipeline"}


@register_model("shadowattn")
class ShadowAttnLM(HFLM):
    """A causal language model whose prompts are computed by a method, one prompt at a time.

    `method`: a `Method`, or any function that makes a context manager of the model; None: dense attention. From the harness's
    command line (`--model_args`) the fields of `Method` are given by name instead: `retention`, a number or a profile's file;
    `bank`, a folder; `estimator`, a name; and so on. Everything else is `HFLM`'s. `counters` sums up what ran.

    Prompts are never padded to a common length, since a padded row would be ranked and selected like any other: whatever
    `batch_size` says, each goes alone. Raises `InputError` where a model is not a causal one and where options do not fit.
    """

    def __init__(self, pretrained: str | PreTrainedModel, *, method: Attach | None = None, batch_size: Any = 1, **options):
        method_options = {name: options.pop(name) for name in sorted(_METHOD_OPTIONS & set(options))}
        if method is not None and method_options:
            raise InputError(f"method: expected either a method or its options, got both: {', '.join(method_options)}")
        unknown = sorted(set(options) - set(inspect.signature(HFLM.__init__).parameters))
        if unknown:  # HFLM would hand them to the model's configuration
            raise InputError(
                f"model_args: expected options of HFLM, or of Method ({', '.join(sorted(_METHOD_OPTIONS))}), got "
                f"{', '.join(unknown)}"
            )
        self.attach = _method(method_options) if method_options else method
        if str(batch_size) != "1":
            warnings.warn(f"batch_size={batch_size}: prompts go one at a time, so that none is padded", stacklevel=2)
        super().__init__(pretrained, batch_size=1, **options)
        if self.backend != "causal":
            raise InputError(f"pretrained: expected a causal language model, got one of backend {self.backend}")
        if self.tokenizer.eos_token_id is None:  # the harness begins every text with BOS, or with EOS, and ends it with EOS
            raise InputError("tokenizer: expected one with an EOS token, got none; set tokenizer.eos_token")
        self.counters = Counters()

    def loglikelihood(self, requests, disable_tqdm=False):
        with self._attached():
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        with self._attached():
            return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests, disable_tqdm=False):
        with self._attached():
            return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _model_call(self, inps, attn_mask=None, labels=None):
        if len(inps) != 1:
            raise RuntimeError(
                f"expected one prompt at a time, got {len(inps)}: a padded one would be selected from like any other"
            )
        return super()._model_call(inps, attn_mask, labels)

    @contextmanager
    def _attached(self):
        """The method attached once for all requests of a call; what ran is counted at the end."""
        with nullcontext() if self.attach is None else self.attach(self.model) as run:
            yield
        if run is not None:
            self.counters += run.counters


def _method(options: dict[str, Any]) -> Method:
    """A method of what a command line can say."""
    if isinstance(options.get("retention"), str):
        options = options | {"retention": load_profile(Path(options["retention"]).expanduser())}
    if isinstance(options.get("bank"), str):
        options = options | {"bank": GraphBank.load(Path(options["bank"]).expanduser())}
    return Method(**options)


def main() -> None:
    """The harness's own command, which then knows `--model shadowattn`: `python -m shadowattn.evaluation.harness run …`."""
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
