"""Shared work gives the losses of separate forward passes, in shards, in parts, after any interruption."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.models import ModelShape
from shadowattn.offline import measure_ablations, summarise
from shadowattn.offline.work import plan, shard
from shadowattn.types import AblationLosses
from tests.tiny import tiny_model


def windows(count: int = 3, length: int = 40) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


def values(losses: AblationLosses) -> torch.Tensor:
    heads = [head for layer in losses.heads for head in layer]
    return torch.tensor([losses.base, *losses.layers, *heads], dtype=torch.float64)


@pytest.mark.parametrize("ablation", ["zero", "uniform"])
@pytest.mark.parametrize(
    ("family", "heads", "kv_heads", "head_dim"),
    [("qwen2", 4, 2, 64), ("llama", 4, 4, 80), ("llama", 4, 1, 96), ("qwen2", 3, 3, 128)],
)
def test_the_same_losses_as_a_forward_pass_for_each_ablation(family, heads, kv_heads, head_dim, ablation, tmp_path):
    model = tiny_model(family=family, heads=heads, kv_heads=kv_heads, head_dim=head_dim, layers=3)
    plain = measure_ablations(model, windows(), Units(tmp_path / "plain"), method="plain", ablation=ablation)
    for batch in (1, 3, 8):
        exact = measure_ablations(model, windows(), Units(tmp_path / f"exact{batch}"), batch=batch, ablation=ablation)
        torch.testing.assert_close(values(exact), values(plain), rtol=1e-5, atol=0)


def test_bfloat16_too(tmp_path):
    model = tiny_model().bfloat16()
    plain = measure_ablations(model, windows(), Units(tmp_path / "plain"), method="plain")
    exact = measure_ablations(model, windows(), Units(tmp_path / "exact"))
    torch.testing.assert_close(values(exact), values(plain), rtol=3e-2, atol=0)


@pytest.mark.parametrize("count", [2, 3, 7])
def test_shards_together_measure_what_one_process_does_bit_for_bit(count, tmp_path):
    model = tiny_model(layers=3)
    whole = measure_ablations(model, windows(), Units(tmp_path / "whole"))
    units = Units(tmp_path / "shards")
    for index in reversed(range(count)):
        found = measure_ablations(model, windows(), units, shard_index=index, shard_count=count)
        assert (found is None) == (index > 0)
    assert found == whole


@given(layers=st.integers(1, 30), heads=st.integers(1, 16), batch=st.integers(1, 20), count=st.integers(1, 12))
def test_shards_share_all_ablations_and_none_twice(layers, heads, batch, count):
    work = plan(ModelShape(layers, heads, heads, 64, 512), batch)
    shards = [shard(work, index, count) for index in range(count)]
    assert sorted(key for part in shards for piece in part for key in piece.keys) == sorted(key for p in work for key in p.keys)
    loads = [sum(piece.cost for piece in part) for part in shards]
    assert max(loads) - min(loads) <= max(piece.cost for piece in work)


@pytest.mark.parametrize(("index", "count"), [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_is_not_there_is_refused(index, count):
    with pytest.raises(InputError, match=r"0 ≤ shard\.index < shard\.count"):
        shard([], index, count)


def test_a_lost_unit_is_measured_again_and_nothing_else_changes(tmp_path):
    model, units = tiny_model(), Units(tmp_path)
    whole = measure_ablations(model, windows(), units)
    (tmp_path / "L1_H2.json").unlink()
    (tmp_path / "L0.json").unlink()
    assert measure_ablations(model, windows(), units) == whole


def test_a_damaged_unit_is_refused_with_what_to_do(tmp_path):
    model, units = tiny_model(), Units(tmp_path)
    measure_ablations(model, windows(), units)
    (tmp_path / "L1_H2.json").write_text("[1.0, 2.")
    with pytest.raises(InputError, match=r"rm .*L1_H2\.json"):
        measure_ablations(model, windows(), units)


def test_an_unknown_method_is_refused(tmp_path):
    with pytest.raises(InputError, match="shared, plain or racing"):
        measure_ablations(tiny_model(), windows(), Units(tmp_path), method="guess")


LOSSES = AblationLosses((1.0, 2.0, 3.0), ((2.0, 3.0, 10.0),), (((1.5, 2.0),),), "zero", 8)


def test_batches_of_equal_weight_count_the_short_last_one_as_much():
    equal = summarise(LOSSES, batch=2)
    assert equal.base_ppl == pytest.approx(torch.tensor(((1 + 2) / 2 + 3) / 2).exp())
    assert equal.layer_ppl[0] == pytest.approx(torch.tensor(((2 + 3) / 2 + 10) / 2).exp())
    assert summarise(LOSSES).base_ppl == pytest.approx(torch.tensor(2.0).exp())


def test_an_ablation_that_stopped_early_is_its_increase_over_the_windows_it_saw():
    assert summarise(LOSSES).head_ppl[0][0] == pytest.approx(torch.tensor(2.0 + 0.25).exp())


def test_some_windows_only():
    assert summarise(LOSSES, windows=[2]).layer_ppl[0] == pytest.approx(torch.tensor(10.0).exp())
    assert summarise(LOSSES, windows=[0, 0, 1]).tokens == 24
