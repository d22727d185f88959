"""Ablations, importance, scales and profiles on tiny models."""

import json
import math
from dataclasses import replace

import pytest
import torch

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import batch_losses
from shadowattn.kernels.torch_kernels import dense
from shadowattn.models import replace_attention
from shadowattn.offline import load_profile, measure_importance, observe_scales, save_profile, scale_grid
from shadowattn.offline.ablations import Ablated, uniform, zero
from shadowattn.online.attention import Request
from shadowattn.types import RetentionProfile, ScaleGrid
from tests.profiles import GRID, key_offset, profile_for
from tests.tensors import qkv
from tests.tiny import tiny_model


def windows(count: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


def test_a_zeroed_head_equals_zero_columns_before_the_output_projection():
    model, ids = tiny_model(), windows()
    with replace_attention(model, Ablated(1, 2, zero)), torch.no_grad():
        ablated = model(ids).logits

    def zero_columns(module, args):
        hidden = args[0].clone()
        hidden[..., 2 * 64 : 3 * 64] = 0
        return (hidden,)

    handle = model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(zero_columns)
    with torch.no_grad():
        torch.testing.assert_close(ablated, model(ids).logits, atol=1e-5, rtol=0)
    handle.remove()


def test_a_uniform_head_is_what_the_artifacts_arithmetic_gives():
    """Redone literally: float32 logits, −3.4e38 added to all but the largest of each 32 rows, −inf to the future."""
    q, k, v = (x[None] for x in qkv(4, 2, 70, 70, 16))
    out = Ablated(0, 3, uniform)(0, q, k, v, 0.25, Request())
    lowest = torch.finfo(torch.float32).min
    logits = q[0, 3] @ k[0, 1].T * 0.25
    future = torch.ones(70, 70, dtype=torch.bool).triu(1)
    for start in range(0, 70, 32):
        chunk = slice(start, min(start + 32, 70))
        seen = logits[chunk].masked_fill(future[chunk], -math.inf)
        dropped = torch.where(seen >= seen.max(), 0.0, lowest)
        weights = torch.softmax((logits[chunk] + dropped).masked_fill(future[chunk], -math.inf), -1)
        torch.testing.assert_close(out[0, 3, chunk], weights @ v[0, 1], atol=1e-5, rtol=0)
    untouched = dense(q, k, v, causal_offset=0, scale=0.25)
    torch.testing.assert_close(out[:, :3], untouched[:, :3])
    torch.testing.assert_close(Ablated(1, 3, uniform)(0, q, k, v, 0.25, Request()), untouched)


@pytest.mark.parametrize("ablation", ["zero", "uniform"])
def test_importance_is_one_perplexity_for_each_head_and_layer(ablation, tmp_path):
    model, ids = tiny_model(layers=3), windows()
    measured = measure_importance(model, ids, Units(tmp_path), ablation=ablation, batch=2)
    assert (len(measured.head_ppl), len(measured.head_ppl[0]), len(measured.layer_ppl)) == (3, 4, 3)
    assert measured.base_ppl == pytest.approx(math.exp(batch_losses(model, ids, batch=3).mean()), rel=1e-5)
    values = {measured.base_ppl, *measured.layer_ppl, *(p for layer in measured.head_ppl for p in layer)}
    assert len(values) == 1 + 3 + 12  # each ablation is another model


def test_an_interrupted_importance_ends_in_the_same_numbers(tmp_path):
    model, ids = tiny_model(), windows()
    whole = measure_importance(model, ids, Units(tmp_path / "whole"))

    def stop_after_four(work):
        yield from work[:4]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_importance(model, ids, Units(tmp_path / "parts"), progress=stop_after_four)
    done = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "parts").iterdir()}
    assert len(done) == 10  # heads of a layer are measured together, each has its file
    assert measure_importance(model, ids, Units(tmp_path / "parts")) == whole
    assert all((tmp_path / "parts" / name).stat().st_mtime_ns == at for name, at in done.items())


def test_importance_refuses_an_unknown_ablation(tmp_path):
    with pytest.raises(InputError, match="zero, uniform"):
        measure_importance(tiny_model(), windows(), Units(tmp_path), ablation="half")


