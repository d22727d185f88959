"""A benchmark's figures as tidy rows, so that `experiments.publish` keeps them like any other run's."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from experiments.environment import machine
from experiments.source import current_code
from shadowattn.artifacts import content_hash, sha256, versions, write_json
from shadowattn.reporting.rows import Row, write_rows


def save_result(
    folder: Path,
    *,
    experiment: str,
    model: str,
    settings: dict,
    result: Mapping[str, Mapping[str, float]],
    units: Mapping[str, str],
    counts: Mapping[str, int],
    command: str,
    started: datetime,
    by_seed: Mapping[int, Mapping[str, Mapping[str, float]]] | None = None,
) -> None:
    """Writes `rows.parquet`, a row for each method and metric with a unit in `units`, and `meta.json`, which makes it count.

    A method without a metric has no row for it. `counts`: how many values each metric is a mean or median of, its row's `n`.
    `by_seed` is further rows, one for each seed, method and metric. `started` in UTC.
    """
    cells = [
        (0, method, metric, values[metric], counts[metric])
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
    meta = {
        "experiment": experiment,
        "command": command,
        "config_hash": content_hash(settings),
        "code": asdict(current_code({})),
        "settings": settings,
        "machine": machine(),
        "versions": versions(),
        "started": started.isoformat(timespec="seconds"),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "result": dict(result),
        "rows_sha256": sha256(folder / "rows.parquet"),
    }
    write_json(folder / "meta.json", meta)
