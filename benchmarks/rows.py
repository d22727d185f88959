"""A benchmark's figures as tidy rows, so that `experiments.publish` keeps them like any other run's."""

from collections.abc import Mapping
from pathlib import Path

from experiments.machine import machine
from shadowattn.artifacts import content_hash, versions, write_json
from shadowattn.reporting.rows import Row, write_rows


def save_result(
    folder: Path,
    *,
    experiment: str,
    model: str,
    settings: dict,
    result: Mapping[str, Mapping[str, float]],
    units: Mapping[str, str],
) -> None:
    """Writes `rows.parquet`, a row for each method and metric with a unit in `units`, and `meta.json`, which makes it count."""
    rows = [
        Row(
            experiment=experiment,
            config_hash=content_hash(settings),
            metric=metric,
            value=float(values[metric]),
            unit=unit,
            method=method,
            model=model,
            retention=1.0,
            n=settings["rounds"],
            seed=0,
            path_kind="timing",
            estimate_device="none",
            measured="measured",
            kernel="torch",
            estimator="none",
            allocator="none",
            query_block=1,
            block_score="none",
            context_tokens=128,
            data="stdlib",
            corpus_sha256="",
            flag="",
        )
        for method, values in result.items()
        for metric, unit in units.items()
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / "rows.parquet")
    meta = {"settings": settings, "machine": machine(), "versions": versions(), "result": dict(result)}
    write_json(folder / "meta.json", meta)
