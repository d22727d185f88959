"""Puts a finished run where the repository keeps it: `python -m experiments.publish results/runs/EXPERIMENT/HASH`.

Its rows become `results/reference/EXPERIMENT.csv`, and the figure drawn from that file `docs/EXPERIMENT.png`.
"""

import sys
from pathlib import Path

import pandas as pd

from shadowattn.reporting.figures import quality_against_retention

ROOT = Path(__file__).parents[1]


def read_reference(path: Path) -> pd.DataFrame:
    """Committed rows; an empty flag stays an empty string."""
    return pd.read_csv(path, keep_default_na=False)


def publish(run: Path) -> tuple[Path, Path]:
    """Writes the CSV and the figure of one finished run and returns their paths."""
    if not (run / "meta.json").is_file():
        raise SystemExit(f"error: expected the folder of a finished run, with meta.json in it, got {str(run)!r}")
    rows = pd.read_parquet(run / "rows.parquet")
    table = ROOT / "results" / "reference" / f"{rows.experiment.iloc[0]}.csv"
    rows.to_csv(table, index=False)
    return table, quality_against_retention(read_reference(table), ROOT / "docs" / f"{table.stem}.png")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"error: expected one folder of a finished run, got {len(sys.argv) - 1} arguments\n{__doc__}")
    for written in publish(Path(sys.argv[1])):
        print(written.relative_to(ROOT))
