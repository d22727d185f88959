"""lm-evaluation-harness with a method: its model for transformers, whose prompts go through `attach` (`shadowattn[lm-eval]`)."""

import inspect
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from shadowattn.errors import InputError
from shadowattn.graphs.bank import GraphBank
from shadowattn.method import Method
from shadowattn.offline.profile import load_profile
from shadowattn.online.attention import Counters

Attach = Callable[[PreTrainedModel], AbstractContextManager]

_METHOD_OPTIONS = {option.name for option in fields(Method)} - {"observers", "pipeline"}
_NOT_GIVEN = object()


@register_model("shadowattn")
class ShadowAttnLM(HFLM):
    """A causal language model whose prompts are computed by a method, one prompt at a time.

    `method`: a `Method`, or any function that makes a context manager of the model; None: dense attention. From the harness's
    command line (`--model_args`) the fields of `Method` are given by name instead: `retention`, a number or a profile's file;
    `bank`, a folder; `estimator`, a name; and so on. Everything else is `HFLM`'s, but that `device` is the CPU where torch has no
    CUDA. `counters` sums up what ran; a warning says where a method of a retention below 1 left every head dense.

    Prompts are never padded to a common length, since a padded row would be ranked and selected like any other: whatever
    `batch_size` says, each goes alone.

    A prompt that is too long with its answer is cut from the left, as `HFLM` does. Of every question, by the name of its task and
    its number there, `tokens` holds the length of the longest prompt with its answer before any cut; `cut` holds the questions
    with a prompt that was cut. Text whose likelihood is rolled over windows is never cut.

    A prompt begins with one BOS at most. Rolled text has the one that the harness puts before it, as it does for tokenizers that
    put none; `HFLM` would give text of a tokenizer that puts its own two.

    Raises `InputError` where a model is not a causal one, where no method is given or options do not fit, on a doubled BOS, and
    on a prompt that would be cut unless `allow_cut`.
    """

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        method: Attach | None = _NOT_GIVEN,
        batch_size: Any = 1,
        allow_cut: bool = True,
        **options,
    ):
        method_options = {name: options.pop(name) for name in sorted(_METHOD_OPTIONS & set(options))}
        if method is not _NOT_GIVEN and method_options:
            raise InputError(f"method: expected either a method or its options, got both: {', '.join(method_options)}")
        unknown = sorted(set(options) - set(inspect.signature(HFLM.__init__).parameters))
        if unknown:  # HFLM would hand them to the model's configuration
            raise InputError(
                f"model_args: expected options of HFLM, or of Method ({', '.join(sorted(_METHOD_OPTIONS))}), got "
                f"{', '.join(unknown)}"
            )
        if method is _NOT_GIVEN and "retention" not in method_options:
            raise InputError(
                "model_args: expected a retention, a share of the keys or a profile's file, got none; dense attention is the "
                "harness's --model hf, or in Python method=None"
            )
        self.attach = _method(method_options) if method_options else method
        if not torch.cuda.is_available() and options.get("device") is None:
            options["device"] = "cpu"
        if str(batch_size) != "1":
            warnings.warn(f"batch_size={batch_size}: prompts go one at a time, so that none is padded", stacklevel=2)
        super().__init__(pretrained, batch_size=1, **options)
        if self.backend != "causal":
            raise InputError(f"pretrained: expected a causal language model, got one of backend {self.backend}")
        if self.tokenizer.eos_token_id is None:  # the harness begins every text with BOS, or with EOS, and ends it with EOS
            raise InputError("tokenizer: expected one with an EOS token, got none; set tokenizer.eos_token")
        self.counters = Counters()
        self.allow_cut = allow_cut
        self.tokens: dict[tuple[str, int], int] = {}
        self.cut: set[tuple[str, int]] = set()
        self._asked: list[Instance] = []  # whose prompts are read; none for windows of rolled text

    def loglikelihood(self, requests, disable_tqdm=False):
        self._asked = requests
        with self._attached():
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        self._asked = []
        puts_bos, self.add_bos_token = self.add_bos_token, False
        try:
            for request in requests:
                tokens = len(self.tok_encode(request.args[0]))
                self._note(request, tokens, room=tokens)
            with self._attached():
                return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)
        finally:
            self.add_bos_token = puts_bos

    def generate_until(self, requests, disable_tqdm=False):
        """One request after another, so that it is known whose prompt is cut; the longest ones first, as `HFLM` takes them."""
        answers = [""] * len(requests)
        longest_first = sorted(range(len(requests)), key=lambda index: -len(requests[index].args[0]))
        with self._attached():
            for index in tqdm(longest_first, desc="Running generate_until requests", disable=disable_tqdm):
                self._asked = [requests[index]]
                (answers[index],) = super().generate_until(self._asked, disable_tqdm=True)
        return answers

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, override_bs=None):
        if self._asked:
            for asked, (_, context, continuation) in zip(self._asked, requests, strict=True):
                self._note(asked, len(context) + len(continuation), room=self.max_length + 1)  # the last one is not read
        return super()._loglikelihood_tokens(requests, disable_tqdm=disable_tqdm, override_bs=override_bs)

    def tok_batch_encode(self, strings, padding_side="left", left_truncate_len=None, truncation=False):
        if left_truncate_len:  # what generation leaves of the context
            ids, _ = super().tok_batch_encode(strings, padding_side)
            self._note(self._asked[0], ids.shape[1] + self.max_length - left_truncate_len, room=self.max_length)
        return super().tok_batch_encode(strings, padding_side, left_truncate_len, truncation)

    def _note(self, request: Instance, tokens: int, *, room: int) -> None:
        """Notes the `tokens` of a prompt with its answer, and that it is cut where they are more than `room`."""
        question = (request.task_name, request.doc_id)
        self.tokens[question] = max(tokens, self.tokens.get(question, 0))
        if tokens <= room:
            return
        if not self.allow_cut:
            raise InputError(
                f"{request.task_name}: expected prompts of at most the context of {self.max_length} tokens, got {tokens} with "
                "the answer; use fewer examples in the prompt, a model with a longer context, or allow_cut=true"
            )
        self.cut.add(question)

    def _model_call(self, inps, attn_mask=None, labels=None):
        if len(inps) != 1:
            raise RuntimeError(
                f"expected one prompt at a time, got {len(inps)}: a padded one would be selected from like any other"
            )
        self._check_bos(inps)
        return super()._model_call(inps, attn_mask, labels)

    def _model_generate(self, context, *args, **options):
        self._check_bos(context)
        return super()._model_generate(context, *args, **options)

    def _check_bos(self, prompts: Tensor) -> None:
        bos = self.tokenizer.bos_token_id
        if bos is not None and prompts[0, :2].tolist() == [bos, bos]:
            raise InputError(
                "prompt: expected at most one BOS token at its start, got two; take the BOS token out of the task's texts or of "
                "the chat template, or set add_bos_token=false"
            )

    @contextmanager
    def _attached(self):
        """The method attached once for all requests of a call; what ran is counted at the end."""
        with nullcontext() if self.attach is None else self.attach(self.model) as run:
            yield
        if run is not None:
            self.counters += run.counters
            if isinstance(self.attach, Method) and self.attach.retention != 1 and not run.counters.sparse_rows:
                warnings.warn("the sparse path was not used: every head went dense", stacklevel=2)


def _method(options: dict[str, Any]) -> Method:
    """A method of what a command line can say."""
    if isinstance(options.get("retention"), str):
        options = options | {"retention": load_profile(Path(options["retention"]).expanduser())}
    if isinstance(options.get("bank"), str):
        options = options | {"bank": GraphBank.load(Path(options["bank"]).expanduser())}
    return Method(**options)


def main() -> int:
    """The harness's own command, which then knows `--model shadowattn`: `python -m shadowattn.evaluation.harness run …`."""
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # a folder or a task that is not there, in the words of those who looked for it
        print(f"error: {type(error).__name__}: {error}; python -m lm_eval ls tasks lists the tasks", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
