"""Who reads a prompt in `+exp=ttft`: each makes a function of token ids that returns the first token, and then some more."""

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory
from threading import Thread
from types import ModuleType
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from experiments.engines import build_engine, check_forms
from experiments.first_looks import FirstLook
from experiments.gguf_files import check_gguf, write_gguf
from experiments.lab import Lab
from experiments.progress import say
from experiments.signal_stack import Kept
from experiments.studies import genai_sparse
from shadowattn import checks
from shadowattn.engine.engine import Engine
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import losses_of
from shadowattn.graphs.core import core
from shadowattn.graphs.decoder.form import BlockForm
from shadowattn.graphs.decoder.passes import LastTokenSlice, rewritten
from shadowattn.graphs.decoder.whole import BEAM, LLM_INPUTS, LOGITS, llm_graph
from shadowattn.method import Method
from shadowattn.models.decoder import check_family
from shadowattn.models.load import DTYPES
from shadowattn.online.estimators.base import check_rule
from shadowattn.online.estimators.hierarchical import Hierarchical
from shadowattn.online.selection import Rule
from shadowattn.types import FirstLookLosses

_LOGITS_AT_ONCE = 512  # rows
_LOOKED_AT_ONCE = 512  # rows; each holds several float32 a head and key
_LEAST_LOOKED_AT = 256  # tokens: in shorter windows a first look leaves hardly a key out
_SPARE_PAGES = 8  # of a KV cache, beyond those of a whole prompt

Read = Callable[[list[int], int], Iterable[int]]
"""(prompt, new tokens) → tokens, one by one."""


@dataclass(frozen=True)
class Quality:
    """The loss of each window, nat, and the share of the keys that its tokens attend to, not a number where that is unknown."""

    losses: list[float]
    density: float = 1.0


@dataclass(frozen=True)
class Runner(ABC):
    """One way to run a model. `retention` is that of its attention, 1 where it is dense."""

    @property
    def retention(self) -> float:
        return 1.0

    @property
    def output_layer(self) -> str:
        """In which arithmetic the output layer is, where that is the runner's to say."""
        return ""

    @property
    def setting(self) -> str:
        """What decides which keys it reads, in words, where that is not said by `retention`."""
        return ""

    def check(self, lab: Lab) -> None:  # noqa: B027 - most need nothing
        """Raises `InputError` where what it needs is not here."""

    def fitted(self, lab: Lab) -> "Runner":
        """The runner with what it has to find in text before it reads, such as a threshold."""
        return self

    @abstractmethod
    def reader(self, lab: Lab, most_tokens: int) -> Read:
        """What reads prompts with the lab's model. `most_tokens`: of a prompt and its new tokens, for which memory is held."""

    @abstractmethod
    def quality(self, lab: Lab, windows: Tensor) -> Quality:
        """Of windows [W, T]."""


@dataclass(frozen=True)
class Transformers(Runner):
    """The model as transformers runs it, attention by torch's SDPA, the whole prompt at once."""

    dtype: str = "float32"

    def __post_init__(self):
        checks.one_of("dtype", self.dtype, tuple(DTYPES))

    def reader(self, lab: Lab, most_tokens: int) -> Read:
        model = lab.loaded.model if lab.loaded.model.dtype == DTYPES[self.dtype] else _cast(lab, self.dtype)

        @torch.no_grad()
        def read(prompt: list[int], new_tokens: int) -> Iterable[int]:
            ids, cache = torch.tensor([prompt]), None
            for _ in range(new_tokens):
                out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
                yield int(ids)

        return read

    def quality(self, lab: Lab, windows: Tensor) -> Quality:
        model = lab.loaded.model if lab.loaded.model.dtype == DTYPES[self.dtype] else _cast(lab, self.dtype)
        return Quality(losses_of(lambda window: prefill_chunks(model, window, chunk_tokens=512), windows).tolist())


