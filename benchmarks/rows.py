"""A benchmark's figures as tidy rows, so that `experiments.publish` keeps them like any other run's."""

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from experiments.machine import machine
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
) -> None:
    """Writes `rows.parquet`, a row for each method and metric with a unit in `units`, and `meta.json`, which makes it count.

    `counts`: how many values each metric is a mean or median of, its row's `n`. `started` in UTC.
    """
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
            n=counts[metric],
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
