"""Training checkpoints: weights and optimizer tensors as safetensors, everything else as JSON, replaced atomically."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS, _OPTIMIZER, _PROGRESS = "weights.safetensors", "optimizer.safetensors", "progress.json"


def save_checkpoint(
    folder: Path, *, weights: dict[str, torch.Tensor], optimizer: dict[str, torch.Tensor], progress: dict
) -> None:
    """Replace the checkpoint in `folder`; an interruption at any moment leaves a complete one."""
    with replacing(folder) as new:
        save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, new / _WEIGHTS)
        save_file(optimizer, new / _OPTIMIZER)
        (new / _PROGRESS).write_text(json.dumps(progress))


def load_checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict] | None:
    """Weights, optimizer tensors and progress of the newest complete checkpoint, or None where there is none."""
    for candidate in (folder, _previous(folder)):
        if (candidate / _PROGRESS).exists():
            progress = json.loads((candidate / _PROGRESS).read_text())
            return load_file(candidate / _WEIGHTS), load_file(candidate / _OPTIMIZER), progress
    return None


class replacing:  # noqa: N801 - reads as a verb in `with replacing(folder) as new`
    """Context manager: an empty folder that takes the place of `folder` once the block ends without an error."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.new = folder, folder.with_name(folder.name + ".new")

    def __enter__(self) -> Path:
        shutil.rmtree(self.new, ignore_errors=True)
        self.new.mkdir(parents=True)
        return self.new

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            shutil.rmtree(self.new, ignore_errors=True)
            return
        previous = _previous(self.folder)
        shutil.rmtree(previous, ignore_errors=True)
        if self.folder.exists():
            self.folder.rename(previous)
        self.new.rename(self.folder)
        shutil.rmtree(previous, ignore_errors=True)


def _previous(folder: Path) -> Path:
    return folder.with_name(folder.name + ".previous")
