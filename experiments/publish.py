"""Puts a finished run where the repository keeps it: `python -m experiments.publish results/runs/EXPERIMENT/HASH`.

Its rows become `results/reference/EXPERIMENT.csv`; the figure drawn from that file, of a sweep and of the experiments that have
one of their own, becomes `docs/EXPERIMENT.png`.
"""

import sys
from pathlib import Path

import pandas as pd

from shadowattn.reporting import (
    graph_figures,
    offline_figures,
    pipeline_figures,
    recall_figures,
    scheduler_figures,
    simulation_figures,
)
from shadowattn.reporting.figures import quality_against_query_block, quality_against_retention

FIGURES = {
    "study_allocators": offline_figures.allocators,
    "offline": offline_figures.need,
    "study_query_block": quality_against_query_block,
    "latency_profile": pipeline_figures.latency,
    "fig9": pipeline_figures.gantt,
    "graphs": graph_figures.bank,
    "table4": recall_figures.recall,
    "table4_wikitext": recall_figures.recall,
    "table4_wikitext_stories": recall_figures.recall,
    "fig14": recall_figures.buckets,
    "study_schedulers": scheduler_figures.gaps,
    "validate_simulator": simulation_figures.validation,
    "fig10": simulation_figures.fig10,
    "fig15": simulation_figures.fig15,
    "table8": simulation_figures.table8,
    "study_scale": simulation_figures.scale,
}
# Columns in which nothing means not a number.
_NUMBERS = ("value", "sigma", "published")
ROOT = Path(__file__).parents[1]


def read_reference(path: Path) -> pd.DataFrame:
    """Committed rows; an empty flag stays an empty string."""
    return pd.read_csv(path, keep_default_na=False, na_values={column: [""] for column in _NUMBERS}, dtype={"config_hash": str})


def publish(run: Path) -> list[Path]:
    """Writes the CSV, and for several retentions the figure, of one finished run and returns what it wrote."""
    if not (run / "meta.json").is_file():
        raise SystemExit(f"error: expected the folder of a finished run, with meta.json in it, got {str(run)!r}")
    rows = pd.read_parquet(run / "rows.parquet")
    written = [ROOT / "results" / "reference" / f"{rows.experiment.iloc[0]}.csv"]
    rows.to_csv(written[0], index=False)
    draw = FIGURES.get(written[0].stem, quality_against_retention if rows.retention.nunique() > 3 else None)
    if draw is not None:
        written.append(draw(read_reference(written[0]), ROOT / "docs" / f"{written[0].stem}.png"))
    return written


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit(f"error: expected one folder of a finished run, got {len(sys.argv) - 1} arguments\n{__doc__}")
    for written in publish(Path(sys.argv[1])):
        print(written.relative_to(ROOT))
