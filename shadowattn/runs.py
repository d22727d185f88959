"""A finished run of an experiment, read back: what it was asked for, its rows and its profiles."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowattn import checks
from shadowattn.artifacts import read_json, sha256
from shadowattn.errors import InputError
from shadowattn.offline.profile import load_profile
from shadowattn.types import RetentionProfile

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Run:
    """`meta` is all of `meta.json`: command, code, machine, versions and more; `config` the settings in it.

    `profiles` by the name of their file, METHOD@RETENTION; an experiment that made none has none.
    """

    folder: Path
    meta: dict[str, Any] = field(repr=False)
    rows: "pd.DataFrame" = field(repr=False)
    profiles: dict[str, RetentionProfile] = field(repr=False)

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the run, resolved."""
        return self.meta["config"]


def load_run(folder: str | Path) -> Run:
    """Reads a run's folder, `results/runs/EXPERIMENT/HASH`.

    Raises `InputError` where it is none or not finished, and where its rows are altered or cut short.
    """
    try:
        import pandas as pd  # a second to import
    except ImportError as error:
        raise InputError("load_run: expected pandas and pyarrow, found none; pip install 'shadowattn[experiments]'") from error
    if not isinstance(folder, str | Path):
        raise InputError(f"load_run: expected the path of a run's folder, got {checks.shown(folder)}")
    folder = Path(folder).expanduser()
    if not (folder / "meta.json").is_file():
        folders = sorted(str(path.parent) for path in folder.glob("*/meta.json"))[:3] if folder.is_dir() else []
        hint = f"; there are {', '.join(folders)}" if folders else "; finish it with the command that began it"
        raise InputError(f"{folder}: expected the folder of a finished run, found no meta.json in it{hint}")
    remedy = f"measure again with: rm -r {folder}, then the same command"
    meta, path = read_json(folder / "meta.json", remedy), folder / "rows.parquet"
    if not isinstance(meta, dict) or not path.is_file() or sha256(path) != meta.get("rows_sha256"):
        raise InputError(f"{path}: missing, altered or cut short; {remedy}")
    profiles = {file.stem: load_profile(file) for file in sorted((folder / "profiles").glob("*.json"))}
    return Run(folder, meta, pd.read_parquet(path), profiles)
