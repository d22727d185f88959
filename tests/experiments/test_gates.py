import pandas as pd
import pytest
from rich.console import Console

from experiments.gates import GATES, averaged, table
from experiments.publish import ROOT
from experiments.reference_model.gates import Samples
from shadowattn.reporting.figures import loss_by_position


@pytest.mark.parametrize("name", GATES)
def test_a_gate_passes_on_its_side_of_the_bar(name):
    gate = GATES[name]
    beyond = -0.001 if gate.at_most else 0.001
    assert gate.passed(gate.bar)
    assert gate.passed(gate.bar + beyond)
    assert not gate.passed(gate.bar - beyond)


def test_the_table_says_which_failed():
    rows = pd.DataFrame({"metric": list(GATES), "value": [1e9] * len(GATES)})
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table(rows, "gates"))
    assert capture.get().count("passed") == 6
    assert capture.get().count("FAILED") == 1  # a loss increase has to be small


def test_n_is_the_number_of_what_was_averaged():
    counts = averaged(Samples(), predicted=16368, heads=32)
    assert set(counts) == set(GATES)
    assert (counts["key_value_accuracy"], counts["needle_accuracy"]) == (100, 60)
    assert (counts["context_gain"], counts["importance_ratio"], counts["oracle_loss_increase"]) == (48, 32, 16368)


def test_the_committed_gates_were_measured_on_the_committed_model_and_passed(tmp_path):
    rows = pd.read_csv(ROOT / "results" / "reference" / "model_gates.csv", keep_default_na=False)
    values = rows.set_index("metric").value
    assert all(gate.passed(values[name]) for name, gate in GATES.items())
    losses = rows[rows.metric.str.startswith("loss_at_")].value.tolist()
    assert loss_by_position(losses, tmp_path / "loss.png").stat().st_size > 5_000
