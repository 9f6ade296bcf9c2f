"""Sections of a job: the environment of its ranks, and the trackers of its metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from deploykit.job.decode import Help
from deploykit.job.names import FOLDER_OR_S3, MLFLOW, PATH, PROJECT, TRACKIO
from deploykit.lib import paths


@dataclass(frozen=True)
class Environment:
    """Where the trainer's Python and packages are, on this machine and on Slurm."""

    conda: Annotated[
        str | None, Help("Conda environment, by name or folder.", example="train"), PATH
    ] = None
    venv: Annotated[
        str | None,
        Help("Folder of a virtual environment, relative to the job file.", example=".venv"),
        PATH,
    ] = None
    uv: Annotated[
        str | None,
        Help(
            "Folder of a uv project, relative to the job file. `uv run` brings its environment up "
            "to date before the trainer starts.",
            example=".",
        ),
        PATH,
    ] = None
    modules: Annotated[
        tuple[Annotated[str, PATH], ...],
        Help("Environment modules to load first.", "[cuda/12.8]"),
    ] = ()

    @property
    def python(self) -> tuple[str, str] | None:
        """What brings the Python: `conda`, `venv` or `uv`, and its value. None: `modules` alone."""
        kinds = {"conda": self.conda, "venv": self.venv, "uv": self.uv}
        return next(((kind, value) for kind, value in kinds.items() if value is not None), None)


@dataclass(frozen=True)
class Track:
    """The trackers to which the metrics of a run are sent."""

    mlflow: Annotated[
        str | None,
        Help(
            "MLflow server: its address, or the ARN of one that SageMaker manages. The "
            "experiment is `MLFLOW_EXPERIMENT_NAME`, else the name of the job.",
            example="https://mlflow.example.com",
        ),
        MLFLOW,
    ] = None
    tensorboard: Annotated[
        str | None,
        Help(
            "Folder or s3:// prefix that gets a folder of event files for each run.",
            example="s3://bucket/tensorboard",
        ),
        FOLDER_OR_S3,
    ] = None
    trackio: Annotated[
        str | None,
        Help(
            "Project of Trackio on the machine that submits. Needs the package `trackio` beside "
            "deploykit.",
            example="digits",
        ),
        TRACKIO,
    ] = None
    wandb: Annotated[
        str | None,
        Help(
            "Project of Weights & Biases, which gets a run when it has ended. Needs the package "
            "`wandb` beside deploykit.",
            example="team/digits",
        ),
        PROJECT,
    ] = None

    def in_folder(self, folder: Path) -> Track:
        """The same with an absolute folder; addresses (s3://...) are kept."""
        if self.tensorboard is None:
            return self
        return replace(self, tensorboard=paths.absolute(self.tensorboard, folder))

    @property
    def chosen(self) -> dict[str, str]:
        """Where to send, by the name of the tracker."""
        every = {name: getattr(self, name) for name in TRACKERS}
        return {name: where for name, where in every.items() if where is not None}


TRACKERS = ("mlflow", "tensorboard", "trackio", "wandb")
"""The keys of `Track`."""
