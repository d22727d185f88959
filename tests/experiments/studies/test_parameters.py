"""What the parameter sets say depends on the study's settings."""

import random

import pytest

from experiments.studies.parameters import Parameters, outcome
from shadowattn.errors import InputError
from shadowattn.online.simulation import parameters, ttft


def test_energies_are_predicted_of_the_models_that_the_powers_are_not_fitted_on():
    fitting = next(made for n in range(20) if (made := parameters.fit_core(parameters.draw_parameters(random.Random(f"0 {n}")))))
    beside = {name: low for name, (low, _) in ttft.RANGES.items()}
    made = outcome(fitting, beside, ["Qwen2-0.5B"])
    saved = {name for name in made if name.startswith("energy_saved")}
    assert saved == {"energy_saved PhoneLM-0.5B", "energy_saved PhoneLM-1.5B", "energy_saved Qwen2-1.5B"}
    assert made["median_energy_error"] != outcome(fitting, beside)["median_energy_error"]
    with pytest.raises(InputError, match=r"study.fitted_models: expected some of"):
        Parameters(fitted_models=["Qwen9"])