@dataclass(frozen=True)
class OwnEngine(Runner):
    """`shadowattn.Engine`: blocks as `form` says, attention dense or of `keep`, the share of the keys, by `estimator`.

    `candidates` and `flat_share` are `hierarchical`'s, on whose heads a window of calibration text decides: one as long as the
    evaluation's, where quality tables take some of 2048 tokens. K has no key offset. `look_ahead`: the first layer whose lists
    are made by what enters the layer before.
    """

    form: BlockForm = field(default_factory=BlockForm)
    keep: float = 1.0
    estimator: str = "int8_fused"
    candidates: float = 1.25
    flat_share: float = 0.0
    query_block: int = 1
    block_score: str = "leading_query"
    attention_dtype: str = "float32"
    chunk_tokens: int = 512
    look_ahead: int | None = None

    def __post_init__(self):
        method = self._method()  # refuses what does not fit
        if self.estimator == "hierarchical":
            Hierarchical.check_settings(0, 0, flat_share=self.flat_share)
            check_rule(Rule(self.query_block, self.block_score), Hierarchical)
        elif self.flat_share:
            raise InputError(f"flat_share: expected estimator=hierarchical beside it, got {self.estimator}; leave flat_share out")
        if self.flat_share and method.retention >= 1:
            raise InputError("flat_share: expected a share of the keys below 1, where there are lists; set keep, such as 0.2")
        if self.look_ahead is not None:
            checks.integer("look_ahead", self.look_ahead, least=1)
            if method.retention >= 1:
                raise InputError("look_ahead: expected a share of the keys below 1, where there are lists; set keep, such as 0.2")

    def check(self, lab: Lab) -> None:
        check_forms(lab, self.form)
        if self.look_ahead is not None:
            checks.integer("look_ahead", self.look_ahead, least=1, most=lab.shape.layers - 1)
        if self.flat_share and lab.context_tokens < _LEAST_LOOKED_AT:
            raise InputError(
                f"flat_share: expected windows of {_LEAST_LOOKED_AT} tokens or more, where a first look leaves keys out, got "
                f"{lab.context_tokens}; set evaluation.context_tokens, or flat_share=0"
            )

    @property
    def retention(self) -> float:
        return self.keep

    @property
    def output_layer(self) -> str:
        return self.form.head

    @property
    def setting(self) -> str:
        if self.estimator != "hierarchical":
            return ""
        return f"a first look lets {self._unspared.candidates:g} times through, {self.flat_share:.0%} of the heads spared"

    def fitted(self, lab: Lab) -> "OwnEngine":
        """As it is. What it takes of calibration text is measured now: its memory is not a reader's."""
        if self.form.needs_ranges:
            _ = lab.offline.block_ranges
        if self.flat_share:
            self._first_look(lab)
        return self

    def _method(self, flat_share: float = 0.0, first_look: FirstLookLosses | None = None) -> Method:
        estimator = self.estimator
        if estimator == "hierarchical":
            estimator = replace(self._unspared, flat_share=flat_share, first_look=first_look)
        how = {"query_block": self.query_block, "block_score": self.block_score, "chunk_tokens": self.chunk_tokens}
        return Method(self.keep, estimator=estimator, **how)

    @property
    def _unspared(self) -> Hierarchical:
        return Hierarchical(candidates=self.candidates)

    def _first_look(self, lab: Lab) -> FirstLookLosses:
        unspared = self._unspared
        return FirstLook(lab.context_tokens, 1, _LOOKED_AT_ONCE, unspared.candidates, unspared.block_rows).losses(lab)

    def reader(self, lab: Lab, most_tokens: int) -> Read:
        engine = self._engine(lab)
        engine.compile(self.chunk_tokens)
        return lambda prompt, new_tokens: engine.generate(prompt, new_tokens=new_tokens)

    def quality(self, lab: Lab, windows: Tensor) -> Quality:
        engine = self._engine(lab)
        losses = losses_of(engine.prefill_chunks, windows).tolist()
        return Quality(losses, engine.attention.counters.density if self.keep < 1 else 1.0)

    def _engine(self, lab: Lab) -> Engine:
        options = {"chunk_tokens": self.chunk_tokens, "attention_dtype": self.attention_dtype, "look_ahead": self.look_ahead}
        method = self._method(self.flat_share, self._first_look(lab)) if self.flat_share else self._method()
        return build_engine(lab, method, self.form, **options)


