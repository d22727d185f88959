"""A sweep's cells, and the answers of methods, split over processes of the same command."""

import pandas as pd
import pytest

from tests.experiments.test_run import SMALL, run, tiny_folder

__all__ = ["tiny_folder"]

STUDIES = {
    "sweep_retention": [
        "retentions=[0.1,0.5]",
        "allocator=uniform",
        "~estimator@compare.waterfill.estimator",
        "~allocator@compare.waterfill.allocator",
    ],
    "study_accuracy": [
        *("allocator=uniform", "study.least=0", "~study.tasks.records", "~study.tasks.copy"),
        *(
            "study.tasks.needle.wording=note",
            "study.tasks.needle.documents=2",
            "study.tasks.needle.tokens=96",
            "graphs.chunk_tokens=64",
        ),
    ],
}


@pytest.mark.parametrize("study", STUDIES)
def test_shards_together_measure_what_one_process_does(study, tiny_folder, tmp_path):
    command = [
        f"+exp={study}",
        *SMALL,
        *STUDIES[study],
        "model=local",
        f"model.path={tiny_folder}",
        "data=text",
        f"data.path={tiny_folder / 'text.txt'}",
    ]
    whole = run(*command, f"paths.results={tmp_path / 'whole'}")
    assert whole.returncode == 0, whole.stderr
    shards = [*command, f"paths.results={tmp_path / 'shards'}", "shard.count=2"]
    first = run(*shards, "shard.index=1")
    assert first.returncode == 0, first.stderr
    assert "shard 1 of 2 has done its share" in first.stderr
    assert not list(tmp_path.glob("shards/runs/*/*/meta.json"))
    pieces = len(list(tmp_path.glob("shards/runs/*/*/*/*@*.json")))
    second = run(*shards, "shard.index=0")
    assert second.returncode == 0, second.stderr
    assert len(list(tmp_path.glob("shards/runs/*/*/*/*@*.json"))) > pieces
    rows = [pd.read_parquet(next(tmp_path.glob(f"{folder}/runs/{study}/*/rows.parquet"))) for folder in ("whole", "shards")]
    pd.testing.assert_frame_equal(*rows, check_exact=True)
