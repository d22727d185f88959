"""The graphs themselves: every form's integers are exact, and its product really runs in INT8."""

from dataclasses import replace

import numpy as np
import openvino as ov
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openvino import opset13 as op

from shadowattn.errors import InputError
from shadowattn.graphs.buckets import GraphShape
from shadowattn.graphs.core import core
from shadowattn.graphs.cpu import cpu_hints, multiplies_exactly, runs_in_int8
from shadowattn.graphs.estimation import FLOAT, INPUTS, INT8_MAX, INT8_STEP, GraphForm, estimation_graph
from shadowattn.types import Requant

REQUANTS = (None, Requant("target_requant", 2e-3), Requant("fixed_output", 0.09))
SCALES = 0.03, 0.05
# As a bank compiles where INT8 products are not exact: float32 products of whole numbers, in which equal scores stay equal.
WHOLE = not multiplies_exactly()


def compile_graph(model):
    return core().compile_model(model, "CPU", cpu_hints())


def all_forms():
    for inputs in INPUTS:
        for requant in REQUANTS:
            for mask, pool in ((False, (1, 1)), (True, (1, 1)), (True, (8, 16))):
                yield GraphForm(inputs, requant, mask, pool)
                if mask:
                    yield GraphForm(inputs, requant, mask, pool, indices=True)


@pytest.mark.parametrize("form", list(all_forms()), ids=str)
def test_the_product_runs_in_int8(form):
    shape = GraphShape(4, 32, 64, 64, group=2, top_k=3 if form.indices else 0)
    assert runs_in_int8(compile_graph(estimation_graph(shape, form, *SCALES))) == multiplies_exactly()


@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("inputs", INPUTS)
def test_so_it_does_for_every_head_dimension(inputs, heads, head_dim):
    made = compile_graph(estimation_graph(GraphShape(heads, 32, head_dim, 64), GraphForm(inputs)))
    assert runs_in_int8(made) == multiplies_exactly()


def test_a_graph_without_fake_quantize_is_found_out():
    """The check can fail: int8 inputs alone leave the CPU plugin in float32."""
    q, k = op.parameter([1, 1, 32, 64], ov.Type.i8), op.parameter([1, 1, 64, 64], ov.Type.i8)
    scores = op.matmul(op.convert(q, ov.Type.f32), op.convert(k, ov.Type.f32), False, True)
    assert not runs_in_int8(compile_graph(ov.Model([op.result(scores)], [q, k])))


@settings(max_examples=80, deadline=None)
@given(
    inputs=st.sampled_from(INPUTS),
    requant=st.sampled_from(REQUANTS),
    mask=st.booleans(),
    shape=st.builds(
        GraphShape,
        heads=st.sampled_from([1, 2, 6]),
        rows=st.integers(1, 40),
        head_dim=st.sampled_from([8, 64, 80, 128]),
        keys=st.integers(1, 50),
    ),
    folded=st.booleans(),
    scale=st.sampled_from([1e-4, 0.03, 7.0]),
    spread=st.sampled_from([0.5, 2.0]),
    first_position=st.integers(0, 40),
    seed=st.integers(0, 99),
)
def test_scores_are_numpys_integers(inputs, requant, mask, shape, folded, scale, spread, first_position, seed):
    """Round half to even, clip at ±127, integer product, and one more rounding where scores are INT8; a spread of 2 clips often.

    Documented: an INT8 score may be one off where the exact product lies on the border between two steps; a float16 one is the
    product / 127² in 11 bits.
    """
    shape = replace(shape, group=2 if folded and shape.heads % 2 == 0 else 1)
    form, scales = GraphForm(inputs, requant, mask), (scale, 1.7 * scale)
    given_inputs, product = _inputs(shape, form, scales, spread, first_position, seed)
    scores = compile_graph(estimation_graph(shape, form, *scales, whole=WHOLE))(given_inputs)[0]
    visible = _visible(shape, first_position) if mask else np.ones_like(product, dtype=bool)
    if requant is None and form.inputs == "int8":
        exact = product * INT8_STEP
        assert (np.abs(scores - exact)[visible] <= (np.abs(exact) * 2.0**-11 * 1.001)[visible]).all()
        assert (scores[~visible] == np.float16(form.masked)).all()
        return
    if requant is None:
        steps = scores / (np.float64(np.float32(scales[0])) * np.float32(scales[1]) if form.bakes_scales else 1)
        assert np.array_equal(np.rint(steps)[visible], product[visible])
        assert (scores[~visible] == np.float32(form.masked)).all()
        return
    assert scores.dtype == np.int8
    exact = np.clip(product * requant.multiplier(*scales), -128, 127)
    assert (np.abs(scores - exact)[visible] <= 0.5 + 1e-3).all()
    assert (scores[~visible] == -128).all()