@dataclass(frozen=True)
class Stateful(Runner):
    """The lab's model as one graph of OpenVINO with keys and values as its state, on the CPU; a prompt in one piece.

    `properties` of OpenVINO, such as KV_CACHE_PRECISION: f32, which is u8 otherwise. INFERENCE_PRECISION_HINT is f32 unless they
    say so.
    """

    properties: dict[str, Any] = field(default_factory=dict)

    def check(self, lab: Lab) -> None:
        check_family(lab.loaded.model)
        same = op.parameter([1], ov.Type.f32)
        try:
            core().compile_model(ov.Model([op.result(same)], [same], "probe"), "CPU", dict(self.properties))
        except RuntimeError as error:
            said = str(error).strip().splitlines()[-1]
            raise InputError(
                f"properties: OpenVINO refuses {dict(self.properties)} ({said}); give properties of its CPU device"
            ) from None

    def reader(self, lab: Lab, most_tokens: int) -> Read:
        request = self._request(lab, last_token=True)

        def read(prompt: list[int], new_tokens: int) -> Iterable[int]:
            request.reset_state()
            ids, held = prompt, 0
            for _ in range(new_tokens):
                held += len(ids)
                ids = [int(_step(request, ids, held)[0, -1].argmax())]
                yield ids[0]

        return read

    def quality(self, lab: Lab, windows: Tensor) -> Quality:
        request = self._request(lab, last_token=False)

        def chunks(window: Tensor) -> Iterator[tuple[slice, Tensor]]:
            request.reset_state()
            for start in range(0, len(window), _LOGITS_AT_ONCE):
                rows = slice(start, min(start + _LOGITS_AT_ONCE, len(window)))
                yield rows, torch.from_numpy(_step(request, window[rows].tolist(), rows.stop)[0])

        return Quality(losses_of(chunks, windows).tolist())

    def _request(self, lab: Lab, *, last_token: bool) -> ov.InferRequest:
        graph = llm_graph(_in_float32(lab))
        if last_token:
            rewritten(graph, LastTokenSlice())
        own = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
        return core().compile_model(graph, "CPU", own | dict(self.properties)).create_infer_request()


def _step(request: ov.InferRequest, ids: list[int], held: int) -> np.ndarray:
    """The logits of tokens that are the last of `held`."""
    given = np.array([ids]), np.ones((1, held), np.int64), np.arange(held - len(ids), held)[None]
    return request.infer(dict(zip(LLM_INPUTS, given, strict=True)) | {BEAM: np.zeros(1, np.int32)})[LOGITS]


