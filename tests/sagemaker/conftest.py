"""A job for SageMaker to vary."""

from __future__ import annotations

import pytest
from sagemaker_jobs import vary

from deploykit import bundle as bundles
from deploykit.backends import sagemaker


@pytest.fixture(name="vary")
def _vary(monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    return vary


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source with blanks"
    folder.mkdir()
    (folder / "train.py").write_text("print('hello')\n")
    return folder


@pytest.fixture
def bundle(source):
    return bundles.scan(source, 10**6)


@pytest.fixture
def planned(bundle):
    """Plan a varied job; the run's name is `digits-1` unless given."""

    def plan(run="digits-1", **changes):
        job, options = vary(**changes)
        return sagemaker.plan(job, options, run=run, bundle=bundle)

    return plan
