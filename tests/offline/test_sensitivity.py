import pytest
import torch

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.evaluation.perplexity import batch_losses
from shadowattn.models import replace_attention
from shadowattn.offline import measure_sensitivity
from shadowattn.offline.ablations import Ablated, TopK
from shadowattn.reference import topk_attention
from tests.tensors import qkv
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 160) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("retention", [0.05, 0.3, 1.0])
def test_a_head_of_few_keys_is_the_references_top_k(retention):
    q, k, v = qkv(1, 1, 300, 300, 16)
    found = TopK(retention)(q, k, v, 0.25)
    torch.testing.assert_close(found, topk_attention(q, k, v, retention, causal_offset=0, scale=0.25), atol=1e-5, rtol=0)


def test_loss_is_the_increase_with_one_head_sparse(tmp_path):
    model, ids = tiny_model(), windows()
    found = measure_sensitivity(model, ids, Units(tmp_path), measure="loss", retentions=[0.05, 0.5])
    assert found.retentions == (0.05, 0.5, 1.0)
    assert all(head[-1] == 0 for layer in found.cost for head in layer)
    base = batch_losses(model, ids, batch=2).mean()
    with replace_attention(model, Ablated(1, 2, TopK(0.05))), torch.no_grad():
        alone = batch_losses(model, ids, batch=2).mean()
    assert found.cost[1][2][0] == pytest.approx(float(alone - base), abs=1e-5)


def test_error_falls_as_more_is_kept_and_resumes(tmp_path):
    model, ids = tiny_model(), windows()
    options = {"measure": "error", "retentions": [0.05, 0.2, 0.6]}
    whole = measure_sensitivity(model, ids, Units(tmp_path / "whole"), **options)
    for layer in whole.cost:
        for head in layer:
            assert head == tuple(sorted(head, reverse=True))
            assert head[0] > 0

    def stop(work):
        yield from work[:1]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_sensitivity(model, ids, Units(tmp_path / "parts"), progress=stop, **options)
    assert measure_sensitivity(model, ids, Units(tmp_path / "parts"), **options) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measure": "taste"}, "error, loss"),
        ({"retentions": []}, "ascending"),
        ({"retentions": [0.5, 0.1]}, "ascending"),
        ({"retentions": [0.0]}, "ascending"),
    ],
)
def test_refuses_what_makes_no_sense(change, message, tmp_path):
    with pytest.raises(InputError, match=message):
        measure_sensitivity(tiny_model(), windows(), Units(tmp_path), **({"measure": "error", "retentions": [0.1]} | change))
