"""Fixtures: variations of a job for SageMaker, its plan, and its log streams."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime

import boto3
import pytest
from botocore.stub import Stubber

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import jobs
from deploykit.bundle import archive as bundles
from tests.backends.sagemaker.sagemaker_jobs import vary


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
    """Plan a varied job that `check` accepts; the run is `digits-1` unless given."""

    def plan(run="digits-1", **changes):
        job, options = vary(**changes)
        return sagemaker.plan(job, options, run=run, bundle=bundle)

    return plan


@pytest.fixture(name="stub_client")
def _stub_client(monkeypatch):
    """Answer for a service with a script instead of a server; yields the Stubber."""
    with contextlib.ExitStack() as stack:

        def stub(service):
            key = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
            client = boto3.client(service, "us-east-1", **key)
            monkeypatch.setattr(clients, "client", lambda *_, **__: client)
            stubber = stack.enter_context(Stubber(client))
            stack.callback(stubber.assert_no_pending_responses)
            return stubber

        yield stub


@pytest.fixture
def streams(aws):
    """Write events, (milliseconds, text), to a log stream; returns the time that they start at."""
    logs = boto3.client("logs", "us-east-1")
    logs.create_log_group(logGroupName=jobs.LOG_GROUP)
    now = int(datetime.now(UTC).timestamp() * 1000) - 60_000

    def write(stream, events):
        logs.create_log_stream(logGroupName=jobs.LOG_GROUP, logStreamName=stream)
        entries = [{"timestamp": now + offset, "message": text} for offset, text in events]
        for at in range(0, len(entries), 1000):
            logs.put_log_events(
                logGroupName=jobs.LOG_GROUP,
                logStreamName=stream,
                logEvents=entries[at : at + 1000],
            )
        return now

    return write
