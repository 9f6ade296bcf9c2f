"""The sweep of `measure.py` by Ray Tune: python ray_tune.py LOG SLOTS."""

from __future__ import annotations

import sys
from pathlib import Path

import ray
from objective import TRIALS, evaluate
from ray import tune

log, slots = sys.argv[1], int(sys.argv[2])


def trial(config: dict[str, int]) -> dict[str, float]:
    """One trial, in a worker process of Ray."""
    return {"loss": evaluate(config["index"], log)}


ray.init(num_cpus=slots, include_dashboard=False, log_to_driver=False)
tuner = tune.Tuner(
    trial,
    param_space={"index": tune.grid_search(list(range(TRIALS)))},
    tune_config=tune.TuneConfig(metric="loss", mode="min"),
    run_config=tune.RunConfig(storage_path=str(Path(log).parent / "ray"), verbose=0),
)
print("best", tuner.fit().get_best_result().config["index"])
