"""Sizes of unions by sets, and what stands in their way."""

import pytest
import torch

from shadowattn.evaluation.unions import UnionSizes, measure_unions, observe_last_rows
from shadowattn.kernels.torch_kernels import TorchKernels
from shadowattn.online.estimators.oracle import Oracle
from tests.tiny import tiny_model


def test_sizes_are_means_over_the_tiles_of_a_head():
    model, window, rows = tiny_model(), torch.arange(48) % 128, 16
    found = measure_unions(model, window, rows, {"oracle": Oracle()}, [0.2, 1.0], [2, 8], TorchKernels())
    chunks = []
    observe_last_rows(model, window, rows, chunks.append)
    assert [chunk.layer for chunk in chunks] == [0, 1]
    assert all(chunk.positions.tolist() == list(range(32, 48)) for chunk in chunks)
    for (_, retention, tile), sizes in found.items():
        expected = UnionSizes([], [])
        for chunk in chunks:
            scores = Oracle().scores(chunk)
            ratios, shares = [], []
            for head in scores:
                lists = [
                    set(row[: at + 1].topk(max(1, -int(-retention * (at + 1) // 1))).indices.tolist())
                    for at, row in zip(chunk.positions.tolist(), head, strict=True)
                ]
                unions = [(set().union(*lists[i : i + tile]), lists[i : i + tile], 32 + i + tile) for i in range(0, rows, tile)]
                ratios.append(sum(len(u) / (sum(map(len, of)) / tile) for u, of, _ in unions) / len(unions))
                shares.append(sum(len(u) / seen for u, _, seen in unions) / len(unions))
            expected.ratio.append(ratios)
            expected.share.append(shares)
        assert sizes.ratio == [pytest.approx(layer) for layer in expected.ratio]
        assert sizes.share == [pytest.approx(layer) for layer in expected.share]
    assert found["oracle", 1.0, 8].share == [[1.0] * 4] * 2