@pytest.mark.parametrize("scale", [0.03, 0.5, 2.0**-5])
@pytest.mark.parametrize("inputs", INPUTS)
def test_midway_between_two_steps_an_input_is_off_by_one_at_most(inputs, scale):
    """Documented: FakeQuantize rounds such a value to the odd step where integers outside a graph are rounded to the even one."""
    shape, form = GraphShape(1, 64, 64, 64), GraphForm(inputs)
    steps = np.random.default_rng(0).integers(-127, 127, (1, 1, 64, 64)) + 0.5
    q, k = np.float32(steps * scale), np.float32(np.eye(64)[None, None] * scale)
    given_inputs = [q, k]
    if form.takes_int8:
        given_inputs = [np.rint(q / scale).astype(np.int8), np.rint(k / scale).astype(np.int8)]
    elif inputs == "runtime":
        given_inputs += [np.full((1, 1, 64, 1), 1 / scale, np.float32), np.full((1, 1, 1, 1), 1 / scale, np.float32)]
    scores = compile_graph(estimation_graph(shape, form, scale, scale))(given_inputs)[0]
    step = scale**2 if form.bakes_scales else INT8_STEP if inputs == "int8" else 1
    integers = np.rint(scores.astype(np.float64) / step)
    assert np.abs(integers - np.rint(q / scale)).max() <= 1
    assert np.abs(integers - steps).max() <= 0.5 + 1e-6  # either neighbour


