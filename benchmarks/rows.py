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
    by_seed: Mapping[int, Mapping[str, Mapping[str, float]]] | None = None,
    counts: Mapping[str, int] | None = None,
) -> None:
    """Writes `rows.parquet`, a row for each method and metric with a unit in `units`, and `meta.json`, which makes it count.

    A method without a metric has no row for it. `by_seed` is further rows, one for each seed, method and metric. `counts` says
    how many were averaged for a metric; the others are of so many rounds.
    """
    counts = counts or {}
    cells = [
        (0, method, metric, values[metric], counts.get(metric, settings["rounds"]))
        for method, values in result.items()
        for metric in units
        if metric in values
    ]
    cells += [
        (seed, method, metric, value, 1)
        for seed, methods in (by_seed or {}).items()
        for method, values in methods.items()
        for metric, value in values.items()
    ]
    rows = [
        Row(
            experiment=experiment,
            config_hash=content_hash(settings),
            metric=metric,
            value=float(value),
            unit=units[metric],
            method=method,
            model=model,
            retention=1.0,
            n=n,
            seed=seed,
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
        for seed, method, metric, value, n in cells
    ]
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(rows, folder / "rows.parquet")
    meta = {"settings": settings, "machine": machine(), "versions": versions(), "result": dict(result)}
    write_json(folder / "meta.json", meta)
