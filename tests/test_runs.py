"""A run's folder read back without any configuration."""

import json

import pandas as pd
import pytest

import shadowattn
from shadowattn.artifacts import sha256
from shadowattn.errors import InputError
from shadowattn.offline import save_profile
from tests.profiles import profile_for
from tests.tiny import tiny_model


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "quickstart" / "0123"
    run.mkdir(parents=True)
    pd.DataFrame({"metric": ["loss"], "value": [1.5]}).to_parquet(run / "rows.parquet")
    save_profile(profile_for(tiny_model(), 0.2), run / "profiles" / "ours@0.2.json")
    meta = {"config": {"seed": 3}, "command": "python -m experiments.run", "rows_sha256": sha256(run / "rows.parquet")}
    (run / "meta.json").write_text(json.dumps(meta))
    return run


def test_a_run_is_its_settings_rows_and_profiles(folder):
    run = shadowattn.load_run(folder)
    assert run.config == {"seed": 3}
    assert run.rows.value.tolist() == [1.5]
    assert run.profiles == {"ours@0.2": profile_for(tiny_model(), 0.2)}
    assert shadowattn.load_run(str(folder)).meta == run.meta


def test_what_is_no_finished_run_is_refused(folder):
    with pytest.raises(InputError, match=r"no meta.json in it; there are .*0123"):
        shadowattn.load_run(folder.parent)
    (folder / "rows.parquet").write_bytes(b"")
    with pytest.raises(InputError, match="altered or cut short"):
        shadowattn.load_run(folder)
    (folder / "meta.json").unlink()
    with pytest.raises(InputError, match="finish it with the command that began it"):
        shadowattn.load_run(folder)
    with pytest.raises(InputError, match=r"no meta.json"):
        shadowattn.load_run(folder / "nowhere")
    for wrong in (None, 3, ["a"]):
        with pytest.raises(InputError, match="expected the path of a run's folder"):
            shadowattn.load_run(wrong)
