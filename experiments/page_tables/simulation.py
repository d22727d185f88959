"""The simulator against the executor."""

from experiments.page_tables.common import recorded, rows_of, table
from shadowattn.reporting.predictions import prediction_errors


def simulated() -> str:
    """The simulator's error on this machine's executor; rows of its earlier form are no evidence."""
    if not recorded("validate_simulator"):
        return "Not measured yet in this form; the rows and the figure are of an earlier one, and nothing is quoted from them."
    rows = rows_of("validate_simulator")
    lines = [one.cells() for one in prediction_errors(rows)]
    header = ["mode", "costs from", "mean error (95 %)", "worst", "within 10 %", "target"]
    calls = int(rows[rows.metric == "makespan"].n.max())
    return table(
        header, lines, "validate_simulator", f"n = {prediction_errors(rows)[0].chunks} held-out chunks, {calls} calls each"
    )
