"""Status, logs and cancel: with a moto server, or with a Stubber where moto lacks the action."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import jobs
from deploykit.job.model import Handle, State
from deploykit.lib.errors import NotFound, NotPermitted
from tests.aws_server import as_json

pytestmark = pytest.mark.aws


def handle(run):
    return Handle("sagemaker", "us-east-1", run, run, f"/runs/{run}")


HANDLE = handle("digits-1")


def test_a_job_is_found_by_its_name(aws, planned, tmp_path):
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    submitted = sagemaker.submit(planned(), tmp_path)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") == submitted
    assert sagemaker.find("digits-1", tmp_path, "eu-west-1") is None


def test_a_job_of_another_plan_is_not_found(aws, planned, tmp_path):
    """A submit was interrupted, and another user created a job with the same name."""
    plan, other = planned(), planned(args=("--other",))
    (tmp_path / "plan.json").write_text(plan.text)
    sagemaker.submit(other, tmp_path)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    (tmp_path / "plan.json").write_text(other.text[:99])
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    (tmp_path / "plan.json").write_text(other.text)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is not None


def test_status_of_several_jobs(aws, planned, tmp_path):
    handles = [sagemaker.submit(planned(run), tmp_path) for run in ("digits-1", "digits-2")]
    missing = handle("digits-3")
    status = sagemaker.status([*handles, missing])
    assert [status[one].state for one in handles] == [State.SUCCEEDED] * 2
    assert status[handles[0]].exit_code == 0
    assert status[missing].state is State.UNKNOWN


STATES = {
    ("InProgress", "Starting"): (State.QUEUED, "starting"),
    ("InProgress", "Pending"): (State.QUEUED, "waiting for instances"),
    ("InProgress", "Downloading"): (State.QUEUED, "downloading the data"),
    ("InProgress", "Training"): (State.RUNNING, "training"),
    ("InProgress", "Interrupted"): (State.QUEUED, "interrupted: the spot instances were reclaimed"),
    ("InProgress", "Uploading"): (State.RUNNING, "uploading the results"),
    ("Stopping", "Stopping"): (State.STOPPING, "stopping"),
    ("Stopped", "Stopped"): (State.CANCELLED, "stopped"),
    ("Stopped", "MaxRuntimeExceeded"): (State.FAILED, "reached its time limit"),
    ("Stopped", "MaxWaitTimeExceeded"): (
        State.FAILED,
        "no spot instances became available within max_wait",
    ),
    ("Completed", "Completed"): (State.SUCCEEDED, "completed"),
}


@pytest.fixture
def stubbed(stub_client):
    return stub_client("sagemaker")


def described(primary, secondary, **more):
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
def test_state_and_reason(stubbed, native, expected):
    stubbed.add_response("describe_training_job", described(*native))
    status = sagemaker.status([HANDLE])[HANDLE]
    assert (status.state, status.reason) == expected
    assert status.native == "/".join(native)


def test_a_spot_job_that_had_started_did_not_end_within_max_wait(stubbed):
    times = {"TrainingStartTime": datetime(2026, 1, 2, 3, tzinfo=UTC)}
    stubbed.add_response(
        "describe_training_job", described("Stopped", "MaxWaitTimeExceeded", **times)
    )
    status = sagemaker.status([HANDLE])[HANDLE]
    assert status.state is State.FAILED
    assert status.reason == "did not end within max_wait, which counts the wait for spot instances"


BILLING = {
    (3600, 3600): "completed; 3600 of 3600 s billed",
    (3600, 1080): "completed; 1080 of 3600 s billed, 70% less than on-demand",
}


@pytest.mark.parametrize("seconds", BILLING)
def test_the_reason_includes_the_billed_seconds(stubbed, seconds):
    trained, billed = seconds
    counted = {"TrainingTimeInSeconds": trained, "BillableTimeInSeconds": billed}
    stubbed.add_response("describe_training_job", described("Completed", "Completed", **counted))
    assert sagemaker.status([HANDLE])[HANDLE].reason == BILLING[seconds]


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
        "describe_training_job", described("Failed", "Failed", FailureReason=reason, **times)
    )
    status = sagemaker.status([HANDLE])[HANDLE]
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, reason, code)
    assert (status.started, status.finished) == tuple(times.values())


def test_status_without_permission(stubbed):
    stubbed.add_client_error("describe_training_job", "AccessDeniedException", "no")
    with pytest.raises(NotPermitted):
        sagemaker.status([HANDLE])


def test_cancel_stops_the_job(stubbed):
    stubbed.add_response("stop_training_job", {}, {"TrainingJobName": "digits-1"})
    sagemaker.cancel(HANDLE)


def test_cancel_of_an_ended_job_does_nothing(stubbed):
    message = "The request was rejected because the training job is in status Completed."
    stubbed.add_client_error("stop_training_job", "ValidationException", message)
    sagemaker.cancel(HANDLE)


def test_cancel_of_a_missing_job(stubbed):
    message = "Requested resource not found."
    stubbed.add_client_error("stop_training_job", "ValidationException", message)
    with pytest.raises(NotFound):
        sagemaker.cancel(HANDLE)


def test_logs_are_empty_before_the_first_node_starts(aws):
    assert list(sagemaker.logs(HANDLE, follow=False)) == []


def test_logs_of_two_nodes_are_ordered_by_time(streams):
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
    """moto ends jobs at once, so the first two polls fake a running job. The last line is late."""
    monkeypatch.setattr(jobs, "_POLL_INTERVAL", 0.05)
    handle = sagemaker.submit(planned(), tmp_path)
    real_status, polls = jobs.status, []

    def ended_at_the_third_poll(handles):
        polls.append(handles)
        number = len(polls)
        if number <= 4:
            streams(f"digits-1/algo-1-{number}", [(number, f"line {number}")])
        return {handles[0]: jobs.Status(State.RUNNING)} if number < 3 else real_status(handles)

    monkeypatch.setattr(jobs, "status", ended_at_the_third_poll)
    texts = [line.text for line in sagemaker.logs(handle, follow=True)]
    assert texts == ["line 1", "line 2", "line 3", "line 4"]
    assert len(polls) == 5


class ExpiredLogin:
    """Refuses the given requests for `action`; two more nodes print before the second poll."""

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
def test_following_resumes_after_an_expired_login(
    aws, planned, tmp_path, streams, monkeypatch, caplog, action, numbers
):
    """Even if it expires between two of four nodes: no line is lost or repeated."""
    monkeypatch.setattr(jobs, "_POLL_INTERVAL", 0.05)
    handle = sagemaker.submit(planned(), tmp_path)

    def write(*hosts):
        for host in hosts:
            streams(f"digits-1/algo-{host}-1", [(0, f"{host}a"), (1, f"{host}b")])

    write(1, 2)
    aws.respond = ExpiredLogin(action, numbers, lambda: write(3, 4))
    lines = [line.text for line in sagemaker.logs(handle, follow=True)]
    assert sorted(lines) == ["1a", "1b", "2a", "2b", "3a", "3b", "4a", "4b"]
    (record,) = caplog.records
    assert record.message == (
        f"cannot read new lines: AWS ({action}, us-east-1): token expired; log in again (aws sso "
        "login, or new keys) and check with: aws sts get-caller-identity. Reading resumes when AWS "
        "answers again."
    )


def test_a_login_that_expired_before_the_first_poll_is_an_error(aws, planned, tmp_path):
    handle = sagemaker.submit(planned(), tmp_path)
    aws.respond = ExpiredLogin("DescribeTrainingJob", {1}, lambda: None)
    with pytest.raises(NotPermitted, match="token expired"):
        list(sagemaker.logs(handle, follow=True))
