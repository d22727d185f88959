"""How much of the standard library's text the bundled model has seen in training: runs of four lines that occur in both.

python -m experiments.reference_model.overlap          seconds
"""

from rich.table import Table

from experiments.progress import show
from shadowattn.data.overlap import line_runs, load_runs, shared_fraction
from shadowattn.data.stdlib import stdlib_text
from shadowattn.data.text import TRAINING_RUNS, stdlib_corpus


def main() -> None:
    seen, corpus = load_runs(TRAINING_RUNS), stdlib_corpus()
    texts = {
        "held-out files": stdlib_text("heldout"),
        "held-out text, as measured on": corpus.heldout,
        "calibration text": corpus.calibration,
    }
    table = Table(title=f"standard library against {len(seen)} runs of four lines trained on", title_justify="left")
    table.add_column("text")
    for heading in ("runs of four lines", "also trained on"):
        table.add_column(heading, justify="right")
    for name, text in texts.items():
        table.add_row(name, f"{len(line_runs(text))}", f"{shared_fraction(text, seen):.2%}")
    show(table)


if __name__ == "__main__":
    main()
