"""`deploykit deploy` to endpoints and `deploykit endpoint`, against a moto server over HTTP.

moto creates an endpoint at once, and has no UpdateEndpoint: `update_endpoint` does its work.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest

from deploykit.backends.deployment import Phase
from deploykit.bundle import source_tree
from deploykit.cli import main as cli
from deploykit.lib.errors import NotFound
from deploykit.run import deployments
from tests.aws_server import as_json

pytestmark = [pytest.mark.aws, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
JOB = """\
name: digits
entrypoint: {script: train.py}
sagemaker:
  role: arn:aws:iam::123456789012:role/training
  bucket: my-bucket
  region: us-east-1
  deploy:
    instance_type: ml.m5.xlarge
"""
SCALED = JOB + "    autoscaling: {max: 4, target: 600}\n"
INFERENCE = """\
def model_fn(folder): return 1
def input_fn(body, content_type): return body
def predict_fn(data, model): return data
def output_fn(prediction, accept): return prediction
"""
CREATING = ("CreateModel", "CreateEndpointConfig", "CreateEndpoint")
SCALING = ("RegisterScalableTarget", "PutScalingPolicy")
DELETING = ("DeleteEndpoint", "DeleteEndpointConfig", "DeleteModel")
CHANGING = (
    *(*CREATING, *SCALING, *DELETING, "UpdateEndpoint", "DeregisterScalableTarget"),
    *("UpdateEndpointWeightsAndCapacities", "CreateTransformJob", "StopTransformJob"),
)


def package(folder, *, weights="1", run="exp-1"):
    """A package as `export` writes it."""
    (folder / "code").mkdir(parents=True)
    (folder / "model.safetensors").write_text(weights)
    (folder / "code/inference.py").write_text(INFERENCE)
    manifest = {"format": 1, "run": run, "versions": {"torch": "2.6.0+cpu"}, "files": {}}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with a job file and two packages, `model` and `better`."""
    folder = tmp_path / "a place"
    folder.mkdir()
    (folder / "job.yaml").write_text(JOB)
    (folder / "train.py").touch()
    package(folder / "model")
    package(folder / "better", weights="2", run="exp-2")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def service(aws, moto):
    """The recorder, with UpdateEndpoint; `.client` is SageMaker itself, unrecorded."""
    aws.client = boto3.client("sagemaker", "us-east-1", endpoint_url=f"http://127.0.0.1:{moto}")

    def update_endpoint(body):
        name, config = body["EndpointName"], body["EndpointConfigName"]
        aws.client.delete_endpoint(EndpointName=name)
        aws.client.create_endpoint(EndpointName=name, EndpointConfigName=config)
        return {"EndpointArn": f"arn:aws:sagemaker:us-east-1:123456789012:endpoint/{name}"}

    aws.answers["UpdateEndpoint"] = update_endpoint
    return aws


def deploykit(*words, code=0):
    assert cli.main(list(words)) == code


def changes(service):
    """The requests that change something, since the last call."""
    sent = [
        (one.action, json.loads(one.body)) for one in service.requests if one.action in CHANGING
    ]
    service.requests.clear()
    return sent


def actions(service):
    return [action for action, _ in changes(service)]


def existing(service):
    """The names of all endpoints, configurations and models."""
    client = service.client
    return (
        [each["EndpointName"] for each in client.list_endpoints()["Endpoints"]],
        sorted(
            each["EndpointConfigName"] for each in client.list_endpoint_configs()["EndpointConfigs"]
        ),
        sorted(each["ModelName"] for each in client.list_models()["Models"]),
    )


def served(service):
    return service.client.describe_endpoint(EndpointName="digits")["EndpointConfigName"]


def plan_of(capsys, *words):
    """What a dry run prints: operation and request of each."""
    capsys.readouterr()
    deploykit("deploy", *words, "-b", "sagemaker", "--dry-run")
    return [(each["operation"], each["request"]) for each in json.loads(capsys.readouterr().out)]


def test_a_dry_run_is_offline_and_exactly_what_is_sent(place, service, capsys, monkeypatch):
    (place / "job.yaml").write_text(SCALED)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    planned = plan_of(capsys, "model")
    assert service.requests == []
    monkeypatch.setenv("AWS_ENDPOINT_URL", service.endpoint)
    deploykit("deploy", "model", "-b", "sagemaker")
    assert changes(service) == planned
    assert [action for action, _ in planned] == [*CREATING, *SCALING]


