"""Fixtures: a job's request as the server received it, and its source."""

from __future__ import annotations

import json

import pytest

from deploykit.backends import sagemaker
from deploykit.bundle import archive as bundles
from tests.aws_server import sent_requests
from tests.backends.sagemaker.sagemaker_jobs import vary


@pytest.fixture
def captured(aws, tmp_path):
    """Submit a source and return the request that arrived; `modify` may change the planned one."""

    def submit(source, modify=dict, **changes):
        job, options = vary(**changes)
        bundle = bundles.scan(source, job.max_bundle)
        plan = sagemaker.plan(job, options, run="digits-1", bundle=bundle)
        text = json.dumps(modify(json.loads(plan.text)))
        sagemaker.submit(plan._replace(text=text), tmp_path)
        (request,) = sent_requests(aws)
        return request

    return submit


@pytest.fixture
def program(source):
    """Write a program into the source folder."""

    def write(text):
        (source / "train.py").write_text(text)
        return source

    return write
