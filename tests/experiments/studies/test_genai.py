"""openvino-genai itself, on tiny models: what it reads, loses and generates is what the rows say of it."""

import signal
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from experiments.signal_stack import signal_stack
from experiments.studies.genai_sparse import PAGE, XAttention, layers_of
from experiments.studies.prefill_runners import GenAI
from tests.tiny import tiny_model

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
TOKENS = 14 * PAGE - 7  # of a window; the last page is cut


def lab(model: PreTrainedModel) -> SimpleNamespace:
    """What a runner asks of an experiment, with a tokenizer of one token a byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return SimpleNamespace(
        loaded=SimpleNamespace(model=model, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")),
        context_tokens=TOKENS, heldout=lambda: windows(2),
        units=lambda name: SimpleNamespace(get=lambda key, compute: compute()),
    )  # fmt: skip


def windows(number: int) -> Tensor:
    return torch.randint(0, 256, (number, TOKENS), generator=torch.Generator().manual_seed(3))


def masked_losses(model: PreTrainedModel, windows: Tensor, reads: Tensor) -> list[float]:
    """Of windows [N, T] where a head's row attends to the keys of `reads`, bool [N, H or 1, T, T]."""
    mask = torch.zeros(reads.shape).masked_fill(~reads, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(windows, attention_mask=mask).logits
    return [float(cross_entropy(of[:-1], window[1:])) for of, window in zip(logits, windows, strict=True)]


def causal(windows: Tensor) -> Tensor:
    return torch.ones(len(windows), 1, TOKENS, TOKENS, dtype=torch.bool).tril()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_dense_it_generates_and_loses_as_the_model_does(family):
    model = tiny_model(vocab=300, family=family)
    of, runner, (prompt,) = lab(model), GenAI(properties=EXACT), windows(1)[:, :37]
    expected = model.generate(
        prompt[None], attention_mask=torch.ones(1, 37, dtype=torch.int64), max_new_tokens=6, min_new_tokens=6, do_sample=False,
        pad_token_id=0,
    )[0, 37:].tolist()  # fmt: skip
    read = runner.reader(of, 43)
    assert [list(read(prompt.tolist(), 6)) for _ in range(2)] == [expected, expected]
    quality = runner.quality(of, windows(2))
    assert quality.losses == pytest.approx(masked_losses(model, windows(2), causal(windows(2))), abs=1e-4)


@pytest.mark.parametrize("keep", [0.3, 0.6])
def test_xattention_loses_what_the_blocks_that_its_kernel_chooses_lose(keep):
    """In one layer, whose queries and keys nothing sparse precedes."""
    model = tiny_model(vocab=300, layers=1)
    of = lab(model)
    runner = GenAI(sparse="xattention", keep=keep, block=PAGE, properties=EXACT).fitted(of)
    quality = runner.quality(of, windows(2))
    kernel, reads = XAttention(4, 2, 64, runner._properties), causal(windows(2)).repeat(1, 4, 1, 1)
    for window, one in zip(windows(2), reads, strict=True):
        ((q, k),) = layers_of(model, window)
        blocks = kernel.attended(q, k, runner.threshold, PAGE, runner.stride)
        one &= blocks.repeat_interleave(PAGE, 2)[:, :, :TOKENS]
    assert quality.density == pytest.approx(float(reads[0].sum() / (4 * causal(windows(1)).sum())))
    assert quality.density == pytest.approx(keep, rel=0.05)
    assert quality.losses == pytest.approx(masked_losses(model, windows(2), reads), abs=1e-4)
    dense = masked_losses(model, windows(2), causal(windows(2)))
    assert max(abs(a - b) for a, b in zip(quality.losses, dense, strict=True)) > 0.01


@pytest.mark.parametrize(("recent", "piece"), [(PAGE, 2 * PAGE), (3 * PAGE, PAGE)])
def test_trishape_loses_what_its_rule_leaves_out(recent, piece):
    """Pages between the first and the recent ones, but for the piece in which the last hundred tokens begin and those after."""
    model = tiny_model(vocab=300)
    runner = GenAI(sparse="trishape", start=PAGE, recent=recent, piece=piece, properties=EXACT)
    reads, last = causal(windows(2)), TOKENS
    for begin in range(0, TOKENS, piece):
        last = min(begin + piece, TOKENS)
        if TOKENS - last >= 100:
            reads[:, :, begin:last, PAGE : max(PAGE, begin // PAGE * PAGE - recent)] = False
    quality = runner.quality(lab(model), windows(2))
    assert quality.density == pytest.approx(float(reads[0].sum() / causal(windows(1)).sum()))
    assert quality.losses == pytest.approx(masked_losses(model, windows(2), reads), abs=1e-4)


def test_a_signal_after_it_is_handled():
    """openvino-genai leaves a thread a signal stack that is unmapped, on which Python would handle the next signal."""

    def place() -> tuple[int, int]:
        stack = signal_stack()
        return stack.sp, stack.size

    before, of, runner = place(), lab(tiny_model(vocab=300)), GenAI(properties=EXACT)
    read = runner.reader(of, 43)
    assert place() == before
    list(read(list(range(37)), 2))
    runner.quality(of, windows(1))
    del read
    assert place() == before
    handled, earlier = [], signal.getsignal(signal.SIGUSR2)
    signal.signal(signal.SIGUSR2, lambda *_: handled.append(True))
    try:
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, earlier)
    assert handled