@dataclass(frozen=True)
class GenAI(Runner):
    """openvino-genai on the CPU, of `path`: a GGUF file or an OpenVINO folder of the lab's model; None: that model, exported.

    `weights` of what is exported: float32, or int8, compressed by NNCF with an offset a channel, as optimum-intel does.

    `sparse`: none; xattention with its threshold, block and stride; trishape with the keys at the start and the recent ones that
    it keeps. `keep`: the share of the keys to attend to in the evaluation's first window, for which a threshold or the number of
    recent keys is found. A prompt is read in one piece, by trishape in pieces of `piece` tokens: it leaves out keys of earlier
    pieces, and with one piece it would be dense. `cache_gb`: of its KV cache; None: what a prompt and its new
    tokens take, since pages are used in turn, and a larger cache would fill. `properties` of OpenVINO, such as
    INFERENCE_PRECISION_HINT: f32.
    """

    path: str | None = None
    sparse: str = "none"
    keep: float | None = None
    weights: str = "float32"
    threshold: float = 0.8
    block: int = 64
    stride: int = 8
    start: int = 128
    recent: int = 1920
    piece: int = 512
    cache_gb: int | None = None
    properties: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        checks.one_of("weights", self.weights, ("float32", "int8"))
        if self.path is not None and self.weights != "float32":
            raise InputError(f"weights: expected path=null beside it, where a model is exported, got {self.path!r}")
        checks.one_of("sparse", self.sparse, ("none", "xattention", "trishape"))
        checks.integer("piece", self.piece, least=1)
        if self.cache_gb is not None:
            checks.integer("cache_gb", self.cache_gb, least=1)
        if checks.integer("block", self.block, least=1) % genai_sparse.PAGE:
            raise InputError(f"block: expected a multiple of {genai_sparse.PAGE}, the plugin's page of keys, got {self.block}")
        if self.keep is None:
            return
        if self.sparse == "none":
            raise InputError("keep: expected a sparse mode that can keep a share of the keys, got sparse=none; set sparse")
        if not 0 < checks.number("keep", self.keep) < 1:
            raise InputError(f"keep: expected a share of the keys in (0, 1), or null, got {self.keep}")

    def check(self, lab: Lab) -> None:
        if self.path is not None:
            _check_path(self.path)
        _openvino_genai()
        if self.keep is not None and self.sparse == "trishape":
            self._tri_shape.recent_for(self.keep, lab.context_tokens)
        if self.path is not None:
            return
        check_family(lab.loaded.model)
        if lab.loaded.tokenizer.eos_token_id is None:
            raise InputError("openvino_genai: expected a tokenizer with an EOS token, got none; set path to a file of the model")

    @property
    def retention(self) -> float:
        return 1.0 if self.sparse == "none" else float("nan") if self.keep is None else self.keep

    @property
    def setting(self) -> str:
        return {"none": "", "xattention": f"threshold {self.threshold:.3g}", "trishape": f"{self.recent} recent"}[self.sparse]

    def fitted(self, lab: Lab) -> "GenAI":
        if self.keep is None:
            return self
        if self.sparse == "trishape":
            return replace(self, recent=self._tri_shape.recent_for(self.keep, lab.context_tokens))
        key = f"{self.keep}-{self.block}-{self.stride}"
        return replace(self, threshold=lab.units("thresholds").get(key, partial(self._threshold, lab)))

    def reader(self, lab: Lab, most_tokens: int) -> Read:
        genai = _openvino_genai()
        options = {"scheduler_config": self._scheduler(genai, most_tokens)} | self._properties
        with self._model(lab) as path:
            pipeline = Kept(lambda: genai.LLMPipeline(path, "CPU", **options))

        def read(prompt: list[int], new_tokens: int) -> Iterable[int]:
            ids = ov.Tensor(np.array([prompt], np.int64))
            inputs = genai.TokenizedInputs(ids, ov.Tensor(np.ones((1, len(prompt)), np.int64)))
            how = genai.GenerationConfig(max_new_tokens=new_tokens, ignore_eos=True, do_sample=False)
            return _pulled(genai, partial(pipeline.built.generate, inputs, how))

        return read

    def quality(self, lab: Lab, windows: Tensor) -> Quality:
        """Losses by the log-probabilities of a prompt that is echoed: of its first token there is none. XAttention's share of the
        keys is that of the first window, by the queries and keys of the lab's model in a dense prefill.
        """
        genai = _openvino_genai()
        scheduler = self._scheduler(genai, windows.shape[1] + 1)
        with self._model(lab) as path:
            kept = Kept(lambda: genai.ContinuousBatchingPipeline(path, scheduler, "CPU", self._properties))
        how = genai.GenerationConfig(max_new_tokens=1, echo=True, logprobs=1, ignore_eos=True, do_sample=False)
        found = []
        for number, window in enumerate(windows):
            handle = kept.built.add_request(number, ov.Tensor(window[None].numpy()), how)
            while kept.built.has_non_finished_requests():
                kept.built.step()
            (out,) = handle.read_all()
            found.append(-float(np.mean(out.generated_log_probs[1 : len(window)])))
        return Quality(found, self._density(lab, windows))

    @property
    def _tri_shape(self) -> genai_sparse.TriShape:
        return genai_sparse.TriShape(self.start, self.recent, self.piece)

    def _density(self, lab: Lab, windows: Tensor) -> float:
        if self.sparse == "xattention":
            return self._asked(lab, windows[0])(self.threshold)
        return self._tri_shape.density(windows.shape[1]) if self.sparse == "trishape" else 1.0

    def _threshold(self, lab: Lab) -> float:
        """By the window whose share of the keys the rows have: runners are held to each other at equal shares, and a threshold of
        other text reads another share there.
        """
        say(f"XAttention: a threshold for {self.keep:g} of the keys, on {lab.context_tokens} tokens")
        return genai_sparse.threshold_for(self.keep, self._asked(lab, lab.heldout()[0]))

    def _asked(self, lab: Lab, window: Tensor) -> Callable[[float], float]:
        """The share of the keys by XAttention's threshold."""
        layers = genai_sparse.layers_of(lab.loaded.model, window)
        (heads, _, head_dim), (kv_heads, _, _) = (x.shape for x in layers[0])
        kernel = genai_sparse.XAttention(heads, kv_heads, head_dim, self._properties)
        return lambda threshold: genai_sparse.density(layers, kernel, threshold, self.block, self.stride)

    @contextmanager
    def _model(self, lab: Lab) -> Iterator[str]:
        """Where the model lies while it is loaded."""
        if self.path is not None:
            yield str(Path(self.path).expanduser())
            return
        with TemporaryDirectory() as folder:
            export(_in_float32(lab), lab.loaded.tokenizer, Path(folder), weights=self.weights)
            yield folder

    @property
    def _properties(self) -> dict[str, Any]:
        return {"INFERENCE_NUM_THREADS": torch.get_num_threads()} | self.properties

    def _scheduler(self, genai: ModuleType, most_tokens: int) -> Any:
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.enable_prefix_caching = self.cache_gb or 0, False
        if self.cache_gb is None:
            scheduler.num_kv_blocks = math.ceil(most_tokens / genai_sparse.PAGE) + _SPARE_PAGES
        scheduler.max_num_batched_tokens = self.piece if self.sparse == "trishape" else most_tokens
        if self.sparse != "none":
            scheduler.use_sparse_attention = True
            sparse = scheduler.sparse_attention_config
            sparse.mode = getattr(genai.SparseAttentionMode, self.sparse.upper())
            sparse.xattention_threshold, sparse.xattention_block_size = self.threshold, self.block
            sparse.xattention_stride = self.stride
            sparse.num_retained_start_tokens_in_cache, sparse.num_retained_recent_tokens_in_cache = self.start, self.recent
        return scheduler


