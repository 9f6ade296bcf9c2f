"""Answers that are not AWS's: pages of a proxy, JSON of another kind, redirects, cut off texts."""

from __future__ import annotations

import json
from functools import partial

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.cli import main as cli
from deploykit.job.model import Handle
from deploykit.lib.errors import TryAgain
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
        assert said[name].message.startswith("AWS sent no valid answer in us-east-1: ")
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
    assert "AWS sent no valid answer" in capsys.readouterr().err
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
