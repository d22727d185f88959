"""The graphs themselves: their integers are exact, and they really run in INT8."""

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as op

from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.estimation import INT8_MAX, runs_in_int8, scaled_graph, unit_graph

FORMS = {"scaled": lambda shape: scaled_graph(shape, 0.03, 0.05), "unit": unit_graph}


def compile_graph(model):
    return ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("form", FORMS)
def test_the_product_runs_in_int8(form, heads, head_dim):
    assert runs_in_int8(compile_graph(FORMS[form](GraphShape(heads, 32, head_dim, 64))))


def test_a_graph_without_fake_quantize_is_found_out():
    """The check can fail: int8 inputs alone leave the CPU plugin in float32."""
    q, k = op.parameter([1, 1, 32, 64], ov.Type.i8), op.parameter([1, 1, 64, 64], ov.Type.i8)
    scores = op.matmul(op.convert(q, ov.Type.f32), op.convert(k, ov.Type.f32), False, True)
    assert not runs_in_int8(compile_graph(ov.Model([op.result(scores)], [q, k])))


@settings(max_examples=25)
@given(
    heads=st.integers(1, 3),
    rows=st.integers(1, 40),
    keys=st.integers(1, 50),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    scale=st.sampled_from([1e-4, 0.03, 7.0]),
    spread=st.sampled_from([0.5, 2.0]),
    seed=st.integers(0, 99),
)
def test_scaled_scores_are_numpys_integers(heads, rows, keys, head_dim, scale, spread, seed):
    """Round half to even, clip at ±127, integer product; a spread of 2 clips often."""
    generator = np.random.default_rng(seed)
    q_scale, k_scale = scale, 1.7 * scale
    q = _real(generator, (1, heads, rows, head_dim), q_scale, spread)
    k = _real(generator, (1, heads, keys, head_dim), k_scale, spread)
    scores = compile_graph(scaled_graph(GraphShape(heads, rows, head_dim, keys), q_scale, k_scale))([q, k])[0]
    expected = _integers(q, q_scale) @ _integers(k, k_scale).swapaxes(2, 3)
    assert np.array_equal(np.rint(scores / np.float64(np.float32(q_scale)) / np.float64(np.float32(k_scale))), expected)


@settings(max_examples=25)
@given(
    rows=st.integers(1, 40),
    keys=st.integers(1, 50),
    head_dim=st.sampled_from([8, 64, 80, 128]),
    seed=st.integers(0, 99),
)
def test_unit_scores_are_numpys_integers(rows, keys, head_dim, seed):
    generator = np.random.default_rng(seed)
    q = generator.integers(-127, 128, (1, 2, rows, head_dim), np.int8)
    k = generator.integers(-127, 128, (1, 2, keys, head_dim), np.int8)
    scores = compile_graph(unit_graph(GraphShape(2, rows, head_dim, keys)))([q, k])[0]
    assert np.array_equal(scores, q.astype(np.int64) @ k.astype(np.int64).swapaxes(2, 3))


def test_the_largest_sums_are_exact():
    q = np.full((1, 1, 4, 256), INT8_MAX, np.int8)
    compiled = compile_graph(unit_graph(GraphShape(1, 4, 256, 4)))
    assert (compiled([q, q])[0] == INT8_MAX**2 * 256).all()
    assert (compiled([q, -q])[0] == -(INT8_MAX**2) * 256).all()


def _real(generator, shape, scale, spread):
    """Real values up to `spread` times what 127 steps hold, kept off the rounding borders between two steps."""
    steps = generator.uniform(-spread * INT8_MAX, spread * INT8_MAX, shape)
    steps = np.trunc(steps) + np.clip(steps - np.trunc(steps), -0.4, 0.4)
    return (steps * scale).astype(np.float32)


def _integers(x, scale):
    return np.clip(np.rint(x / np.float64(scale)), -INT8_MAX, INT8_MAX).astype(np.int64)