@dataclass(frozen=True)
class LlamaCpp(Runner):
    """llama.cpp by llama-cpp-python on the CPU, of `path`: a GGUF file of the lab's model; None: that model, written in Q8_0.

    It reads `batch` tokens at a time.
    """

    path: str | None = None
    batch: int = 512

    def __post_init__(self):
        checks.integer("batch", self.batch, least=1)

    def check(self, lab: Lab) -> None:
        if self.path is None:
            check_gguf(lab.loaded.model.config)
        else:
            _check_path(self.path)
        _llama_cpp()

    def reader(self, lab: Lab, most_tokens: int) -> Read:
        model = self._model(lab, most_tokens)

        def read(prompt: list[int], new_tokens: int) -> Iterable[int]:
            return islice(model.generate(prompt, top_k=1, temp=0.0), new_tokens)

        return read

    def quality(self, lab: Lab, windows: Tensor) -> Quality:
        model, found = self._model(lab, windows.shape[1], logits_all=True), []
        for window in windows:
            model.reset()
            model.eval(window.tolist())
            found.append(_mean_loss(torch.from_numpy(model.scores), window))
        return Quality(found)

    def _model(self, lab: Lab, most_tokens: int, **options: bool) -> Any:
        threads = torch.get_num_threads()
        with TemporaryDirectory() as folder:  # llama.cpp maps the file, which POSIX keeps as long as that
            path = Path(folder) / "model.gguf" if self.path is None else Path(self.path).expanduser()
            if self.path is None:
                write_gguf(lab.loaded.model, path)
            return _llama_cpp().Llama(
                str(path), n_ctx=most_tokens, n_threads=threads, n_threads_batch=threads, n_batch=self.batch,
                verbose=False, **options,
            )  # fmt: skip