def test_deploying_again_finds_what_exists(place, service):
    deploykit("deploy", "model", "-b", "sagemaker")
    deploykit("deploy", "model", "-b", "sagemaker")
    assert actions(service) == list(CREATING)
    service.client.delete_endpoint(EndpointName="digits")
    deploykit("deploy", "model", "-b", "sagemaker")
    assert actions(service) == ["CreateEndpoint"]
    assert deployments.get("digits").phase == "in service"


def test_the_archive_is_uploaded_once_and_is_the_package(place, service, tmp_path):
    deploykit("deploy", "model", "-b", "sagemaker")
    row = deployments.get("digits")
    deploykit("deploy", "model", "-b", "sagemaker", "--name", "other")
    uploads = [one for one in service.requests if one.method == "PUT" and "models/" in one.path]
    assert len(uploads) == 1
    archive = tmp_path / "model.tar.gz"
    bucket, _, key = row.archive.removeprefix("s3://").partition("/")
    boto3.client("s3", "us-east-1").download_file(bucket, key, str(archive))
    listed = subprocess.run(["tar", "-tzf", archive], capture_output=True, text=True, check=True)
    assert listed.stdout.split() == ["code/inference.py", "manifest.json", "model.safetensors"]


def test_an_update_a_rollback_and_back(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    first = served(service)
    deploykit("deploy", "better", "-b", "sagemaker")
    second = served(service)
    assert second != first
    assert actions(service)[3:] == ["CreateModel", "CreateEndpointConfig", "UpdateEndpoint"]
    assert deployments.get("digits").run == "exp-2"
    deploykit("endpoint", "rollback", "digits")
    assert served(service) == first
    assert actions(service) == ["UpdateEndpoint"]
    assert deployments.get("digits").run == "exp-1"
    deploykit("endpoint", "rollback", "digits", "--to", second)
    assert served(service) == second
    service.requests.clear()
    deploykit("endpoint", "status", "digits")
    assert [one.action for one in service.requests] == ["DescribeEndpoint"]
    capsys.readouterr()
    deploykit("endpoint", "status", "digits", "--json")
    (shown,) = json.loads(capsys.readouterr().out)
    assert [(each["run"], each["phase"]) for each in shown["history"]] == [
        ("exp-2", "in service"),
        ("exp-1", "replaced"),
    ]
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


def test_a_rollback_without_an_earlier_deployment(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    deploykit("endpoint", "rollback", "digits", code=66)
    assert "digits has no earlier deployment" in capsys.readouterr().err


def foreign(client):
    """An endpoint that somebody else has made."""
    client.create_model(ModelName="other", ExecutionRoleArn="arn:aws:iam::123456789012:role/a")
    variant = {"VariantName": "A", "ModelName": "other", "InstanceType": "ml.m5.xlarge"}
    client.create_endpoint_config(
        EndpointConfigName="foreign", ProductionVariants=[variant | {"InitialInstanceCount": 1}]
    )
    client.create_endpoint(EndpointName="digits", EndpointConfigName="foreign")


def test_a_name_that_belongs_to_something_else(place, service, capsys):
    foreign(service.client)
    deploykit("deploy", "model", "-b", "sagemaker", code=76)
    message = capsys.readouterr().err
    assert "the endpoint digits already exists in us-east-1" in message
    assert "it serves the configuration foreign, not digits-" in message
    assert actions(service) == []
    assert deployments.current() == []
    deploykit("deploy", "model", "-b", "sagemaker", "--update")
    assert served(service) == deployments.get("digits").config
    assert actions(service) == ["CreateModel", "CreateEndpointConfig", "UpdateEndpoint"]


def test_a_foreign_endpoint_is_never_deleted(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    service.client.delete_endpoint(EndpointName="digits")
    foreign(service.client)
    deploykit("endpoint", "rm", "digits", code=76)
    assert "the endpoint digits serves foreign, which was not deployed" in capsys.readouterr().err
    assert served(service) == "foreign"


def test_a_model_of_the_same_name_that_is_another(place, service, capsys):
    _, model = plan_of(capsys, "model")[0]
    changed = {**model["PrimaryContainer"], "Image": "another/image:1"}
    service.client.create_model(**model | {"PrimaryContainer": changed})
    deploykit("deploy", "model", "-b", "sagemaker", code=76)
    message = capsys.readouterr().err
    assert f"a different model {model['ModelName']} already exists in us-east-1" in message
    assert "PrimaryContainer.Image differs from the plan" in message


@pytest.mark.parametrize("status", ["Creating", "Updating", "Deleting"])
def test_an_endpoint_that_is_changing_is_not_changed(place, service, capsys, status):
    deploykit("deploy", "model", "-b", "sagemaker")
    changes(service)

    def respond(one, forward):
        code, headers, content = forward()
        if one.action == "DescribeEndpoint":
            return as_json(code, {**json.loads(content), "EndpointStatus": status})
        return code, headers, content

    service.respond = respond
    deploykit("deploy", "better", "-b", "sagemaker", code=75)
    assert f"the endpoint digits is {status} in us-east-1" in capsys.readouterr().err
    assert actions(service) == []


def test_another_account_is_not_taken_for_a_deleted_endpoint(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    row = deployments.get("digits")
    deployments._put(row._replace(account="999999999999"))
    deployments._put(row._replace(phase=Phase.REMOVED.value))
    service.client.delete_endpoint(EndpointName="digits")
    deploykit("endpoint", "status", "digits", code=77)
    assert "digits belongs to account 999999999999" in capsys.readouterr().err


def test_an_endpoint_that_was_deleted_elsewhere(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    service.client.delete_endpoint(EndpointName="digits")
    deploykit("endpoint", "status", "digits")
    assert "digits: deleted" in capsys.readouterr().out
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


def test_endpoints_of_the_same_name_in_two_regions(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    row = deployments.get("digits")
    deployments._put(row._replace(target="eu-west-1"))
    deploykit("endpoint", "rm", "digits", code=66)
    message = capsys.readouterr().err
    assert "several endpoints are named digits" in message
    assert "us-east-1/digits" in message
    assert "eu-west-1/digits" in message
    assert deployments.get("eu-west-1/digits").target == "eu-west-1"
    deploykit("endpoint", "rm", "us-east-1/digits")
    assert existing(service) == ([], [], [])
    assert deployments.get("digits").target == "eu-west-1"
    deployments._put(row._replace(target="eu-west-1", account="210987654321"))
    with pytest.raises(NotFound) as several:
        deployments.get("digits")
    assert "210987654321/eu-west-1/digits" in several.value.hint


def test_an_endpoint_that_is_removed_twice(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    known = deployments.get("digits")
    deploykit("endpoint", "rm", "digits", "digits")
    assert existing(service) == ([], [], [])
    with pytest.raises(NotFound, match="was removed in the meantime"):
        deployments.remove(known)
    deployments.refresh([known])  # by a command that began before
    assert deployments.current() == []


def test_autoscaling_of_other_machines_ends_before_the_update(place, service):
    (place / "job.yaml").write_text(SCALED)
    deploykit("deploy", "model", "-b", "sagemaker")
    (place / "job.yaml").write_text(SCALED.replace("ml.m5", "ml.c5"))
    deploykit("deploy", "model", "-b", "sagemaker")
    sent = actions(service)
    assert sent[5:] == [
        *("CreateEndpointConfig", "DeregisterScalableTarget", "UpdateEndpoint"),
        *SCALING,
    ]


def test_scaling(place, service, capsys):
    (place / "job.yaml").write_text(SCALED)
    deploykit("deploy", "model", "-b", "sagemaker")
    changes(service)
    deploykit("endpoint", "scale", "digits", "--instances", "3", code=64)
    assert "autoscaling sets the number of instances of digits" in capsys.readouterr().err
    deploykit("endpoint", "scale", "digits", "--min", "2", "--max", "8")
    ((action, request),) = changes(service)
    assert action == "RegisterScalableTarget"
    assert (request["MinCapacity"], request["MaxCapacity"]) == (2, 8)
    assert "digits: updated; 2 to 8 x ml.m5.xlarge" in capsys.readouterr().out
    deploykit("endpoint", "scale", "digits", "--min", "1")
    ((_, request),) = changes(service)
    assert request["MinCapacity"] == 1
    assert "MaxCapacity" not in request, "the limit that was set before stays"
    deploykit("endpoint", "scale", "digits", "--weight", "AllTrafic=2", code=64)
    assert "did you mean 'AllTraffic'?" in capsys.readouterr().err
    (place / "job.yaml").write_text(JOB)
    deploykit("deploy", "model", "-b", "sagemaker", "--name", "fixed")
    changes(service)
    deploykit("endpoint", "scale", "fixed", "--instances", "3", "--weight", "AllTraffic=2")
    ((_, request),) = changes(service)
    desired = {"VariantName": "AllTraffic", "DesiredInstanceCount": 3, "DesiredWeight": 2.0}
    assert request == {"EndpointName": "fixed", "DesiredWeightsAndCapacities": [desired]}
    deploykit("endpoint", "scale", "fixed", "--max", "3", code=64)
    assert "fixed has no autoscaling" in capsys.readouterr().err


def test_a_request(place, service, capsysbinary):
    deploykit("deploy", "model", "-b", "sagemaker")
    (place / "request.npy").write_bytes(b"NUMPY")
    service.requests.clear()
    capsysbinary.readouterr()
    deploykit("endpoint", "invoke", "digits", "request.npy")
    assert capsysbinary.readouterr().out == b"body"  # moto's answer
    (sent,) = (one for one in service.requests if one.path == "/endpoints/digits/invocations")
    assert sent.body == b"NUMPY"
    assert sent.headers["content-type"] == "application/x-npy"
    deploykit("endpoint", "invoke", "digits", "request.npy", "-o", "answer")
    assert Path("answer").read_bytes() == b"body"
    deploykit("endpoint", "invoke", "digits", "nothing.json", code=66)


def test_the_model_s_error_is_shown(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    failure = {"Message": "failed", "OriginalStatusCode": 500, "OriginalMessage": "no such class"}

    def respond(one, forward):
        if one.path == "/endpoints/digits/invocations":
            status, headers, content = as_json(424, failure)
            return status, [*headers, ("x-amzn-ErrorType", "ModelError")], content
        return forward()

    service.respond = respond
    Path("request.json").write_text("{}")
    deploykit("endpoint", "invoke", "digits", "request.json", code=76)
    message = capsys.readouterr().err
    assert "the model behind digits returned 500: no such class" in message
    assert "deploykit endpoint logs digits" in message


def test_an_asynchronous_request_waits_for_its_answer_in_s3(place, service, capsysbinary):
    (place / "job.yaml").write_text(f"{JOB}    async: {{}}\n")
    deploykit("deploy", "model", "-b", "sagemaker", "--name", "queue")
    store = boto3.client("s3", "us-east-1")
    output = "s3://my-bucket/deploykit/async/queue/output/1.out"

    def respond(one, forward):
        if one.path.endswith("/async-invocations"):
            location = one.headers["x-amzn-sagemaker-inputlocation"]
            bucket, _, key = location.removeprefix("s3://").partition("/")
            body = store.get_object(Bucket=bucket, Key=key)["Body"].read()
            bucket, _, key = output.removeprefix("s3://").partition("/")
            store.put_object(Bucket=bucket, Key=key, Body=b"answer to " + body)
            status, headers, content = as_json(202, {"InferenceId": "1"})
            return status, [*headers, ("X-Amzn-SageMaker-OutputLocation", output)], content
        return forward()

    service.respond = respond
    Path("request.json").write_text("question")
    capsysbinary.readouterr()
    deploykit("endpoint", "invoke", "queue", "request.json")
    assert capsysbinary.readouterr().out == b"answer to question"
    read = [one for one in service.requests if one.method == "GET" and "output" in one.path]
    assert {one.headers.get("x-amz-expected-bucket-owner") for one in read} == {"123456789012"}
    deploykit("endpoint", "invoke", "queue", "request.json", "--no-wait")
    assert capsysbinary.readouterr().out == output.encode()
    deploykit("endpoint", "invoke", "queue", "request.json", "--variant", "AllTraffic", code=64)
    deploykit("endpoint", "invoke", "queue", "request.json", "-o", "no/answer", code=66)
    assert b"cannot write no/answer: its folder does not exist" in capsysbinary.readouterr().err


def test_a_batch_job(place, service, capsys):
    (place / "job.yaml").write_text(f"{JOB}    batch: {{input: s3://my-bucket/requests}}\n")
    deploykit("deploy", "model", "-b", "sagemaker")
    deploykit("deploy", "model", "-b", "sagemaker", "--wait")
    assert actions(service) == ["CreateModel", "CreateTransformJob"]
    (row,) = deployments.current()
    assert (row.mode, row.phase) == ("batch", "completed")
    deploykit("endpoint", "invoke", row.name, "job.yaml", code=64)
    assert "is a batch job" in capsys.readouterr().err
    deploykit("endpoint", "rm", row.name)
    assert existing(service)[2] == []


def test_logs(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    logs = boto3.client("logs", "us-east-1")
    group, stream = "/aws/sagemaker/Endpoints/digits", "AllTraffic/i-0abc"
    logs.create_log_group(logGroupName=group)
    logs.create_log_stream(logGroupName=group, logStreamName=stream)
    events = [{"timestamp": int(time.time() * 1000), "message": "loaded the model"}]
    logs.put_log_events(logGroupName=group, logStreamName=stream, logEvents=events)
    capsys.readouterr()
    deploykit("endpoint", "logs", "digits")
    assert capsys.readouterr().out == "loaded the model\n"


def test_waiting_ends_with_a_failure_and_its_reason(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")

    def respond(one, forward):
        code, headers, content = forward()
        if one.action == "DescribeEndpoint":
            failed = {"EndpointStatus": "Failed", "FailureReason": "the container did not answer"}
            return as_json(code, {**json.loads(content), **failed})
        return code, headers, content

    service.respond = respond
    deploykit("endpoint", "wait", "digits", code=1)
    assert "digits: failed" in capsys.readouterr().out
    deploykit("deploy", "model", "-b", "sagemaker", code=76)
    assert "has failed: the container did not answer" in capsys.readouterr().err


def test_waiting_survives_an_outage(place, service, capsys, monkeypatch):
    monkeypatch.setattr(deployments, "_POLL_INTERVAL", 0.05)
    deploykit("deploy", "model", "-b", "sagemaker")
    answers = iter([{"EndpointStatus": "Creating"}, None, None])  # None: a proxy's page

    def respond(one, forward):
        code, _, content = forward()
        change = next(answers, {}) if one.action == "DescribeEndpoint" else {}
        return as_json(code, {} if change is None else {**json.loads(content), **change})

    service.respond = respond
    deploykit("endpoint", "wait", "digits")
    assert "digits: in service" in capsys.readouterr().out
    assert next(answers, "none") == "none"


def test_waiting_ends_if_the_endpoint_serves_another_deployment(place, service, capsys):
    deploykit("deploy", "model", "-b", "sagemaker")
    waiting = deployments.get("digits")._replace(phase=Phase.CREATING.value)  # as a command has it
    deploykit("deploy", "better", "-b", "sagemaker")
    assert [each.phase for each in deployments.settled(waiting, 60)] == ["replaced"]
    deploykit("endpoint", "rm", "digits")
    with pytest.raises(NotFound, match="was removed in the meantime"):
        list(deployments.settled(waiting, 60))


def test_a_failed_update_is_reported(place, service, capsys):
    """The service goes back to the earlier configuration by itself."""
    deploykit("deploy", "model", "-b", "sagemaker")
    service.answers["UpdateEndpoint"] = lambda _: {"EndpointArn": "arn"}
    deploykit("deploy", "better", "-b", "sagemaker", code=1)
    first = served(service)
    assert f"digits: failed, with the model of exp-2 - the endpoint still serves {first}" in (
        capsys.readouterr().out
    )
    deploykit("endpoint", "rollback", "digits")
    assert deployments.get("digits").config == first
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("deploy", "nothing", "-b", "sagemaker"), 66, "no run matches 'nothing'"),
        (("deploy", "code", "-b", "sagemaker"), 66, "code is not a package"),
        (
            ("deploy", "site", "-b", "sagemaker"),
            *(66, "site is not a package: manifest.json was not written by `deploykit export`"),
        ),
        (("deploy", "site"), 66, "site is not a package: manifest.json was not written by"),
        (("deploy", "site", "--dry-run"), 66, "site is not a package: manifest.json was not"),
        (
            ("deploy", "bare", "--dry-run"),
            66,
            "bare is not a package: code/inference.py is missing",
        ),
        (("deploy", "fetched", "-b", "sagemaker"), 66, "no run matches 'fetched'"),
        (("deploy", "fetched"), 66, "no run matches 'fetched'"),
        (
            ("deploy", "model", "-b", "slurm"),
            *(64, "slurm does not offer `deploy`\n  backends that offer it: local, sagemaker"),
        ),
        (
            ("deploy", "model", "-b", "sagemaker", "--set", "sagemaker.deploy.batc={}"),
            *(
                65,
                "error: arguments: 2 problems\n  sagemaker.deploy.batc: unknown key (did you mean",
            ),
        ),
        (("deploy", "model", "-b", "sagemaker", "--port", "1"), 64, "--port does not apply"),
        (("deploy", "model", "--name", "digits"), 64, "--name does not apply to backend local"),
        (("deploy", "model", "-b", "sagemaker", "--name", "a_b"), 65, "argument --name: expected"),
        (
            ("deploy", "model", "-b", "sagemaker", "--set", "sagemaker.deploy.weight=0"),
            *(65, "at least one variant must have a weight above 0"),
        ),
        (("endpoint", "statsu"), 64, "did you mean 'status'?"),
        (("endpoint", "list"), 64, "did you mean 'status'?"),
        (("endpoint", "wait", "digits"), 66, "no endpoint 'digits' was deployed from here"),
        (("endpoint", "rm"), 64, "`deploykit endpoint rm` expects one name"),
        (("endpoint", "rm", "a", "--follow"), 64, "--follow applies only to"),
        (("endpoint", "scale", "digits"), 66, "no endpoint 'digits'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_sent(place, service, capsys, words, code, message):
    for name, file, text in (
        *(("code", "inference.py", ""), ("site", "manifest.json", "{}")),
        ("fetched", source_tree.FETCHED, "{}"),
        ("bare", "manifest.json", '{"run": "exp-1"}'),
    ):
        (place / name).mkdir()
        (place / name / file).write_text(text)
    deploykit(*words, code=code)
    assert message in capsys.readouterr().err
    assert actions(service) == []
    assert not list(Path().rglob("model.tar.gz"))


# --------------------------------------------------------- killed between any two requests


def killed(service, action, when, number, *words):
    """Run a command that is killed before or after the `number`th request of an action."""
    left = [number]

    def respond(one, forward):
        is_last = one.action == action or (action == "PutObject" and one.method == "PUT")
        left[0] -= is_last
        if not is_last or left[0] != 0:
            return forward()
        if when == "after":
            forward()
        process.kill()
        return None

    service.respond = respond
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    argv = [sys.executable, "-m", "deploykit", *words]
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        shown, _ = process.communicate(timeout=300)
    service.respond = lambda _, forward: forward()
    assert process.returncode == -signal.SIGKILL, shown
    return shown


POINTS = (pytest.param("before", marks=pytest.mark.nightly), "after")


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("action", ["PutObject", *CREATING, *SCALING])
def test_a_killed_deploy(place, service, action, when):
    (place / "job.yaml").write_text(SCALED)
    deploy = ("deploy", "model", "-b", "sagemaker")
    killed(service, action, when, 1, *deploy)
    changes(service)
    deploykit(*deploy)
    done = [*CREATING, *SCALING]
    first = 0 if action == "PutObject" else done.index(action) + (when == "after")
    if action in SCALING:  # sent together again: both may be repeated
        first = done.index(SCALING[0])
    assert actions(service) == done[first:]
    names = existing(service)
    assert [len(each) for each in names] == [1, 1, 1]
    row = deployments.get("digits")
    assert (row.phase, row.pending) == ("in service", 0)
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("action", CREATING)
def test_a_killed_deploy_is_cleaned_up(place, service, action, when):
    killed(service, action, when, 1, "deploy", "model", "-b", "sagemaker")
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("action", ["CreateModel", "CreateEndpointConfig", "UpdateEndpoint"])
def test_a_killed_update(place, service, action, when):
    deploykit("deploy", "model", "-b", "sagemaker")
    update = ("deploy", "better", "-b", "sagemaker")
    killed(service, action, when, 1, *update)
    deploykit(*update)
    row = deployments.get("digits")
    assert (row.run, row.phase, served(service)) == ("exp-2", "in service", row.config)
    assert [len(each) for each in existing(service)] == [1, 2, 2]
    deploykit("endpoint", "rollback", "digits")
    assert deployments.get("digits").run == "exp-1"
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("action", ["DeregisterScalableTarget", "UpdateEndpoint"])
def test_a_killed_rollback(place, service, action, when):
    (place / "job.yaml").write_text(SCALED.replace("ml.m5", "ml.c5"))
    deploykit("deploy", "model", "-b", "sagemaker")
    first = served(service)
    (place / "job.yaml").write_text(SCALED)
    deploykit("deploy", "model", "-b", "sagemaker")
    killed(service, action, when, 1, "endpoint", "rollback", "digits")
    deploykit("endpoint", "rollback", "digits")
    assert served(service) == first
    deploykit("endpoint", "wait", "digits")
    scaling = boto3.client("application-autoscaling", "us-east-1")
    (target,) = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")["ScalableTargets"]
    assert target["ResourceId"] == "endpoint/digits/variant/AllTraffic"
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("action", ["DeregisterScalableTarget", *DELETING])
def test_a_killed_removal(place, service, action, when):
    (place / "job.yaml").write_text(SCALED)
    deploykit("deploy", "model", "-b", "sagemaker")
    killed(service, action, when, 1, "endpoint", "rm", "digits")
    deploykit("endpoint", "rm", "digits")
    assert existing(service) == ([], [], [])
    scaling = boto3.client("application-autoscaling", "us-east-1")
    targets = scaling.describe_scalable_targets(ServiceNamespace="sagemaker")
    assert targets["ScalableTargets"] == []
    assert deployments.current() == []


@pytest.mark.parametrize("when", POINTS)
def test_a_killed_scaling(place, service, when):
    deploykit("deploy", "model", "-b", "sagemaker")
    scale = ("endpoint", "scale", "digits", "--instances", "3")
    killed(service, "UpdateEndpointWeightsAndCapacities", when, 1, *scale)
    deploykit(*scale)
    assert deployments.get("digits").machine_list[0].instances == 3


@pytest.mark.parametrize("when", POINTS)
@pytest.mark.parametrize("action", ["CreateModel", "CreateTransformJob"])
def test_a_killed_batch_job(place, service, action, when):
    (place / "job.yaml").write_text(f"{JOB}    batch: {{input: s3://my-bucket/requests}}\n")
    deploy = ("deploy", "model", "-b", "sagemaker")
    killed(service, action, when, 1, *deploy)
    deploykit(*deploy)
    jobs = service.client.list_transform_jobs()["TransformJobSummaries"]
    assert len(jobs) == 1
    assert deployments.get(jobs[0]["TransformJobName"]).phase == "completed"


def test_an_answer_that_is_lost_is_no_second_request(place, service):
    """The request was carried out, and the connection broke before its answer came."""
    lost = set(CREATING)

    def respond(one, forward):
        answer = forward()
        if one.action in lost:
            lost.remove(one.action)
            return None
        return answer

    service.respond = respond
    deploykit("deploy", "model", "-b", "sagemaker")
    assert lost == set()
    assert [len(each) for each in existing(service)] == [1, 1, 1]
    assert deployments.get("digits").phase == "in service"


def test_a_run_without_a_model_that_can_be_served(project, service, capsys):
    """A run without a checkpoint, then one whose checkpoint nothing can load."""
    section = JOB.partition("sagemaker:")
    with (project / "job.yaml").open("a") as file:
        file.write("".join(section[1:]))
    submit = ("submit", "-b", "local", "--wait", "--set", "entrypoint.launcher=python")
    deploykit(*submit, "--run", "empty")
    deploykit("deploy", "empty", "-b", "sagemaker", code=66)
    assert (
        "empty has no checkpoints, and no folder model/ in its results" in capsys.readouterr().err
    )
    (project / "train.py").write_text(
        "import os, pathlib\n"
        "pathlib.Path(os.environ['DEPLOYKIT_CHECKPOINT_DIR'], 'weights.bin').write_text('1')\n"
    )
    deploykit(*submit, "--run", "own")
    deploykit("deploy", "own", "-b", "sagemaker", code=72)
    assert "own has no inference.py to load weights.bin" in capsys.readouterr().err
    (project / "inference.py").write_text("from nowhere import Net\n")
    deploykit("deploy", "own", "-b", "sagemaker", "--inference", "inference.py", code=72)
    assert "cannot rebuild the model of own: ModuleNotFoundError" in capsys.readouterr().err
    assert actions(service) == []
    (project / "inference.py").write_text(INFERENCE)
    chosen = ("--inference", "inference.py", "--set", "sagemaker.deploy.framework_version=2.6.0")
    deploykit("deploy", "own", "-b", "sagemaker", *chosen)
    assert actions(service) == list(CREATING)
    assert deployments.get("hello").run == "own"
