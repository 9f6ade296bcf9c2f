"""Answers of AWS that are lost: the connection closes, hangs, or the answer comes too late."""

from __future__ import annotations

import threading

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.lib.errors import BackendUnavailable, Uncertain
from tests.aws_server import sent_requests

pytestmark = pytest.mark.aws
CREATE, DESCRIBE, STOP = "CreateTrainingJob", "DescribeTrainingJob", "StopTrainingJob"
HANGS = pytest.mark.parametrize("hangs", [False, True], ids=["closes", "hangs"])
BRIEF = 0.3
"""Seconds that a client waits for an answer which never comes."""


@pytest.fixture
def timeouts(monkeypatch):
    """The time-outs of the next clients of SageMaker; later ones wait for a minute."""
    original, seconds = clients.client, []

    def client(service, region, **_):
        first = seconds.pop(0) if service == "sagemaker" and seconds else 60
        return original(service, region, attempts=1, timeout=first)

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
