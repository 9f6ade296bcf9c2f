"""Fixtures that plan and submit jobs."""

from __future__ import annotations

import pytest

from deploykit.backends import slurm
from deploykit.bundle import archive as bundles
from deploykit.job.model import Entrypoint, JobSpec, Resources
from tests.backends.slurm.slurm_helpers import folder_of


@pytest.fixture
def make_plan(tmp_path):
    """A function that plans a script given as text; the bundle has the real node plane.

    torchrun takes seconds to start, so that only tests about its ranks ask for it.
    """
    source = tmp_path / "source"

    def make(program, *, launcher="python", run="one-1", options=None, args=(), **more):
        source.mkdir(exist_ok=True)
        fields = {name: more.pop(name) for name in ("env", "retries") if name in more}
        (source / "train.py").write_text(program)
        job = JobSpec(
            "one",
            Entrypoint("train.py", args=tuple(args), launcher=launcher),
            Resources(**{"time_limit": 600, **more}),
            **fields,
        )
        chosen = options or slurm.Options()
        assert list(slurm.check(job, chosen)) == []
        return slurm.plan(job, chosen, run=run, bundle=bundles.scan(source, 10**8))

    return make


@pytest.fixture
def send(tmp_path):
    """A function that submits a plan as the command line does: with a run folder that exists."""

    def submit(plan):
        folder = folder_of(plan.run, tmp_path)
        folder.mkdir(parents=True, exist_ok=True)
        return slurm.submit(plan, folder)

    return submit


@pytest.fixture
def home(monkeypatch):
    """A state folder with the same path on every machine."""
    monkeypatch.setenv("DEPLOYKIT_HOME", "/shared/ada/it's here")
