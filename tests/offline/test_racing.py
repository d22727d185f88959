"""A race stops early, says what it measured, and ends the same however it was interrupted."""

from dataclasses import replace

import pytest
import torch

from shadowattn.artifacts import Units
from shadowattn.errors import InputError
from shadowattn.offline import (
    Race,
    allocate,
    measure_ablations,
    race_ablations,
    rank_correlation,
    replay_race,
    stability,
    summarise,
)
from shadowattn.offline.racing import unsettled
from shadowattn.offline.stability import increases
from shadowattn.types import AblationLosses, Importance
from tests.tiny import tiny_model


def windows(count: int = 12, length: int = 24) -> torch.Tensor:
    return torch.randint(0, 128, (count, length), generator=torch.Generator().manual_seed(2))


def allot(importance: Importance):
    return allocate(importance.head_ppl, importance.layer_ppl, base_ppl=importance.base_ppl, retention=0.2, method="waterfill")


def uniform(importance: Importance):
    return [[0.2] * len(layer) for layer in importance.head_ppl]


def test_a_race_that_never_settles_is_the_exact_measurement(tmp_path):
    calls = []

    def restless(importance: Importance):
        calls.append(importance)
        return [[0.2 + 0.01 * len(calls)] * len(layer) for layer in importance.head_ppl]

    strict = Race(first=4, z=1.0, tolerance=0.0, overlap=0.0)
    raced = race_ablations(tiny_model(), windows(), Units(tmp_path / "race"), restless, race=strict)
    exact = measure_ablations(tiny_model(), windows(), Units(tmp_path / "exact"))
    flat = [torch.tensor(increases(summarise(losses))) for losses in (raced, exact)]
    torch.testing.assert_close(*flat, rtol=1e-4, atol=1e-6)
    assert sorted(raced.base) == pytest.approx(sorted(exact.base))
    assert raced.window_forwards == exact.window_forwards == 12 * 10


def test_an_allocator_that_looks_at_nothing_is_settled_after_the_first_round(tmp_path):
    race = Race(first=4, z=1.0, tolerance=0.1, overlap=1.0)
    raced = race_ablations(tiny_model(), windows(), Units(tmp_path), uniform, race=race)
    assert raced.window_forwards == 4 * 10
    assert len(raced.base) == 12


def test_a_race_ends_near_the_exact_profile(tmp_path):
    raced = race_ablations(tiny_model(layers=4), windows(16), Units(tmp_path / "race"), allot, race=Race(first=4))
    exact = measure_ablations(tiny_model(layers=4), windows(16), Units(tmp_path / "exact"))
    assert raced.window_forwards <= exact.window_forwards
    assert rank_correlation(increases(summarise(raced)), increases(summarise(exact))) > 0.8


def test_a_replay_measures_what_the_race_measures(tmp_path):
    exact = measure_ablations(tiny_model(layers=3), windows(24), Units(tmp_path / "exact"))
    for seed in (0, 1):
        race = Race(first=4, z=0.5, tolerance=0.3, overlap=0.6, seed=seed)
        raced = race_ablations(tiny_model(layers=3), windows(24), Units(tmp_path / f"race{seed}"), allot, race=race)
        replayed = replay_race(exact, allot, race=race)
        assert 4 * 15 < raced.window_forwards < 24 * 15  # some stopped early, and not all in the first round
        assert _units(replayed).keys() == _units(raced).keys()
        for name, unit in _units(raced).items():
            assert _units(replayed)[name] == pytest.approx(unit, abs=1e-5)


def _units(losses: AblationLosses) -> dict[str, tuple[float, ...]]:
    """Losses by name, with how many there are: what a race decides."""
    units = {"base": losses.base} | {f"L{layer} {len(unit)}": unit for layer, unit in enumerate(losses.layers)}
    return units | {f"L{i}_H{h} {len(unit)}": unit for i, row in enumerate(losses.heads) for h, unit in enumerate(row)}


