"""A job after it was sent: against a moto server, and where moto cannot, against a Stubber."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import boto3
import pytest
from aws_server import as_json
from botocore.stub import Stubber

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import watching
from deploykit.errors import NotFound, NotPermitted
from deploykit.model import State

pytestmark = pytest.mark.aws

HANDLE = watching.handle("digits-1", "/runs/digits-1", "us-east-1")


def test_job_is_found_by_its_name(aws, planned, tmp_path):
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    handle = sagemaker.submit(planned(sender="boto3"), tmp_path)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") == handle
    assert sagemaker.find("digits-1", tmp_path, "eu-west-1") is None


def test_a_job_that_the_runs_folder_has_not_sent_is_not_found(aws, planned, tmp_path):
    """A submit was interrupted, and somebody else has sent a job under its name."""
    ours, theirs = planned(sender="boto3"), planned(sender="boto3", args=("--other",))
    (tmp_path / "plan.json").write_text(ours.text)
    sagemaker.submit(theirs, tmp_path)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    (tmp_path / "plan.json").write_text(theirs.text[:99])
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    (tmp_path / "plan.json").write_text(theirs.text)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is not None


def test_status_of_several_jobs(aws, planned, tmp_path):
    handles = [
        sagemaker.submit(planned(run, sender="boto3"), tmp_path) for run in ("digits-1", "digits-2")
    ]
    missing = watching.handle("digits-3", tmp_path, "us-east-1")
    found = sagemaker.status([*handles, missing])
    assert [found[one].state for one in handles] == [State.SUCCEEDED] * 2
    assert found[handles[0]].exit_code == 0
    assert found[missing].state is State.UNKNOWN


STATES = {
    ("InProgress", "Starting"): (State.QUEUED, "starting"),
    ("InProgress", "Pending"): (State.QUEUED, "waiting for machines"),
    ("InProgress", "Downloading"): (State.QUEUED, "downloading the data"),
    ("InProgress", "Training"): (State.RUNNING, "training"),
    ("InProgress", "Interrupted"): (State.QUEUED, "interrupted: the spot machines were taken away"),
    ("InProgress", "Uploading"): (State.RUNNING, "uploading the results"),
    ("Stopping", "Stopping"): (State.STOPPING, "it is being stopped"),
    ("Stopped", "Stopped"): (State.CANCELLED, "it was stopped"),
    ("Stopped", "MaxRuntimeExceeded"): (State.FAILED, "it reached its time limit"),
    ("Stopped", "MaxWaitTimeExceeded"): (State.FAILED, "no machine came within max_wait"),
    ("Completed", "Completed"): (State.SUCCEEDED, "completed"),
}


@pytest.fixture
def stubbed(monkeypatch):
    client = boto3.client(
        "sagemaker", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    monkeypatch.setattr(clients, "client", lambda *_: client)
    with Stubber(client) as stub:
        yield stub
        stub.assert_no_pending_responses()


def answer(primary, secondary, **more):
    return {
        "TrainingJobName": "digits-1",
        "TrainingJobArn": "arn:aws:sagemaker:us-east-1:123456789012:training-job/digits-1",
        "ModelArtifacts": {"S3ModelArtifacts": "s3://b/m"},
        "TrainingJobStatus": primary,
        "SecondaryStatus": secondary,
        "AlgorithmSpecification": {"TrainingInputMode": "File"},
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": 0,
        **more,
    }


@pytest.mark.parametrize(("native", "expected"), STATES.items())
def test_state_and_sentence(stubbed, native, expected):
    stubbed.add_response("describe_training_job", answer(*native))
    found = sagemaker.status([HANDLE])[HANDLE]
    assert (found.state, found.reason) == expected
    assert found.native == "/".join(native)


MONEY = {
    (3600, 3600): "completed; 3600 s of 3600 s are billed",
    (3600, 1080): "completed; 1080 s of 3600 s are billed, 70% less than on demand",
}


@pytest.mark.parametrize("seconds", MONEY)
def test_what_it_costs(stubbed, seconds):
    trained, billed = seconds
    counted = {"TrainingTimeInSeconds": trained, "BillableTimeInSeconds": billed}
    stubbed.add_response("describe_training_job", answer("Completed", "Completed", **counted))
    assert sagemaker.status([HANDLE])[HANDLE].reason == MONEY[seconds]


REASONS = {
    "AlgorithmError: ExecuteUserScriptError:\nExitCode 137\nErrorMessage ...": 137,
    'AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage "exit 5"': 1,
    "AlgorithmError: , exit code: 2": 2,
    "InternalServerError: We encountered an internal error. Please try again.": None,
    "CapacityError: Unable to provision requested ML compute capacity.": None,
}


@pytest.mark.parametrize(("reason", "code"), REASONS.items())
def test_exit_code_is_read_from_the_reason(stubbed, reason, code):
    times = {
        "TrainingStartTime": datetime(2026, 1, 2, 3, tzinfo=UTC),
        "TrainingEndTime": datetime(2026, 1, 2, 4, tzinfo=UTC),
    }
    stubbed.add_response(
        "describe_training_job", answer("Failed", "Failed", FailureReason=reason, **times)
    )
    found = sagemaker.status([HANDLE])[HANDLE]
    assert (found.state, found.reason, found.exit_code) == (State.FAILED, reason, code)
    assert (found.started, found.finished) == tuple(times.values())


def test_status_that_may_not_be_asked(stubbed):
    stubbed.add_client_error("describe_training_job", "AccessDeniedException", "no")
    with pytest.raises(NotPermitted):
        sagemaker.status([HANDLE])


def test_cancel(stubbed):
    stubbed.add_response("stop_training_job", {}, {"TrainingJobName": "digits-1"})
    sagemaker.cancel(HANDLE)


def test_cancel_of_an_ended_job_does_nothing(stubbed):
    message = "The request was rejected because the training job is in status Completed."
    stubbed.add_client_error("stop_training_job", "ValidationException", message)
    sagemaker.cancel(HANDLE)


def test_cancel_of_no_job(stubbed):
    message = "Requested resource not found."
    stubbed.add_client_error("stop_training_job", "ValidationException", message)
    with pytest.raises(NotFound):
        sagemaker.cancel(HANDLE)


def test_logs_before_the_first_machine(aws):
    assert list(sagemaker.logs(HANDLE, follow=False)) == []


def test_logs_of_two_machines_by_time(streams):
    streams("digits-1/algo-2-1", [(1, "2026-11-21T01:46:08.123Z [rank 2] two"), (3, "plain")])
    now = streams("digits-1/algo-1-1", [(0, "first"), (2, "2026-11-21T01:46:08.124Z [node 0] x")])
    streams("digits-10/algo-1-1", [(0, "of another job")])
    lines = list(sagemaker.logs(HANDLE, follow=False))
    assert [(line.text, line.node, line.rank) for line in lines] == [
        ("first", 0, None),
        ("two", 1, 2),
        ("x", 0, None),
        ("plain", 1, None),
    ]
    assert lines[0].time == datetime.fromtimestamp(now / 1000, UTC)
    assert lines[1].time == datetime(2026, 11, 21, 1, 46, 8, 123000, tzinfo=UTC)


def test_followed_logs_end_with_the_job(aws, planned, tmp_path, streams, monkeypatch):
    """Moto's jobs end at once, so this one seems to run for two looks. Its last line is late."""
    monkeypatch.setattr(watching, "_PAUSE", 0.05)
    handle = sagemaker.submit(planned(sender="boto3"), tmp_path)
    ask, looks = watching.status, []

    def ended_at_the_third_look(handles):
        looks.append(handles)
        number = len(looks)
        if number <= 4:
            streams(f"digits-1/algo-1-{number}", [(number, f"line {number}")])
        return {handles[0]: watching.Status(State.RUNNING)} if number < 3 else ask(handles)

    monkeypatch.setattr(watching, "status", ended_at_the_third_look)
    texts = [line.text for line in sagemaker.logs(handle, follow=True)]
    assert texts == ["line 1", "line 2", "line 3", "line 4"]
    assert len(looks) == 5


