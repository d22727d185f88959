"""Energy from counters of a pretended machine: which packages count, overflow, and what is said where there are none."""

import pytest

from shadowattn.energy import counters, energy_source, joules
from shadowattn.errors import InputError


def domain(root, folder: str, name: str, energy_uj: int, range_uj: int = 1000_000_000):
    path = root / folder
    path.mkdir()
    (path / "name").write_text(f"{name}\n")
    (path / "energy_uj").write_text(f"{energy_uj}\n")
    (path / "max_energy_range_uj").write_text(f"{range_uj}\n")
    return path / "energy_uj"


def test_packages_count_and_their_parts_do_not(tmp_path):
    first = domain(tmp_path, "intel-rapl:0", "package-0", 5_000_000)
    second = domain(tmp_path, "intel-rapl:1", "package-1", 999_000_000)
    domain(tmp_path, "intel-rapl:0:0", "core", 7)
    assert [counter.path for counter in counters(tmp_path)] == [first, second]
    assert energy_source(tmp_path) == "rapl"

    def call():  # 2 J in one package; 3 J in the other, whose counter begins anew
        first.write_text(str(int(first.read_text()) + 2_000_000))
        second.write_text(str((int(second.read_text()) + 3_000_000) % 1_000_000_000))

    assert joules(call, seconds=0, root=tmp_path) == pytest.approx(5)


def test_calls_share_what_was_spent(tmp_path):
    # a counter that does not begin anew within 0.02 s, however many calls a fast machine makes in it
    counter, made = domain(tmp_path, "intel-rapl:0", "package-0", 0, range_uj=10**15), []

    def call():
        made.append(1)
        counter.write_text(str(4_000_000 * len(made)))

    assert joules(call, seconds=0.02, root=tmp_path) == pytest.approx(4)
    assert len(made) > 1


def test_a_machine_without_counters_measures_nothing(tmp_path):
    assert energy_source(tmp_path) == "none"
    broken = domain(tmp_path, "intel-rapl:0", "package-0", 0)
    broken.write_text("no number")
    assert energy_source(tmp_path) == "none"
    with pytest.raises(InputError, match="expected RAPL counters"):
        joules(lambda: None, seconds=0, root=tmp_path)
