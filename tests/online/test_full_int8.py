"""NPU-Full: whole attention in static INT8, held to its definition, and in a model."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shadowattn
from shadowattn.calibration import Windows
from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.evaluation.fidelity import OutputError
from shadowattn.evaluation.perplexity import window_losses
from shadowattn.graphs.symmetric_int8 import shifted
from shadowattn.offline import observe_key_offset
from shadowattn.offline.attention_ranges import observe_attention_ranges
from shadowattn.online.chunk import Chunk
from shadowattn.online.full_int8 import AttentionRanges, FullInt8, Steps, full_int8
from shadowattn.reference import dense_attention, int8_attention
from tests.offline.test_key_offsets import biased_model
from tests.profiles import key_offset
from tests.tensors import qkv
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(3))


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    groups=st.sampled_from([1, 2]),
    heads_each=st.sampled_from([1, 3]),
    rows=st.integers(1, 9),
    before=st.integers(0, 20),
    dim=st.sampled_from([16, 64, 80]),
    spread=st.sampled_from([0.1, 1.0, 6.0]),
    scores=st.booleans(),
    probabilities=st.sampled_from(["linear", "log2", "float"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    offset=st.sampled_from([None, 0.5, 5.0]),
)
def test_a_chunk_is_what_the_definition_says(
    seed, groups, heads_each, rows, before, dim, spread, scores, probabilities, dtype, offset
):
    """With a key offset, of the keys that are left."""
    generator = torch.Generator().manual_seed(seed)
    heads, keys = groups * heads_each, before + rows
    q = (torch.randn(heads, rows, dim, generator=generator) * spread).to(dtype)
    k, v = (torch.randn(2, groups, keys, dim, generator=generator) * spread).to(dtype)
    offset = None if offset is None else key_offset(1, groups, dim, seed=seed, size=offset)
    left = shifted(k, offset, 0)
    ranges = {name: x.float().abs().amax((1, 2)) for name, x in (("q", q), ("k", 0.7 * left), ("v", v))}
    ranges = {name: (x.tolist(),) for name, x in ranges.items()} | {"scores": ([20.0 * spread**2] * heads,)}
    steps = Steps.of(AttentionRanges(**ranges, fingerprint="", key_offset=offset), 0, "head")
    made = full_int8(Chunk.of(q, k, v), steps, FullInt8(scores=scores, probabilities=probabilities))
    expected = int8_attention(
        q, left, v, causal_offset=before, q_step=steps.q, k_step=steps.k, v_step=steps.v,
        score_step=steps.scores if scores else None, probabilities=probabilities,
    )  # fmt: skip
    # The softmax of a longer row is summed in another order, so a probability may fall on the other side of half a step.
    step = float(steps.v.max()) * 127 * {"linear": 1 / 127, "log2": 0.75, "float": 0.0}[probabilities]
    assert ((made - expected).abs() <= 1e-4 * (1 + expected.abs()) + 2 * step).all()
    apart = ((made - expected).abs() > 1e-4 * (1 + expected.abs())).any(2)
    assert float(apart.double().mean()) <= 0.5


def test_one_scale_for_a_layer_is_the_largest_of_its_heads():
    ranges = AttentionRanges(((1.0, 4.0),), ((2.0,),), ((3.0,),), ((5.0, 6.0),), "")
    tensor, head = Steps.of(ranges, 0, "tensor"), Steps.of(ranges, 0, "head")
    assert (tensor.q * 127).tolist() == pytest.approx([4, 4])
    assert (head.q * 127).tolist() == pytest.approx([1, 4])
    assert (tensor.scores * 127).tolist() == pytest.approx([6, 6])


def test_ranges_are_the_largest_magnitudes_that_the_model_showed():
    model, ids = tiny_model(), windows()
    seen = {}

    def look(chunk):
        scores = (chunk.q @ chunk.k.repeat_interleave(len(chunk.q) // len(chunk.k), 0).mT).tril()
        for name, x in (("q", chunk.q), ("k", chunk.k), ("v", chunk.v), ("scores", scores)):
            largest = x.abs().amax((1, 2))
            seen[name, chunk.layer] = torch.maximum(seen.get((name, chunk.layer), largest), largest)

    observe_prefill(model, ids, look, chunk_tokens=ids.shape[1])  # each window as one chunk
    ranges = observe_attention_ranges(model, ids, chunk_tokens=32)
    for (name, layer), largest in seen.items():
        assert getattr(ranges, name)[layer] == pytest.approx(largest.tolist(), rel=1e-5)


def test_the_softmax_is_blind_to_the_offset():
    """With steps so small that nothing is rounded to speak of, the attention is that of the keys as they are."""
    q, k, v = qkv(4, 2, 8, 30, 16)
    offset = key_offset(1, 2, 16)
    left = shifted(k, offset, 0)
    ranges = {"q": q, "k": left, "v": v, "scores": torch.full((4, 1, 1), 100.0)}
    ranges = {name: (x.abs().amax((1, 2)).tolist(),) for name, x in ranges.items()}
    steps = Steps.of(AttentionRanges(**ranges, fingerprint="", key_offset=offset), 0, "head")
    made = full_int8(Chunk.of(q, k, v), steps, FullInt8(scores=False, probabilities="float"))
    torch.testing.assert_close(made, dense_attention(q, k, v, causal_offset=22), atol=0.05, rtol=0.05)


def test_ranges_and_loss_are_those_of_the_keys_that_are_left():
    model, ids = biased_model(30.0), windows(3)
    dense = window_losses(model, ids, chunk_tokens=32)
    offset = observe_key_offset(model, ids, chunk_tokens=32, how="mean")
    found, losses = {}, {}
    for name, one in (("none", None), ("mean", offset)):
        found[name] = observe_attention_ranges(model, ids, chunk_tokens=32, key_offset=one)
        with FullInt8(key_offset=name)(model, found[name], chunk_tokens=32):
            losses[name] = float((window_losses(model, ids, chunk_tokens=32) - dense).abs().mean())
    assert (found["none"].key_offset, found["mean"].key_offset) == (None, offset)
    for name in ("q", "v"):
        assert getattr(found["mean"], name) == getattr(found["none"], name)
    for name in ("k", "scores"):
        most = {how: max(max(layer) for layer in getattr(ranges, name)) for how, ranges in found.items()}
        assert most["mean"] < 0.7 * most["none"]
    assert losses["mean"] < 0.5 * losses["none"]
    for how, ranges in (("none", "mean"), ("mean", "none"), ("midrange", "mean")):
        form, refused = FullInt8(key_offset=how), pytest.raises(InputError, match=f"key_offset={ranges}, got FullInt8")
        with refused, form(model, found[ranges]):
            pass


def test_the_loss_of_a_model_grows_with_what_is_rounded():
    model, ids = tiny_model(), windows(3)
    ranges = observe_attention_ranges(model, ids, chunk_tokens=32)
    dense = window_losses(model, ids, chunk_tokens=32)
    errors = {}
    for name, form in {"qkv": FullInt8(scores=False, probabilities="float"), "all": FullInt8()}.items():
        observer = OutputError()
        with form(model, ranges, chunk_tokens=32, observers=[observer]) as run:
            assert not window_losses(model, ids, chunk_tokens=32).equal(dense)
        errors[name] = observer.metrics()["output_error"]
        assert run.counters.dense_rows == ids.numel() * 2 * 4
    assert 0 < errors["qkv"] < errors["all"] < 0.5
    assert window_losses(model, ids, chunk_tokens=32).equal(dense)  # undone


@torch.no_grad()
def test_a_decoding_step_attends_in_float():
    model, ids = tiny_model(), windows(1)
    ranges = observe_attention_ranges(model, ids, chunk_tokens=32)
    with FullInt8()(model, ranges) as run:
        cache = model(input_ids=ids[:, :-1], use_cache=True).past_key_values
        before = run.counters.dense_rows
        model(input_ids=ids[:, -1:], past_key_values=cache)
    assert (run.counters.dense_rows, run.counters.decode_rows) == (before, 2 * 4)


def test_ranges_of_another_model_and_settings_that_do_not_exist_are_refused():
    model, ids = tiny_model(), windows(1)
    ranges = observe_attention_ranges(model, ids, chunk_tokens=32)
    other = copy.deepcopy(model)
    with torch.no_grad():
        next(other.parameters()).add_(1)
    with pytest.raises(InputError, match="measured on another model"), FullInt8()(other, ranges):
        pass
    with pytest.raises(InputError, match="ranges: expected a AttentionRanges"), FullInt8()(model, None):
        pass
    for wrong in ({"probabilities": "int4"}, {"granularity": "channel"}, {"scores": "yes"}, {"key_offset": "median"}):
        with pytest.raises(InputError, match=next(iter(wrong))):
            FullInt8(**wrong)
    with pytest.raises(InputError, match="scores: expected"):
        AttentionRanges(((1.0,),), ((1.0,),), ((1.0,),), ((math.nan,),), "")
    with pytest.raises(InputError, match="as many layers"):
        AttentionRanges(((1.0,), (1.0,)), ((1.0,),), ((1.0,),), ((1.0,),), "")


def test_calibration_measures_ranges_once(tmp_path):
    model, tokenizer = shadowattn.models.load_bundled().model, shadowattn.models.load_bundled().tokenizer
    text = "".join(f"line {i} of a text to calibrate on\n" for i in range(400))
    how = {"folder": tmp_path, "windows": Windows(64, 2)}
    made = shadowattn.calibrate(model, tokenizer, text, **how).ranges
    again = shadowattn.calibrate(model, tokenizer, text, **how)
    assert again.ranges == made
    with torch.no_grad(), FullInt8()(model, made) as run:
        model(input_ids=torch.arange(40)[None])
    assert run.counters.dense_rows
