"""The sweep of `measure.py` by Hydra's Optuna sweeper; its submitit launcher starts the trials."""

from __future__ import annotations

import hydra
from objective import evaluate
from omegaconf import DictConfig


@hydra.main(version_base=None, config_path=None)
def trial(config: DictConfig) -> float:
    """One trial, in a process of submitit."""
    return evaluate(config.index, config.log)


trial()
