"""The types that pass between stages: a key offset, and the grid and the profile that carry it."""

import copy
import json
from dataclasses import asdict, replace

import pytest
import torch

from shadowattn.artifacts import content_hash
from shadowattn.errors import InputError
from shadowattn.types import KeyOffset, ScaleGrid
from tests.profiles import GRID, key_offset, profile_for
from tests.tiny import tiny_model


def test_a_key_offset_gives_one_vector_for_each_key_head_of_a_layer():
    offset = KeyOffset([[[1, 2.5], [3, 4]], [[5, 6], [7, 8]]], "mean")
    assert offset.of(1).equal(torch.tensor([[5.0, 6.0], [7.0, 8.0]]))
    assert offset.of(0).dtype == torch.float32
    with pytest.raises(InputError, match="key_offset: it has 2 layers, got layer 2"):
        offset.of(2)


def test_a_key_offset_is_known_by_its_values():
    offset = key_offset(2, 2, 8)
    same, other = KeyOffset(offset.values), key_offset(2, 2, 8, seed=1)
    assert offset == same
    assert (offset.digest, hash(offset)) == (same.digest, hash(same))
    assert offset.digest != other.digest
    assert repr(offset) == f"key offset given {offset.digest}"
    assert copy.deepcopy(offset).of(1).equal(offset.of(1))


def test_json_gives_the_same_key_offset_again():
    offset = key_offset(2, 2, 8)
    assert KeyOffset.read(json.loads(json.dumps(asdict(offset)))) == offset
    assert KeyOffset.read(offset) is offset
    assert KeyOffset.read(None) is None
    with pytest.raises(InputError, match="key_offset: expected a KeyOffset"):
        KeyOffset.read([[[1.0]]])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "as many heads and dimensions"),
        ([[]], "as many heads and dimensions"),
        ([[[]]], "as many heads and dimensions"),
        ([[[1.0, 2.0], [1.0]]], "as many heads and dimensions"),
        ([[[1.0], [1.0]], [[1.0]]], "as many heads and dimensions"),
        ([[[float("nan")]]], "key_offset: expected a finite number"),
        ([[[1e300]]], "expected values that float32 holds"),
        ([1.0], "key_offset: expected a sequence"),
        ("mean", "key_offset: expected a sequence"),
    ],
)
def test_values_that_are_no_key_offset_are_refused(values, message):
    with pytest.raises(InputError, match=message):
        KeyOffset(values)


def test_a_grid_carries_its_key_offset_through_json():
    offset = key_offset(2, 2, 64)
    grid = replace(GRID, key_offset=offset)
    assert ScaleGrid(**json.loads(json.dumps(asdict(grid)))) == grid
    assert grid != GRID
    assert grid.pairs == GRID.pairs
    assert content_hash(asdict(grid)) != content_hash(asdict(GRID))
    assert ScaleGrid(GRID.q_scales, GRID.k_scales).key_offset is None
    with pytest.raises(InputError, match="key_offset: expected a KeyOffset"):
        ScaleGrid((1.0,), (1.0,), key_offset="mean")


@pytest.mark.parametrize(("layers", "dim"), [(3, 64), (2, 32)])
def test_a_profile_refuses_a_key_offset_of_another_shape(layers, dim):
    with pytest.raises(InputError, match="key_offset: expected one of 2 layers and 64 dimensions, as the profile"):
        profile_for(tiny_model(), 0.2, grid=replace(GRID, key_offset=key_offset(layers, 2, dim)))