class LoggedOut:
    """Refuses `action` the so many-th times; two more machines print before the second look."""

    def __init__(self, action, numbers, more):
        self._action, self._numbers, self._more = action, numbers, more
        self._count = Counter()

    def __call__(self, one, forward):
        self._count[one.action] += 1
        if (one.action, self._count[one.action]) == ("DescribeTrainingJob", 2):
            self._more()
        if one.action == self._action and self._count[one.action] in self._numbers:
            return as_json(400, {"__type": "ExpiredTokenException", "message": "token expired"})
        return forward()


@pytest.mark.parametrize(
    ("action", "numbers"),
    [("DescribeTrainingJob", {2, 3}), ("DescribeLogStreams", {2, 3}), ("GetLogEvents", {9, 10})],
)
def test_followed_logs_outlast_an_expired_login(
    aws, planned, tmp_path, streams, monkeypatch, caplog, action, numbers
):
    """Also when the third of four machines has been read already: no line is lost or doubled."""
    monkeypatch.setattr(watching, "_PAUSE", 0.05)
    handle = sagemaker.submit(planned(sender="boto3"), tmp_path)

    def tell(*hosts):
        for host in hosts:
            streams(f"digits-1/algo-{host}-1", [(0, f"{host}a"), (1, f"{host}b")])

    tell(1, 2)
    aws.mood = LoggedOut(action, numbers, lambda: tell(3, 4))
    lines = [line.text for line in sagemaker.logs(handle, follow=True)]
    assert sorted(lines) == ["1a", "1b", "2a", "2b", "3a", "3b", "4a", "4b"]
    (record,) = caplog.records
    assert record.message == (
        f"no new lines for now: AWS ({action}, us-east-1): token expired; log in again (aws sso "
        "login, or new keys) and check with: aws sts get-caller-identity. They follow once it "
        "works again."
    )


def test_a_login_that_was_over_before_is_said_at_once(aws, planned, tmp_path):
    handle = sagemaker.submit(planned(sender="boto3"), tmp_path)
    aws.mood = LoggedOut("DescribeTrainingJob", {1}, lambda: None)
    with pytest.raises(NotPermitted, match="token expired"):
        list(sagemaker.logs(handle, follow=True))
