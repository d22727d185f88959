"""What first looks cost is measured once for its settings and for what is taken off K."""

from types import SimpleNamespace

import pytest
import torch

from experiments import first_looks
from experiments.first_looks import FirstLook
from shadowattn.artifacts import Stage
from shadowattn.types import FirstLookLosses, KeyOffset


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """One whose stages lie in a folder of the test's own; `asked` counts what was measured."""
    asked = []

    def measured(model, windows, **how):
        asked.append(how)
        return FirstLookLosses([[0.1, 0.2]], how["candidates"], how["block_rows"], "print")

    monkeypatch.setattr(first_looks, "observe_first_look", measured)
    return SimpleNamespace(
        asked=asked,
        shape=SimpleNamespace(layers=1, heads=2),
        loaded=SimpleNamespace(model=None),
        calibration=lambda tokens, windows: torch.zeros(windows, tokens, dtype=torch.long),
        stage=lambda name, inputs: Stage(tmp_path, name, inputs, code="code"),
    )


def offset(value: float) -> KeyOffset:
    return KeyOffset([[[value] * 8]])


def test_it_is_measured_once(lab):
    look = FirstLook(64, 2, 16, 1.25, 32)
    assert look.losses(lab) == look.losses(lab)
    assert FirstLook(64, 2, 16, 1.25, 32).losses(lab, None) == look.losses(lab)
    assert len(lab.asked) == 1


def test_other_settings_and_other_offsets_are_measured_for_themselves(lab):
    looks = [FirstLook(64, 2, 16, 1.25, 32), FirstLook(64, 2, 16, 2.0, 32), FirstLook(64, 1, 16, 1.25, 32)]
    for look in looks:
        look.losses(lab)
    for value in (1.0, 2.0, 1.0):
        looks[0].losses(lab, offset(value))
    assert len(lab.asked) == 5
    assert [how["key_offset"] for how in lab.asked[3:]] == [offset(1.0), offset(2.0)]
