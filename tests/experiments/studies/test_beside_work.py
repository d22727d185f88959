"""Attention beside other programs: loads run when they should and are gone afterwards; slowdowns are quotients of a round."""

import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import pytest
import torch

from experiments.random_layers import Case
from experiments.studies.beside_work import LOADS, QUIET, BesideRow, BesideWork, Programs, rows_of
from shadowattn.errors import InputError, StageError
from tests.experiments.test_pipeline import run
from tests.experiments.test_run import tiny_folder

__all__ = ["run", "tiny_folder"]  # fixtures
ROOT = Path(__file__).parents[3]
CASE = Case("smollm2-135m", torch.float32, 128, 32, 0.2)


def ticks(pid: int) -> int:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def computes(pid: int) -> bool:
    """Whether a process is there, and has not ended without anybody asking how."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_programs_compute_in_their_turn_alone_and_are_gone_afterwards():
    with Programs([QUIET, "one loop", "two loops"], threads=1) as programs:
        one, two = (programs._processes[load] for load in ("one loop", "two loops"))
        assert (len(one), len(two), programs._processes[QUIET]) == (1, 2, [])
        before = [ticks(process.pid) for process in two]
        with programs.running("one loop"):
            start, deadline = ticks(one[0].pid), time.monotonic() + 60
            while ticks(one[0].pid) < start + 3 and time.monotonic() < deadline:
                time.sleep(0.01)
            assert ticks(one[0].pid) >= start + 3
        assert [ticks(process.pid) for process in two] == before
    assert all(process.poll() is not None for process in (*one, *two))


def test_a_program_that_does_not_begin_is_named(monkeypatch):
    monkeypatch.setitem(LOADS, "two loops", (LOADS["one loop"][0], ("import no_such_module", "pass")))
    programs = Programs([QUIET, "one loop", "two loops"], threads=1)
    with pytest.raises(StageError, match="the program 'two loops' ended with status 1"), programs:
        raise AssertionError("begun")
    assert all(process.poll() is not None for some in programs._processes.values() for process in some)


def test_a_program_that_ends_in_its_turn_is_named():
    with Programs([QUIET, "one loop"], threads=1) as programs:
        (one,) = programs._processes["one loop"]
        turn = programs.running("one loop")
        turn.__enter__()
        one.kill()
        one.wait()
        with pytest.raises(StageError, match="a program of 'one loop' ended with status -9"):
            turn.__exit__(None, None, None)


def test_a_program_ends_with_the_process_that_began_it():
    code = "from experiments.studies.beside_work import LOADS, _begin\nimport os\n"
    code += "one = _begin('one loop', *LOADS['one loop'][0])\nprint(one.pid, flush=True)\nos._exit(1)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    pid, deadline = int(done.stdout), time.monotonic() + 60
    while computes(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not computes(pid)


def spent(seconds: list[float], cores: float) -> dict[str, list[float]]:
    return {"wall": seconds, "cpu": [cores * one for one in seconds]}


def test_slowdowns_are_of_the_same_round():
    quiet, loaded = (
        {"sdpa": spent([1.0, 2.0, 4.0], 2), "own dense": spent([1.0, 1.0, 1.0], 2)},
        {"sdpa": spent([2.0, 4.0, 8.0], 1), "own dense": spent([3.0, 3.0, 9.0], 1)},
    )
    rows = pd.DataFrame(rows_of(BesideRow(*[""] * 22), CASE, {QUIET: quiet, "one loop": loaded}))
    cells = rows.set_index(["load", "method", "metric"]).value
    assert cells["one loop", "sdpa", "time"] == 4000
    assert cells["one loop", "sdpa", "slowdown"] == 2
    assert cells["one loop", "own dense", "slowdown"] == 3
    assert cells["one loop", "own dense", "slowdown_over_sdpa"] == 1.5
    assert (cells[QUIET, :, "slowdown"] == 1).all()


def test_a_slowdown_is_that_of_the_processor_time_times_that_of_the_cores():
    quiet, loaded = {"sdpa": spent([1.0, 2.0, 4.0], 2)}, {"sdpa": spent([3.0, 6.0, 12.0], 0.8)}
    rows = pd.DataFrame(rows_of(BesideRow(*[""] * 22), CASE, {QUIET: quiet, "one loop": loaded}))
    cells = rows.set_index(["load", "method", "metric"]).value
    assert cells["one loop", "sdpa", "cpu_time"] == pytest.approx(4800)
    assert cells["one loop", "sdpa", "cpu_time_over_quiet"] == pytest.approx(1.2)
    assert cells["one loop", "sdpa", "cores"] == pytest.approx(0.8)
    assert cells[QUIET, "sdpa", "cores"] == 2
    assert cells["one loop", "sdpa", "slowdown"] == pytest.approx(1.2 * 2 / 0.8)


def test_every_way_to_attend_is_timed_beside_every_load(run, capsys):
    short = ["study.rounds=2", "study.keys=128", "study.rows=32", "study.dtypes=[float32]"]
    folder = run("study_beside_work", "+exp=study_beside_work", *short, "study.loads=[nothing,one loop]")
    rows = pd.read_parquet(folder / "rows.parquet")
    methods = {"sdpa", "own dense", "total (int8_graph), per row", "total (int8_fused), per row"}
    methods |= {"total (hierarchical), per row", "total (int8_fused), 32-row blocks, probability"}
    for waiting in ("spinning", "asleep"):
        some = rows[(rows.waiting == waiting) & (rows.metric == "time")].set_index(["load", "method"])
        assert set(some.index) == {(load, method) for load in ("nothing", "one loop") for method in methods}
    assert (rows.low <= rows.value).all()
    assert (rows.value <= rows.high).all()
    assert (folder / "beside_work.png").is_file()
    assert rows[rows.metric == "cores"].value.gt(0).all()
    assert "processor time ×" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loads": ["one loop"]}, "study.loads: expected nothing, which others are compared with"),
        ({"loads": ["nothing", "music"]}, f"study.loads: expected one of {', '.join(LOADS)}, got 'music'"),
        ({"waiting": []}, "study.waiting: expected at least one"),
        ({"retention": 0}, "study.retention: expected a share"),
        ({"keys": 100}, "study.keys"),
    ],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        BesideWork(**settings)
