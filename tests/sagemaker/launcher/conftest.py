"""A job's request as the server received it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from aws_server import sent_requests
from sagemaker_jobs import vary

from deploykit import bundle as bundles
from deploykit.backends import sagemaker


@pytest.fixture
def captured(aws, tmp_path):
    """Submit this source; the request that arrived. `spoil` may change what was planned."""

    def submit(source, spoil=dict, **changes):
        job, options = vary(sender="boto3", **changes)
        bundle = bundles.scan(source, job.max_bundle)
        plan = sagemaker.plan(job, options, run="digits-1", bundle=bundle)
        text = json.dumps(spoil(json.loads(plan.text)))
        sagemaker.submit(replace(plan, text=text), tmp_path)
        (request,) = sent_requests(aws)
        return request

    return submit


@pytest.fixture
def program(source):
    """A source folder with this program in it."""

    def write(text):
        (source / "train.py").write_text(text)
        return source

    return write