@settings(max_examples=40, deadline=None)
@given(
    inputs=st.sampled_from(INPUTS),
    requant=st.sampled_from(REQUANTS),
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2)]),
    pool=st.sampled_from([(1, 1), (1, 16), (8, 1), (8, 16)]),
    first_position=st.integers(0, 40),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_pooling_and_selection_in_the_graph_are_those_outside(inputs, requant, heads, pool, first_position, seed, data):
    """The largest score of each block; then the best blocks in falling order, ties to the lower index.

    Blocks of rows rank what lies before their own keys: whole blocks of keys.
    """
    shape = GraphShape(heads[0], 24, 64, 48, heads[1])
    form = GraphForm(inputs, requant, mask=True)
    top_k = data.draw(st.integers(1, shape.keys // pool[1]))
    given_inputs, product = _inputs(shape, form, SCALES, 0.1, first_position, seed)
    scores = compile_graph(estimation_graph(shape, form, *SCALES, whole=WHOLE))(given_inputs)[0]
    if form.score_dtype is np.float16:  # on the CPU a graph selects before it rounds to float16
        scores = np.where(_visible(shape, first_position), product * INT8_STEP, form.masked)
    if pool[0] > 1:
        row, key = np.arange(shape.rows) // pool[0] * pool[0], np.arange(shape.keys)
        own = np.minimum(first_position + row, first_position + shape.rows - 1) // pool[1] * pool[1]
        hidden = np.tile(key >= own[:, None], (scores.shape[2] // shape.rows, 1))
        scores = np.where(hidden, np.array(-128 if requant else form.masked, scores.dtype), scores)
    blocks = scores.reshape(scores.shape[1], -1, pool[0], shape.keys // pool[1], pool[1]).max((2, 4))
    pooled, selecting = replace(form, pool=pool), replace(form, pool=pool, indices=True)
    for made, expected in (
        (pooled, blocks),
        (selecting, np.argsort(-blocks.astype(np.float64), -1, kind="stable")[..., :top_k]),
    ):
        of = replace(shape, top_k=top_k if made.indices else 0)
        graph = compile_graph(estimation_graph(of, made, *SCALES, whole=WHOLE))
        if form.needs_multiplier:
            given_inputs[-1] = np.full(list(graph.input("multiplier").shape), form.requant.multiplier(*SCALES), np.float32)
        output = graph(given_inputs)[0]
        if output.dtype == np.float16:  # the last bit may go either way: the product is a float32 before it is rounded
            np.testing.assert_allclose(output.reshape(expected.shape), expected.astype(np.float16), rtol=2.0**-10)
            continue
        assert np.array_equal(output.reshape(expected.shape), expected)


def test_rows_past_the_last_count_as_the_last():
    """What a chunk shorter than its graph leaves over must not see keys that do not exist."""
    shape, form = GraphShape(1, 4, 64, 8), GraphForm("unit", mask=True)
    ones = np.ones((1, 1, 8, 64), np.int8)
    scores = compile_graph(estimation_graph(shape, form))([ones[:, :, :4], ones, np.int32([2, 3])])[0][0, 0]
    assert (scores == 64).sum(1).tolist() == [3, 4, 4, 4]


def test_the_largest_sums_are_exact():
    q = np.full((1, 1, 4, 256), INT8_MAX, np.int8)
    compiled = compile_graph(estimation_graph(GraphShape(1, 4, 256, 4), GraphForm("unit")))
    assert (compiled([q, q])[0] == INT8_MAX**2 * 256).all()
    assert (compiled([q, -q])[0] == -(INT8_MAX**2) * 256).all()


def test_a_graph_built_again_is_the_same_file(tmp_path):
    """Node names are fixed, or OpenVINO's cache would never know a graph again."""
    for name in ("a", "b"):
        ov.save_model(estimation_graph(GraphShape(2, 32, 64, 64), FLOAT, *SCALES), tmp_path / f"{name}.xml")
    assert (tmp_path / "a.xml").read_bytes() == (tmp_path / "b.xml").read_bytes()


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"inputs": "dynamic"}, "expected one of static, unit, runtime, int8"),
        ({"pool": (8, 8)}, "need mask=True"),
        ({"indices": True}, "need mask=True"),
        ({"pool": (0, 8), "mask": True}, "at least one row and one key"),
    ],
)
def test_forms_that_make_no_sense_are_refused(form, message):
    with pytest.raises(InputError, match=message):
        GraphForm(**form)


@pytest.mark.parametrize(
    ("form", "top_k", "message"),
    [
        (GraphForm(mask=True, pool=(5, 1)), 0, "blocks that divide 32 rows and 64 keys"),
        (GraphForm(mask=True, indices=True), 0, r"expected 1 … 64"),
        (GraphForm(mask=True, pool=(1, 16), indices=True), 5, r"expected 1 … 4"),
        (FLOAT, 5, "set indices=True"),
    ],
)
def test_shapes_that_do_not_fit_a_form_are_refused(form, top_k, message):
    with pytest.raises(InputError, match=message):
        estimation_graph(GraphShape(1, 32, 64, 64, top_k=top_k), form)


def _inputs(shape, form, scales, spread, first_position, seed):
    """What the graph is given, and the integer product [1, kv_heads, group · rows, keys] it should come to."""
    generator = np.random.default_rng(seed)
    lead = (1, shape.kv_heads)
    sizes = ((*lead, shape.group * shape.rows, shape.head_dim), (*lead, shape.keys, shape.head_dim))
    real = [_real(generator, size, scale, spread) for size, scale in zip(sizes, scales, strict=True)]
    q8, k8 = (np.clip(np.rint(x / np.float64(scale)), -INT8_MAX, INT8_MAX) for x, scale in zip(real, scales, strict=True))
    product = q8.astype(np.int64) @ k8.astype(np.int64).swapaxes(2, 3)
    given_inputs = [q8.astype(np.int8), k8.astype(np.int8)] if form.takes_int8 else real
    if form.inputs == "runtime":
        rows_shape, heads_shape = (*sizes[0][:3], 1), (*lead, 1, 1)
        given_inputs += [np.full(rows_shape, 1 / scales[0], np.float32), np.full(heads_shape, 1 / scales[1], np.float32)]
    if form.mask:
        given_inputs.append(np.int32([first_position, first_position + shape.rows - 1]))
    if form.needs_multiplier:
        given_inputs.append(np.full((*sizes[0][:3], 1), form.requant.multiplier(*scales), np.float32))
    return given_inputs, product


def _visible(shape, first_position):
    rows = first_position + np.tile(np.arange(shape.rows), shape.group)
    return np.broadcast_to(np.arange(shape.keys) <= rows[:, None], (1, shape.kv_heads, len(rows), shape.keys))


def _real(generator, shape, scale, spread):
    """Real values up to `spread` times what 127 steps hold, kept off the rounding borders between two steps."""
    steps = generator.uniform(-spread * INT8_MAX, spread * INT8_MAX, shape)
    steps = np.trunc(steps) + np.clip(steps - np.trunc(steps), -0.4, 0.4)
    return (steps * scale).astype(np.float32)
