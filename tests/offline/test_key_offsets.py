"""The key offset as calibration measures it, and the scales and outputs of keys less it."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.engine.observe import observe_prefill
from shadowattn.errors import InputError
from shadowattn.graphs.symmetric_int8 import absmax_scales, shifted
from shadowattn.offline import layer_grids, observe_key_offset, observe_scales, report_scales, scale_grid
from shadowattn.offline.calibrations.absmax import Absmax
from shadowattn.offline.requantisation import observe_products
from shadowattn.offline.scales import RunningScales
from shadowattn.online.cache import LayerCache
from shadowattn.online.chunk import Chunk
from shadowattn.types import KeyOffset, ScaleGrid
from tests.profiles import key_offset
from tests.tensors import qkv
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 96) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


def biased_model(size: float = 8.0):
    """A tiny model whose keys share a large component: a bias of K in the channels that RoPE hardly turns in 96 tokens."""
    model = tiny_model()
    generator = torch.Generator().manual_seed(1)
    slow = torch.arange(64) % 32 >= 20  # less than 0.0032 radians a token
    with torch.no_grad():
        for layer in model.model.layers:
            bias = layer.self_attn.k_proj.bias
            bias.copy_(size * torch.randn(bias.shape, generator=generator) * slow.repeat(2))
    return model


def keys_of(model, ids) -> list[torch.Tensor]:
    """All keys of each layer [G, windows · tokens, D]."""
    found: dict[int, list[torch.Tensor]] = {}
    whole = ids.shape[1]
    observe_prefill(model, ids, lambda chunk: found.setdefault(chunk.layer, []).append(chunk.k.clone()), chunk_tokens=whole)
    return [torch.cat(found[layer], 1) for layer in sorted(found)]


@pytest.mark.parametrize("how", ["mean", "midrange"])
def test_it_is_of_all_keys_whatever_the_chunks(how):
    model, ids = biased_model(), windows()
    made = observe_key_offset(model, ids, chunk_tokens=32, how=how)
    assert made.how == how
    for layer, keys in enumerate(keys_of(model, ids)):
        expected = keys.mean(1) if how == "mean" else (keys.amax(1) + keys.amin(1)) / 2
        torch.testing.assert_close(made.of(layer), expected, atol=1e-4, rtol=1e-4)


def test_none_is_none_and_measures_nothing():
    assert observe_key_offset(None, None, chunk_tokens=32, how="none") is None
    with pytest.raises(InputError, match="key_offset: expected one of none, mean, midrange, got 'median'"):
        observe_key_offset(tiny_model(), windows(), chunk_tokens=32, how="median")


@given(seed=st.integers(0, 1000), size=st.floats(0, 50))
def test_no_vector_leaves_smaller_keys_than_the_midrange(seed, size):
    generator = torch.Generator().manual_seed(seed)
    k = torch.randn(2, 20, 8, generator=generator) + size * torch.randn(2, 1, 8, generator=generator)
    midrange = KeyOffset([((k.amax(1) + k.amin(1)) / 2).tolist()])
    for other in (KeyOffset([k.mean(1).tolist()]), KeyOffset([torch.zeros(2, 8).tolist()]), key_offset(1, 2, 8, seed=seed)):
        least, more = (absmax_scales(shifted(k, one, 0)) for one in (midrange, other))
        assert (least <= more * (1 + 1e-5) + 1e-7).all()


def test_what_is_subtracted_is_the_layers_own_vector():
    offset, (_, k, _) = key_offset(2, 2, 8), qkv(4, 2, 1, 10, 8)
    assert shifted(k, offset, 1).equal(k - offset.of(1)[:, None])
    assert shifted(k, offset, 1, torch.tensor([1, 0, 1])).equal((k - offset.of(1)[:, None])[[1, 0, 1]])
    assert shifted(k, None, 7) is not None
    assert shifted(k, None, 7).data_ptr() == k.data_ptr()  # nothing is copied where nothing is subtracted
    half = shifted(k.bfloat16(), offset, 0)
    assert half.dtype == torch.float32
    assert half.equal(k.bfloat16().float() - offset.of(0)[:, None])
    for wrong in (k[:1], k[..., :4]):
        with pytest.raises(InputError, match=r"key_offset: expected \[G, D\] = .* for layer 0, got \[2, 8\]"):
            shifted(wrong, offset, 0)


@pytest.mark.parametrize("how", ["mean", "midrange"])
def test_scales_are_those_of_the_keys_less_it(how):
    model, ids = biased_model(), windows(1)
    offset = observe_key_offset(model, ids, chunk_tokens=32, how=how)
    plain, less = (observe_scales(model, ids, chunk_tokens=32, key_offset=one) for one in (None, offset))
    keys = keys_of(model, ids)
    for chunk in range(3):
        for layer in range(2):
            for head in range(4):
                at = (chunk * 2 + layer) * 4 + head
                assert less.pairs[at][:3] == plain.pairs[at][:3]  # Q is as it is
                seen = keys[layer][head // 2, : 32 * chunk + 32] - offset.of(layer)[head // 2]
                assert less.pairs[at][3] == pytest.approx(float(seen.abs().max()) / 127, rel=1e-4)
    assert less.mean()[1] < 0.6 * plain.mean()[1]
    assert (plain.key_offset, less.key_offset) == (None, offset)
    grid = scale_grid(less)
    assert grid.key_offset == offset
    assert grid == ScaleGrid(grid.q_scales, grid.k_scales, key_offset=offset)
    assert [one.key_offset for one in layer_grids(less)] == [offset, offset]
    assert scale_grid(plain).key_offset is None


def test_scales_of_two_offsets_in_one_cache_do_not_mix():
    cache, (q, k, _) = LayerCache(), qkv(4, 2, 8, 40, 8)
    offsets = (None, key_offset(1, 2, 8), key_offset(1, 2, 8, seed=1))
    for keys in (k[:, :30], k):
        together = [RunningScales(Absmax(), one)(Chunk.of(q, keys, cache=cache)) for one in offsets]
    alone = [RunningScales(Absmax(), one)(Chunk.of(q, k)) for one in offsets]
    assert together == alone
    assert len({scales[0][1] for scales in together}) == 3


def test_the_report_is_of_the_keys_less_each_grids_own_offset():
    model, ids = biased_model(), windows(1)
    offset = observe_key_offset(model, ids, chunk_tokens=32, how="mean")
    found = {name: observe_scales(model, ids, chunk_tokens=32, key_offset=one) for name, one in (("no", None), ("mean", offset))}
    grids = {name: scale_grid(one) for name, one in found.items()}
    together = report_scales(model, ids, grids, chunk_tokens=32)
    for name, grid in grids.items():
        assert report_scales(model, ids, {name: grid}, chunk_tokens=32)[name] == together[name]
        fit = found[name].fit(grid)
        assert together[name].k_clipped_heads == pytest.approx(fit["k_clipped"])
    assert together["mean"] != together["no"]


def test_int8_outputs_are_rounded_by_the_products_that_are_left():
    model, ids = biased_model(), windows(1)
    offset = observe_key_offset(model, ids, chunk_tokens=32, how="mean")
    steps = {}
    for name, one in (("no", None), ("mean", offset)):
        grid = scale_grid(observe_scales(model, ids, chunk_tokens=32, key_offset=one))
        steps[name] = observe_products(model, ids, grid, chunk_tokens=32).requant("fixed_output").value
    assert 0 < steps["mean"] < 0.7 * steps["no"]
    assert math.isfinite(steps["no"])
