"""Jobs for Slurm as data, and their scripts as text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from deploykit import bundle as bundles
from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.model import Entrypoint, JobSpec, Resources

BUNDLE = bundles.Bundle(Path("/nowhere"), (), "0" * 64)
PYTHON = "/shared/venv/bin/python"
JOB = JobSpec("digits", Entrypoint("train.py", args=("--epochs", "5")), Resources(time_limit=1800))


def job(**changes):
    resources = dataclasses.replace(JOB.resources, **changes.pop("resources", {}))
    return dataclasses.replace(JOB, resources=resources, **changes)


def script(job=JOB, options=None, run="digits-1"):
    return slurm.plan(job, options or Options(python=PYTHON), run=run, bundle=BUNDLE).text


def directives(text):
    return dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in text.splitlines()
        if line.startswith("#SBATCH ")
    )
