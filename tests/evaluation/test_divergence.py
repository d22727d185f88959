"""How far a method moves the next-token distribution."""

from pathlib import Path

import pytest
import torch

import shadowattn
from shadowattn.engine.prefill import prefill_chunks
from shadowattn.errors import InputError
from shadowattn.evaluation.divergence import DenseLogits, window_divergences
from shadowattn.evaluation.perplexity import token_losses
from shadowattn.online.estimators.random import Random
from tests.tiny import tiny_model


def windows(count: int = 2, length: int = 70) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(3))


def test_dense_attention_does_not_diverge_from_itself():
    model, ids = tiny_model(), windows()
    losses, divergences = window_divergences(model, ids, DenseLogits(model, ids, chunk_tokens=32), chunk_tokens=32)
    assert losses.equal(token_losses(model, ids, chunk_tokens=32))
    assert divergences == pytest.approx([0, 0], abs=1e-9)


def test_dense_logits_are_the_models_and_leave_no_file(tmp_path):
    model, ids = tiny_model().bfloat16(), windows()
    dense = DenseLogits(model, ids, chunk_tokens=32, folder=tmp_path)
    with torch.no_grad():
        assert dense[1].equal(torch.cat([logits for _, logits in prefill_chunks(model, ids[1], chunk_tokens=32)]))
    assert dense[0].dtype == torch.bfloat16
    assert dense[0] is dense[0]
    assert dense.nbytes == sum(one.nbytes for one in (dense[0], dense[1]))
    assert not list(tmp_path.iterdir())


def test_dense_logits_lie_in_files_and_not_in_memory(tmp_path):
    model, ids = tiny_model(), windows()
    dense = DenseLogits(model, ids, chunk_tokens=32, folder=tmp_path)
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    _ = dense[0], dense[1]
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 2


def test_a_disk_that_takes_no_more_is_named(tmp_path):
    model, ids = tiny_model(), windows()
    with pytest.raises(InputError, match=r"the logits of dense attention: .*make room on the disk"):
        _ = DenseLogits(model, ids, chunk_tokens=32, folder=tmp_path / "missing")[0]


@torch.no_grad()
def test_it_is_the_mean_over_all_rows_of_kullback_and_leiblers():
    model, ids = tiny_model(), windows()
    dense = DenseLogits(model, ids, chunk_tokens=32)
    kept = [dense[0], dense[1]]
    with shadowattn.attach(model, 0.1, estimator=Random(), chunk_tokens=32):
        _, divergences = window_divergences(model, ids, kept, chunk_tokens=32)
        logits = [model(input_ids=window[None]).logits[0] for window in ids]
    for found, p, other in zip(divergences, kept, logits, strict=True):
        p = torch.softmax(p.double(), -1)
        by_hand = (p * (p.log() - torch.log_softmax(other.double(), -1))).sum(-1).mean()
        assert found == pytest.approx(float(by_hand), rel=1e-3)
        assert found > 0