def test_the_error_of_a_mean_over_all_windows_is_zero():
    """Windows are drawn without replacement: what all of them give is the profile that a race is held to."""
    noise = torch.randn(4, 12, generator=torch.Generator().manual_seed(0)).add(3).tolist()
    heads = (tuple(map(tuple, noise[:2])), tuple(map(tuple, noise[2:])))
    complete = AblationLosses((1.0,) * 12, ((2.0,) * 12,) * 2, heads, "zero", 8)
    strict = Race(first=4, z=100.0, tolerance=0.0, overlap=0.0)
    assert unsettled(complete, allot, strict) == set()
    half = replace(complete, heads=tuple(tuple(unit[:6] for unit in row) for row in heads))
    assert unsettled(half, allot, strict) >= {"L0_H0", "L1_H1"}


def test_an_interrupted_race_ends_in_the_same_numbers(tmp_path):
    race = Race(first=3, z=0.5, tolerance=0.1, overlap=0.3)
    whole = race_ablations(tiny_model(), windows(), Units(tmp_path / "whole"), allot, race=race)

    def stop(work):
        yield from work[:2]
        raise KeyboardInterrupt

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            race_ablations(tiny_model(), windows(), Units(tmp_path / "parts"), allot, race=race, progress=stop)
    assert race_ablations(tiny_model(), windows(), Units(tmp_path / "parts"), allot, race=race) == whole


def test_shards_race_round_by_round(tmp_path):
    race = Race(first=3, z=0.5, tolerance=0.1, overlap=0.3)
    whole = race_ablations(tiny_model(), windows(), Units(tmp_path / "whole"), allot, race=race)
    units, found = Units(tmp_path / "shards"), None
    for _ in range(len(race.rounds(12))):
        for index in range(2):
            found = race_ablations(tiny_model(), windows(), units, allot, race=race, shard_index=index, shard_count=2)
    assert found == whole


def test_rounds_grow_by_half_and_end_at_the_last_window():
    assert [(r.start, r.stop) for r in Race(first=4).rounds(17)] == [(0, 4), (4, 6), (6, 9), (9, 13), (13, 17)]
    assert [r.stop for r in Race(first=2).rounds(5)] == [2, 3, 4, 5]
    assert [(r.start, r.stop) for r in Race(first=8).rounds(5)] == [(0, 5)]


@pytest.mark.parametrize("wrong", [{"first": 1}, {"z": 0.0}, {"tolerance": -1.0}, {"overlap": 2.0}])
def test_a_race_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(InputError, match="expected first"):
        Race(**wrong)


def test_rank_correlation():
    assert rank_correlation([1, 2, 3], [10, 200, 3000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 1, 2], [1, 1, 5]) == pytest.approx(1)  # ties share their rank
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1], [2, 2]) == 1.0
    assert rank_correlation([1, 1], [1, 2]) == 0.0


def test_stability_of_text_that_says_the_same_everywhere_is_perfect():
    same = AblationLosses((1.0,) * 6, ((2.0,) * 6, (3.0,) * 6), (((1.5,) * 6, (1.2,) * 6), ((1.1,) * 6, (4.0,) * 6)), "zero", 8)
    found = stability(same, allot)
    assert (found.head_rank, found.layer_rank) == (pytest.approx(1), pytest.approx(1))
    assert found.largest_spread == pytest.approx(0, abs=1e-12)


def test_stability_of_noise_is_low_and_repeats():
    noise = torch.randn(2, 8, 10, generator=torch.Generator().manual_seed(0)).abs().add(1).tolist()
    losses = AblationLosses((1.0,) * 10, ((2.0,) * 10,) * 2, tuple(tuple(map(tuple, layer)) for layer in noise), "zero", 8)
    found = stability(losses, allot)
    assert abs(found.head_rank) < 0.7
    assert found.mean_spread > 0.01
    assert found == stability(losses, allot)


def test_stability_needs_two_windows():
    with pytest.raises(InputError, match="at least 2"):
        stability(AblationLosses((1.0,), ((2.0,),), (((1.5,),),), "zero", 8), allot)
