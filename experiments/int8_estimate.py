"""What `estimator=int8` stands for in a run: the native kernels, or OpenVINO's graphs; said at its start and in its rows."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import omegaconf
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from experiments.part_building import part_name
from shadowattn.kernels import native
from shadowattn.online.estimators.int8 import Int8

if TYPE_CHECKING:
    from experiments.lab import Lab

# What only graphs do; other settings of theirs change no score.
_PLAIN = {"inputs": "auto", "output": "float", "lookup": "raw"}
_LAUNCHING = ("grouped", "planned")


def served(lab: "Lab", estimator: DictConfig, selection: Any) -> tuple[DictConfig, str]:
    """An estimator's settings with the class that serves for `int8`, also as the one that it is around; and which and why, empty
    where `int8` is not named."""
    if get_class(estimator._target_) is Int8:
        graphs, why = _graphs(lab, selection)
        kind = Int8.of_run(graphs=graphs)
        part = OmegaConf.create({"_target_": f"{kind.__module__}.{kind.__qualname__}"})
        return part, f"int8 is {part_name(part)} here: {why}"
    inner = estimator.get("estimator")
    if not inner:
        return estimator, ""
    part, why = served(lab, inner, selection)
    if why:
        estimator = estimator.copy()
        with omegaconf.open_dict(estimator):
            estimator.estimator = part
    return estimator, why


def _graphs(lab: "Lab", selection: Any) -> tuple[bool, str]:
    """Whether graphs estimate, and why."""
    if asked := next(_asked_of_graphs(lab, selection), None):
        return True, f"{asked} takes graphs"
    if lab.device_name != "CPU":
        return True, f"{lab.device_name}, {lab.device.reason}"
    if lab.place.type == "cpu" and native.library() is None:
        return True, "the native kernels were not built"
    return False, f"CPU, {lab.device.reason}" if "device" in lab.needs else "the study takes no device for graphs"


def _asked_of_graphs(lab: "Lab", selection: Any) -> Iterator[str]:
    """Settings that the native kernels do not follow."""
    if selection.place == "device":
        yield "selection.place=device"
    if "pipeline" in lab.needs and lab.of("pipeline").mode in _LAUNCHING:
        yield f"pipeline={lab.of('pipeline').mode}"
    if "grid" in lab.needs and lab.of("grid").get("pattern", "product") != "product":
        yield f"grid.pattern={lab.of('grid').pattern}"
    for name, plain in _PLAIN.items() if "graphs" in lab.needs else ():
        if lab.of("graphs")[name] != plain:
            yield f"graphs.{name}={lab.of('graphs')[name]}"
