"""Answers of AWS that are not AWS's, and those that are lost: closed, hanging, too late."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.cli import main as cli
from deploykit.job.model import Handle
from deploykit.lib.errors import BackendUnavailable, TryAgain, Uncertain
from tests.aws_server import SECTION, as_json, sent_requests

pytestmark = pytest.mark.aws
JSON = [("Content-Type", "application/x-amz-json-1.1")]
PAGE = [("Content-Type", "text/html")], b"<html><body>Log in to the network</body></html>"
ELSEWHERE = ("Location", "http://127.0.0.1:9/")
TYPES = {"TrainingJobArn": 5, "TrainingJobStatus": {"a": 1}, "logStreams": 5, "events": 5}
ANSWERS = {
    "a page": (200, *PAGE),
    "nothing": (200, [], b""),
    "a list": (200, JSON, b"[1, 2]"),
    "null": (200, JSON, b"null"),
    "a string": (200, JSON, b'"hello"'),
    "an empty object": (200, JSON, b"{}"),
    "deep JSON": (200, JSON, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "cut off": (200, JSON, b'{"TrainingJobArn": "arn:aws'),
    "not UTF-8": (200, JSON, b'{"TrainingJobArn": "\xff\xfe"}'),
    "other types": as_json(200, TYPES),
    "a date that is none": as_json(
        200, {"TrainingJobArn": "a", "TrainingJobStatus": "Stopped", "CreationTime": "never"}
    ),
    "a redirect": (302, [ELSEWHERE], b""),
    "a redirect with a page": (307, [ELSEWHERE, PAGE[0][0]], PAGE[1]),
    "a page with 403": (403, *PAGE),
    "a page with 407": (407, *PAGE),
    "a page with 502": (502, *PAGE),
}
OBJECTS = {"an empty object", "deep JSON", "not UTF-8", "other types", "a date that is none"}
VALID = {
    "CreateTrainingJob": {"a date that is none"},
    "HEAD": {"a page with 403"},
    "StopTrainingJob": {"nothing", *OBJECTS},
}
"""Answers that this action can have: of a HEAD there is no body, of a stop nothing is used."""
HANDLE = Handle("sagemaker", "us-east-1", "digits-1", "digits-1", "/runs/digits-1")


@pytest.fixture(autouse=True)
def _brief(monkeypatch):
    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    monkeypatch.setattr(clients, "client", partial(clients.client, attempts=1))


def act(action, plan, folder):
    """Do what sends this action."""
    if action == "DescribeTrainingJob":
        sagemaker.status([HANDLE])
    elif action == "StopTrainingJob":
        sagemaker.cancel(HANDLE)
    elif action in {"DescribeLogStreams", "GetLogEvents"}:
        list(sagemaker.logs(HANDLE, follow=False))
    else:
        sagemaker.submit(plan, folder)


@pytest.mark.parametrize(
    "action",
    [
        *("CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob", "HEAD", "PUT"),
        *("DescribeLogStreams", "GetLogEvents"),
    ],
)
def test_what_is_no_answer_is_said(aws, planned, tmp_path, action):
    stream = {"logStreams": [{"logStreamName": "digits-1/algo-1-1"}]}
    aws.answers["DescribeLogStreams"] = lambda _: stream
    plan, said = planned(), {}
    for name, answer in ANSWERS.items():
        if name in VALID.get(action, ()):
            continue
        aws.respond = lambda one, forward, answer=answer: (
            answer if action in {one.action, one.method} else forward()
        )
        with pytest.raises(TryAgain) as caught:
            act(action, plan, tmp_path)
        said[name] = caught.value
    # S3 and botocore take XML that cannot be read for an error of the server
    unread = {name for name, error in said.items() if "Internal Server Error" in error.message}
    assert unread <= (set(ANSWERS) if action == "PUT" else set())
    for name in set(said) - unread:
        assert said[name].message.startswith("invalid response from AWS in us-east-1: ")
        assert "a wrong AWS_ENDPOINT_URL" in said[name].hint


def test_a_stop_that_is_answered_by_an_empty_body_is_accepted(aws):
    aws.respond = lambda *_: (200, [], b"")
    sagemaker.cancel(HANDLE)


def test_a_submit_that_a_login_page_answers_is_never_queued(aws, project, capsys):
    """Then the network works again, and the same run id creates the job, once."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    submit = ["submit", "--backend", "sagemaker", "--run", "digits-1"]
    aws.respond = lambda *_: (200, *PAGE)
    assert cli.main(submit) == 75
    assert "invalid response from AWS" in capsys.readouterr().err
    aws.respond = lambda one, forward: (
        (200, *PAGE) if one.action == "CreateTrainingJob" else forward()
    )
    assert cli.main(submit) == 75
    capsys.readouterr()
    assert cli.main(["status", "digits-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["handle"] is None
    aws.respond = lambda _, forward: forward()
    assert cli.main(submit) == 0
    assert sent_requests(aws)[-1]["TrainingJobName"] == "digits-1"


CREATE, DESCRIBE, STOP = "CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"
HANGS = pytest.mark.parametrize("hangs", [False, True], ids=["closes", "hangs"])
BRIEF = 0.3
"""Seconds that a client waits for an answer which never comes."""


@pytest.fixture
def timeouts(monkeypatch):
    """The time-outs of the next clients of SageMaker; later ones wait for a minute."""
    original, seconds = clients.client, []

    def client(service, region, *credentials, **_):
        first = seconds.pop(0) if service == "sagemaker" and seconds else 60
        return original(service, region, *credentials, attempts=1, timeout=first)

    monkeypatch.setattr("botocore.endpoint.time.sleep", lambda _: None)
    monkeypatch.setattr(clients, "client", client)
    return seconds


@pytest.fixture
def lose(aws, timeouts):
    """Lose the answers to some actions, which take effect where `forwards`; or let them hang."""
    end = threading.Event()

    def losing(*actions, forwards=False, hangs=False):
        done = threading.Event()

        def respond(one, forward):
            if one.action not in actions and one.method not in actions:
                if one.action == DESCRIBE and forwards:
                    done.wait(60)
                return forward()
            if forwards:
                forward()
                done.set()
            if hangs:
                end.wait(60)
            return None

        aws.respond = respond
        timeouts[:] = [BRIEF] * (hangs * len(actions))

    yield losing
    end.set()


@pytest.fixture
def submit(planned, tmp_path):
    plan = planned()
    (tmp_path / "plan.json").write_text(plan.text)
    return lambda: sagemaker.submit(plan, tmp_path)


@HANGS
def test_a_created_job_is_found_when_the_answer_is_lost(aws, lose, submit, hangs):
    lose(CREATE, forwards=True, hangs=hangs)
    assert str(submit()) == "sagemaker://us-east-1/digits-1"
    assert len(sent_requests(aws)) > 1


@HANGS
@pytest.mark.parametrize("actions", [[CREATE], [CREATE, DESCRIBE]], ids=["absent", "unknown"])
def test_a_job_that_may_still_be_created_is_uncertain(lose, submit, hangs, actions):
    lose(*actions, hangs=hangs)
    with pytest.raises(Uncertain, match="digits-1") as caught:
        submit()
    assert "deploykit status digits-1" in caught.value.hint
    assert "--run digits-1" in caught.value.hint


def test_a_job_that_is_created_after_the_client_gave_up_is_found_later(
    aws, timeouts, submit, tmp_path
):
    gave_up, created = threading.Event(), threading.Event()

    def late(one, forward):
        if one.action != CREATE:
            return forward()
        gave_up.wait(60)
        answer = forward()
        created.set()
        return answer

    aws.respond, timeouts[:] = late, [BRIEF]
    with pytest.raises(Uncertain):
        submit()
    assert sagemaker.find("digits-1", tmp_path, "us-east-1") is None
    gave_up.set()
    assert created.wait(60)
    assert sagemaker.find("digits-1", tmp_path, "us-east-1").id == "digits-1"


@HANGS
@pytest.mark.parametrize("action", [STOP, DESCRIBE])
def test_status_and_cancel_cannot_reach_aws(lose, submit, hangs, action):
    handle = submit()
    lose(action, hangs=hangs)
    with pytest.raises(BackendUnavailable, match="cannot reach AWS in us-east-1"):
        sagemaker.cancel(handle) if action == STOP else sagemaker.status([handle])


def test_an_upload_cannot_reach_aws(aws, lose, submit):
    lose("HEAD", "PUT")
    with pytest.raises(BackendUnavailable, match="cannot reach AWS in us-east-1"):
        submit()
    assert sent_requests(aws) == []
