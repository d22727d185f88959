"""Where a model is put: in the CPU's memory, or on a GPU that torch drives."""

import re

import torch

from shadowattn.errors import InputError


def find_place(name: str) -> torch.device:
    """torch's device for `cpu`, `cuda` or `cuda:N`; torch calls AMD's GPUs cuda too.

    Raises `InputError` on any other name, and where torch finds no such GPU.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", name):
        raise InputError(f"model.device: expected cpu, cuda or cuda:NUMBER, got {name!r}")
    device = torch.device(name)
    if device.type == "cpu":
        return device
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus:
        raise InputError(
            f"model.device={name}: torch {torch.__version__} finds no GPU; install a torch that was built for yours "
            "(pytorch.org/get-started), or use model.device=cpu"
        )
    if (device.index or 0) >= gpus:
        raise InputError(f"model.device={name}: expected a GPU of cuda:0 … cuda:{gpus - 1}, which torch finds")
    return device


def place_label(device: torch.device) -> str:
    """As rows have it: `cpu`, or the GPU's name."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)