def test_scales_are_one_pair_for_each_layer_head_and_chunk():
    model = tiny_model()
    seen = []

    def remember(layer, q, k, v, scale, request):
        seen.append((layer, q[0], k[0]))
        return dense(q, k, v, causal_offset=0, scale=scale)

    ids = windows(1, 96)
    with replace_attention(model, remember), torch.no_grad():
        model(ids)
    observations = observe_scales(model, ids, chunk_tokens=32)
    assert len(observations.pairs) == 2 * 4 * 3
    pairs = iter(observations.pairs)
    for chunk in range(3):
        for layer, q, k in seen:
            for head in range(4):
                q_scale = float(q[head, 32 * chunk : 32 * chunk + 32].abs().max()) / 127
                k_scale = float(k[head // 2, : 32 * chunk + 32].abs().max()) / 127  # over all keys so far
                assert next(pairs) == (layer, head, pytest.approx(q_scale, rel=1e-4), pytest.approx(k_scale, rel=1e-4))


def test_the_grid_is_mean_times_multipliers():
    observations = observe_scales(tiny_model(), windows(2, 64), chunk_tokens=32)
    grid = scale_grid(observations)
    q, k = observations.mean()
    assert grid.q_scales == (q / 2, q, 2 * q)
    assert grid.k_scales == (k / 2, k, 2 * k)
    assert len(grid.pairs) == 9
    fit = observations.fit(grid)
    assert 0 <= fit["q_clipped"] <= 1
    assert fit["largest_bucket"] >= 1 / 9
    everything = observations.fit(ScaleGrid((1e9,), (1e9,)))
    assert everything == {"q_clipped": 0.0, "k_clipped": 0.0, "largest_bucket": 1.0}


@pytest.mark.parametrize("offset", [None, key_offset(2, 2, 64)])
def test_a_profile_comes_back_as_it_was(tmp_path, offset):
    profile = profile_for(tiny_model(), 0.2, grid=replace(GRID, key_offset=offset))
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile


def test_a_profile_from_before_there_were_key_offsets_has_none(tmp_path):
    profile, path = profile_for(tiny_model(), 0.2), tmp_path / "profile.json"
    save_profile(profile, path)
    content = json.loads(path.read_text())
    del content["scales"]["key_offset"]
    path.write_text(json.dumps(content))
    assert load_profile(path) == profile


@pytest.mark.parametrize("offset", [[[1.0]], {"values": [[1.0]]}, {"vectors": []}, {"values": [[[1.0]]]}])
def test_a_profile_with_a_damaged_key_offset_is_refused(tmp_path, offset):
    path = tmp_path / "profile.json"
    save_profile(profile_for(tiny_model(), 0.2), path)
    content = json.loads(path.read_text())
    content["scales"]["key_offset"] = offset
    path.write_text(json.dumps(content))
    with pytest.raises(InputError):
        load_profile(path)


@pytest.mark.parametrize("damage", ["missing", "cut short", "other version", "missing key", "out of range", "not an object"])
def test_a_damaged_profile_is_refused(tmp_path, damage):
    path = tmp_path / "profile.json"
    save_profile(profile_for(tiny_model(), 0.2), path)
    content = json.loads(path.read_text())
    if damage == "missing":
        path.unlink()
    elif damage == "cut short":
        path.write_text(path.read_text()[:50])
    elif damage == "other version":
        path.write_text(json.dumps(content | {"schema_version": 0}))
    elif damage == "missing key":
        path.write_text(json.dumps({k: v for k, v in content.items() if k != "fingerprint"}))
    elif damage == "out of range":
        path.write_text(json.dumps(content | {"retention": [[0.2, 1.5]]}))
    else:
        path.write_text("[]")
    with pytest.raises(InputError):
        load_profile(path)


@pytest.mark.parametrize("retention", [((0.2, 0.2), (0.2,)), (), ((0.0, 0.5),)])
def test_a_profile_that_makes_no_sense_is_refused(retention):
    with pytest.raises(InputError, match="retention"):
        RetentionProfile(retention, ScaleGrid((1.0,), (1.0,)), 64, "f", "m", "uniform")


@pytest.mark.parametrize("scales", [(), (0.0,), (float("inf"),), (-1.0,)])
def test_scales_that_make_no_sense_are_refused(scales):
    with pytest.raises(InputError, match="scales"):
        ScaleGrid(scales, (1.0,))
