"""The largest block that keeps the loss of per-row lists."""

import pandas as pd
import pytest

from shadowattn.reporting.sharing import largest_blocks, sharing_losses

# block_score, query_block, retention: what sharing adds to the loss, and half of its interval, nat
LOSSES = {
    ("max", 8, 0.1): (0.001, 0.002),
    ("max", 16, 0.1): (0.018, 0.003),  # the interval's upper end is above 0.02
    ("max", 32, 0.1): (0.004, 0.001),  # within, though a smaller block is not
    ("sum", 8, 0.1): (0.3, 0.01),
    ("sum", 16, 0.1): (0.3, 0.01),
    ("sum", 32, 0.1): (0.3, 0.01),
    ("max", 8, 0.2): (-0.01, 0.001),
    ("max", 16, 0.2): (0.0, 0.02),
    ("max", 32, 0.2): (0.0, 0.021),
}


@pytest.fixture
def rows():
    made = [
        {
            "method": "per_row",
            "retention": at,
            "query_block": 1,
            "block_score": "leading_query",
            "estimator": "int8",
            "metric": "density",
        }
        for at in (0.1, 0.2)
    ]
    for (score, block, at), (loss, half) in LOSSES.items():
        of = {
            "method": f"{score}_{block}",
            "retention": at,
            "query_block": block,
            "block_score": score,
            "estimator": "int8",
            "unit": "nat",
            "n": 12,
            "flag": "",
        }
        values = {"": -loss, "_low": -loss - half, "_high": -loss + half, "_error": half / 2, "_p": 0.01}
        made.append(of | {"metric": "density", "value": 0.2})
        for rival in ("per_row", "leading_query_8"):
            made += [
                of | {"metric": f"gain_over_{rival}{ending}", "value": x, "unit": "1" if ending == "_p" else "nat"}
                for ending, x in values.items()
            ]
    return pd.DataFrame(made)


def test_losses_are_those_above_per_row_lists(rows):
    found = sharing_losses(rows).set_index(["block_score", "query_block", "retention"])
    assert set(found.index) == set(LOSSES)
    for cell, (loss, half) in LOSSES.items():
        assert found.loc[cell, ["loss", "low", "high"]].tolist() == pytest.approx([loss, loss - half, loss + half])
    assert set(found.n) == {12}


def test_the_largest_block_is_within_and_so_is_every_smaller_one(rows):
    found = largest_blocks(rows, 0.02)
    assert found.loc[0.1, "max"] == 8
    assert found.loc[0.1, "sum"] == 1
    assert found.loc[0.2, "max"] == 16
