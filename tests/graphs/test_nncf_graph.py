"""NNCF's graph: its scores are close to exact ones, it runs in INT8, and a preset that does not is found out."""

import numpy as np
import pytest

from shadowattn.errors import InputError
from shadowattn.graphs import GraphShape
from shadowattn.graphs.nncf_graph import compile_int8, input_steps, nncf_graph

SHAPE = GraphShape(4, 16, 64, 48, group=2)


def samples(seed=0):
    generator = np.random.default_rng(seed)
    return [tuple(generator.standard_normal((1, 2, rows, 64), dtype=np.float32) for rows in (2 * 16, 48)) for _ in range(3)]


def test_scores_are_close_and_run_in_int8():
    q, k = samples()[0]
    scores = compile_int8(nncf_graph(SHAPE, samples()), what="nncf")([q, k])[0]
    exact = q @ k.swapaxes(2, 3)
    assert np.abs(scores - exact).max() < 0.04 * np.abs(exact).max()
    assert not np.array_equal(scores, exact)


def test_steps_are_those_of_the_calibration():
    made = input_steps(nncf_graph(SHAPE, [(q, 4 * k) for q, k in samples()]))
    for name, values in zip(("q", "k"), zip(*samples(), strict=True), strict=True):
        most = np.mean([np.abs(x).max() for x in values]) * (4 if name == "k" else 1)  # a mean over samples is its default
        assert made[name] == pytest.approx(most / 127.5, rel=0.01)


def test_a_preset_that_falls_back_to_floating_point_is_refused():
    with pytest.raises(InputError, match="mixed: expected an INT8 product"):
        compile_int8(nncf_graph(SHAPE, samples(), preset="mixed"), what="mixed")


def test_refuses_unknown_presets_and_no_samples():
    with pytest.raises(InputError, match="expected one of performance, mixed"):
        nncf_graph(SHAPE, samples(), preset="fastest")
    with pytest.raises(InputError, match="at least one pair"):
        nncf_graph(SHAPE, [])
