"""Train the bundled reference model: `python -m experiments.train_reference_model`; the same command resumes.

Text of the standard library and generated retrieval documents train a Qwen2 of five million parameters whose initial
weights already hold most of an induction circuit (`experiments/reference_model/structured_init.py`). With
`export=true` the newest checkpoint becomes a model folder with its card, without training.
"""

import logging
from pathlib import Path

import hydra
import torch
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from experiments.reference_model.export import export_model
from experiments.reference_model.settings import Training
from experiments.reference_model.trainer import Trainer

logger = logging.getLogger(__name__)
ConfigStore.instance().store(name="train_reference_model_schema", node=Training)


@hydra.main(version_base="1.3", config_path="../conf", config_name="train_reference_model")
def main(config: DictConfig) -> None:
    """Train to the configured number of tokens, then export; `export=true` only exports."""
    settings: Training = OmegaConf.to_object(config)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    trainer = Trainer(settings)
    if not settings.export and not trainer.train():
        logger.info("stopped at %d tokens; the same command goes on from here", trainer.tokens_seen)
        return
    export_model(trainer, Path(settings.export_dir))
    logger.info("exported to %s", settings.export_dir)


if __name__ == "__main__":
    main()