def _mean_loss(logits: Tensor, window: Tensor) -> float:
    """Of a window [T]'s tokens behind the first, by logits [T or more, V]; some rows at a time, since these take gigabytes."""
    rows = [slice(start, min(start + _LOGITS_AT_ONCE, len(window) - 1)) for start in range(0, len(window) - 1, _LOGITS_AT_ONCE)]
    losses = [torch.nn.functional.cross_entropy(logits[of], window[1:][of], reduction="sum") for of in rows]
    return float(sum(losses)) / (len(window) - 1)


def _in_float32(lab: Lab) -> PreTrainedModel:
    """The lab's model, for OpenVINO's graphs: one that is converted in bfloat16 loses over a nat in long prompts."""
    return lab.loaded.model if lab.loaded.model.dtype == torch.float32 else _cast(lab, "float32")


def export(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path, *, weights: str = "float32") -> None:
    """Writes a float32 model with its tokenizer as openvino-genai reads them; `weights` as `GenAI` says."""
    from openvino_tokenizers import convert_tokenizer  # comes with openvino-genai

    ov.save_model(exported(model, weights), folder / "openvino_model.xml", compress_to_fp16=False)
    for name, graph in zip(("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True):
        ov.save_model(graph, folder / f"openvino_{name}.xml")
    model.config.save_pretrained(folder)
    GenerationConfig(eos_token_id=tokenizer.eos_token_id).save_pretrained(folder)


def exported(model: PreTrainedModel, weights: str) -> ov.Model:
    """The graph that openvino-genai is given."""
    if weights == "float32":
        return llm_graph(model)
    import nncf  # a second to import, and only for this

    nncf.set_log_level(logging.ERROR)
    return nncf.compress_weights(llm_graph(model), mode=nncf.CompressWeightsMode.INT8_ASYM)


def _check_path(path: str) -> None:
    if not Path(path).expanduser().exists():
        raise InputError(f"path: expected a GGUF file or an OpenVINO folder, got {path!r}; set path=FILE")


def _llama_cpp() -> ModuleType:
    try:
        import llama_cpp
    except ImportError as error:
        raise InputError(
            f"llama_cpp: expected the package, found none ({error}); install it with: pip install llama-cpp-python"
        ) from error
    return llama_cpp


def _openvino_genai() -> ModuleType:
    try:
        import openvino_genai
    except ImportError as error:
        raise InputError(
            f"openvino_genai: expected the package, found none ({error}); install it with: pip install openvino-genai=="
            f"{ov.__version__.split('-')[0]}"
        ) from error
    return openvino_genai


def _pulled(genai: ModuleType, generate: Callable[[Any], object]) -> Iterator[int]:
    """The tokens that `generate` hands to a streamer, as they come."""
    made: Queue[int | BaseException | None] = Queue()

    class Put(genai.StreamerBase):
        def write(self, token: int | list[int]) -> Any:
            for one in token if isinstance(token, list) else [token]:
                made.put(int(one))
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is held back."""

    def run() -> None:
        try:
            generate(Put())
            made.put(None)
        except BaseException as error:
            made.put(error)

    worker = Thread(target=run)
    worker.start()
    try:
        while (one := made.get()) is not None:
            if isinstance(one, BaseException):
                raise one
            yield one
    finally:
        worker.join()


def _cast(lab: Lab, dtype: str) -> PreTrainedModel:
    return copy.deepcopy(lab.loaded.model).to(DTYPES[dtype])
