"""A job for SageMaker to vary, and logs of one."""

from __future__ import annotations

from datetime import UTC, datetime

import boto3
import pytest
from sagemaker_jobs import vary

from deploykit import bundle as bundles
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import watching


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


@pytest.fixture
def streams(aws):
    """Write events into the job's log stream of a machine."""
    logs = boto3.client("logs", "us-east-1")
    logs.create_log_group(logGroupName=watching.LOG_GROUP)
    now = int(datetime.now(UTC).timestamp() * 1000) - 60_000

    def write(stream, events):
        logs.create_log_stream(logGroupName=watching.LOG_GROUP, logStreamName=stream)
        for at in range(0, len(events), 1000):
            logs.put_log_events(
                logGroupName=watching.LOG_GROUP,
                logStreamName=stream,
                logEvents=[
                    {"timestamp": now + moment, "message": text}
                    for moment, text in events[at : at + 1000]
                ],
            )
        return now

    return write
