"""Status, logs and cancel with a moto server or a Stubber; credentials of another account."""

from __future__ import annotations

import json
import logging
from collections import Counter
from datetime import UTC, datetime

import boto3
import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import jobs
from deploykit.cli import main as cli
from deploykit.job.model import Handle, State
from deploykit.lib.errors import NotFound, NotPermitted
from deploykit.run import state as run_state
from tests.aws_server import SECTION, as_json

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


BEGIN, END = datetime(2026, 1, 2, 3, tzinfo=UTC), datetime(2026, 1, 2, 4, tzinfo=UTC)
BILLED = {"TrainingTimeInSeconds": 3600, "BillableTimeInSeconds": 3600}
STATES = [
    ("InProgress/Starting", {}, State.QUEUED, "starting"),
    ("InProgress/Pending", {}, State.QUEUED, "waiting for instances"),
    ("InProgress/Downloading", {}, State.QUEUED, "downloading the data"),
    ("InProgress/Training", {}, State.RUNNING, "training"),
    (
        *("InProgress/Interrupted", {}, State.QUEUED),
        "interrupted: the spot instances were reclaimed",
    ),
    ("InProgress/Uploading", {}, State.RUNNING, "uploading the results"),
    ("Stopping/Stopping", {}, State.STOPPING, "stopping"),
    ("Stopped/Stopped", {}, State.CANCELLED, "stopped"),
    ("Stopped/MaxRuntimeExceeded", {}, State.FAILED, "reached its time limit"),
    (
        *("Stopped/MaxWaitTimeExceeded", {}, State.FAILED),
        "no spot instances became available within max_wait",
    ),
    (
        *("Stopped/MaxWaitTimeExceeded", {"TrainingStartTime": BEGIN}, State.FAILED),
        "did not end within max_wait, which includes waiting for spot instances",
    ),
    ("Completed/Completed", {}, State.SUCCEEDED, "completed"),
    ("Completed/Completed", BILLED, State.SUCCEEDED, "completed; 3600 of 3600 s billed"),
    (
        *("Completed/Completed", {**BILLED, "BillableTimeInSeconds": 1080}, State.SUCCEEDED),
        "completed; 1080 of 3600 s billed, 70% less than on-demand",
    ),
]
REASONS = {
    "AlgorithmError: ExecuteUserScriptError:\nExitCode 137\nErrorMessage ...": 137,
    'AlgorithmError: ExecuteUserScriptError:\nExitCode 1\nErrorMessage "exit 5"': 1,
    "AlgorithmError: , exit code: 2": 2,
    "InternalServerError: We encountered an internal error. Please try again.": None,
    "CapacityError: Unable to provision requested ML compute capacity.": None,
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


@pytest.mark.parametrize(("native", "more", "state", "reason"), STATES)
def test_state_and_reason(stubbed, native, more, state, reason):
    stubbed.add_response("describe_training_job", described(*native.split("/"), **more))
    status = sagemaker.status([HANDLE])[HANDLE]
    assert (status.native, status.state, status.reason) == (native, state, reason)
    assert status.billed == more.get("BillableTimeInSeconds")


@pytest.mark.parametrize(("reason", "code"), REASONS.items())
def test_exit_code_is_read_from_the_reason(stubbed, reason, code):
    more = {"FailureReason": reason, "TrainingStartTime": BEGIN, "TrainingEndTime": END}
    stubbed.add_response("describe_training_job", described("Failed", "Failed", **more))
    status = sagemaker.status([HANDLE])[HANDLE]
    assert (status.state, status.reason, status.exit_code) == (State.FAILED, reason, code)
    assert (status.started, status.finished) == (BEGIN, END)


@pytest.mark.parametrize("printed", ["the cost cap is near", "its cost cap is exhausted"])
def test_a_job_that_its_launcher_stopped_at_the_cap(aws, streams, printed):
    """The service knows only that the program failed."""
    more = {"FailureReason": "AlgorithmError: no", "Environment": {"DEPLOYKIT_CAP": "{}"}}
    answer = as_json(200, described("Failed", "Failed", **more))
    aws.respond = lambda one, forward: answer if one.action == "DescribeTrainingJob" else forward()
    assert sagemaker.status([HANDLE])[HANDLE].reason == "AlgorithmError: no"
    line = f"2026-11-21T01:46:08.123Z {printed} (9.00 USD, at 14.18 USD an hour): SIGTERM sent"
    streams("digits-1/algo-1-1", [(0, "[rank 0] step 1"), (1, line)])
    assert sagemaker.status([HANDLE])[HANDLE].reason == (
        "stopped at its cost cap (9.00 USD, at 14.18 USD an hour): AlgorithmError: no"
    )


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
        f"cannot read new log lines: AWS ({action}, us-east-1): token expired; log in again "
        "(`aws sso login`) or renew the keys; check: aws sts get-caller-identity. "
        "Reading resumes when AWS "
        "answers again."
    )


def test_a_login_that_expired_before_the_first_poll_is_an_error(aws, planned, tmp_path):
    handle = sagemaker.submit(planned(), tmp_path)
    aws.respond = ExpiredLogin("DescribeTrainingJob", {1}, lambda: None)
    with pytest.raises(NotPermitted, match="token expired"):
        list(sagemaker.logs(handle, follow=True))


OTHER = "666666666666"
SAID = f"you are logged in to account {OTHER}, but the job belongs to account 123456789012"


@pytest.fixture
def become_other(aws, monkeypatch):
    """Log in to the other account."""

    def become():
        role = f"arn:aws:iam::{OTHER}:role/other"
        sts = boto3.client("sts", "us-east-1")
        key = sts.assume_role(RoleArn=role, RoleSessionName="other")["Credentials"]
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
        monkeypatch.setenv("AWS_SESSION_TOKEN", key["SessionToken"])

    return become


def test_status_says_that_the_job_is_of_another_account(become_other, planned, tmp_path):
    plan = planned()
    (tmp_path / "plan.json").write_text(plan.text)
    handle = sagemaker.submit(plan, tmp_path)
    become_other()
    status = sagemaker.status([handle])[handle]
    assert (status.state, status.reason) == (State.UNKNOWN, SAID)


def test_an_interrupted_submit_is_not_unsent_in_another_account(become_other, planned, tmp_path):
    """There is certainly no job only where one would be."""
    (tmp_path / "plan.json").write_text(planned().text)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    become_other()
    with pytest.raises(NotPermitted, match=SAID) as caught:
        sagemaker.find("digits-1", tmp_path, "us-east-1")
    assert "AWS_PROFILE" in caught.value.hint


def test_the_account_that_pays_is_the_one_that_sent(become_other, planned, tmp_path, caplog):
    """AWS refuses a role of another account; moto does not."""
    caplog.set_level(logging.WARNING)
    sagemaker.submit(planned(), tmp_path)
    assert caplog.text == ""
    become_other()
    boto3.client("s3", "us-east-1").create_bucket(Bucket="other-bucket")
    sagemaker.submit(planned("digits-2", bucket="other-bucket"), tmp_path)
    assert f"digits-2 runs in account {OTHER}, which is billed for it" in caplog.text


def test_wait_ends_where_there_is_no_such_job(become_other, project, capsys, monkeypatch):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    assert cli.main(["submit", "--backend", "sagemaker", "--run", "digits-1"]) == 0
    become_other()
    monkeypatch.setattr(run_state, "_MISSING", 0.0)
    capsys.readouterr()
    assert cli.main(["wait", "digits-1", "--json"]) == 83
    assert json.loads(capsys.readouterr().out)["reason"] == SAID
