"""A device from compiled graphs and measured stages: the lines that were put in come out, and unknowns stay unknown."""

import numpy as np
import pandas as pd
import pytest

from shadowattn.errors import InputError
from shadowattn.online.simulation.description import load_device, save_device
from shadowattn.online.simulation.device import Layer
from shadowattn.online.simulation.npu import ESTIMATE, Line, npu_device, with_launch

LAYER = Layer(9, 3, 64)


def compiled(fixed_us: float = 5.0, ns: float = 2e-4) -> pd.DataFrame:
    macs = np.array([1e6, 1e7, 1e8, 1e9])
    common = {"part": "bank", "method": "int8", "head_dim": 64, "macs": macs}
    rows = pd.DataFrame(common | {"platform": "4000", "value": fixed_us + 1e-3 * ns * macs})
    failed = pd.DataFrame(common | {"platform": "4000", "value": np.nan})
    return pd.concat([rows, failed, rows.assign(platform="3720", value=7.0)])


def measured() -> pd.DataFrame:
    """One layer's stages in ms for 256 rows: 20 µs a head and 1 ns a pair, or 0.05 ns a pair and dimension."""
    rows = []
    for keys in (1024, 8192):
        pairs = 256 * keys - 256 * 255 / 2
        for stage, work, ns, retention in (
            ("select", pairs, 1.0, 0.2),
            ("one task", pairs * 64, 0.02, 0.2),
            ("attend sparse", 0.2 * pairs * 64, 0.05, 0.2),
            ("attend dense", pairs * 64, 0.05, 1.0),
        ):
            ms = 9 * (20 + 1e-3 * ns * work) / 1e3
            rows.append({"stage": stage, "context_tokens": keys, "chunk_rows": 256, "value": ms, "retention": retention})
    return pd.DataFrame(rows).assign(phase="prefill", metric="time", batch=1)


def test_a_line_is_found_again_and_is_never_negative():
    work = np.array([1e6, 1e7, 1e8])
    line = Line.through(work, 3.0 + 1e-3 * 0.5 * work)
    assert (line.fixed_us, line.ns, line.error) == pytest.approx((3.0, 0.5, 0.0), abs=1e-6)
    assert Line.through(work, 1e-6 * work**1.2).fixed_us == 0
    with pytest.raises(InputError, match="at least two compiled graphs"):
        Line.through(work[:1], work[:1])


def test_the_description_holds_both_sources_and_its_kinds(tmp_path):
    device = npu_device("4000", compiled(), measured(), LAYER, "two cores")
    found = (device.launch_us, device.estimate_ns, device.select_us, device.select_ns, device.attend_ns, device.dense_ns)
    assert [number.value for number in found] == pytest.approx([5.0, 2e-4, 20.0, 1.0, 0.05, 0.05], rel=1e-6)
    assert (device.launch_us.kind, device.attend_ns.kind) == (ESTIMATE, "measured")
    assert device.score_ns is None
    assert load_device(str(save_device(device, tmp_path / "npu.yaml"))) == device


def test_a_launch_is_added_to_what_the_compiler_predicts():
    device = with_launch(npu_device("4000", compiled(), measured(), LAYER, "two cores"), 200.0)
    assert device.launch_us.value == pytest.approx(205)


def test_rows_without_two_lengths_are_refused():
    with pytest.raises(InputError, match="at two lengths"):
        npu_device("4000", compiled(), measured().query("context_tokens == 1024"), LAYER, "two cores")
