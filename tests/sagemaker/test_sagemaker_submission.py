"""Submit against a real moto server over HTTP: what arrives, and what never leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber
from sagemaker_jobs import vary

from deploykit import bundle as bundles
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import sdk, uploading, watching
from deploykit.errors import (
    BackendUnavailable,
    NotPermitted,
    SubmitRefused,
    TryAgain,
    Uncertain,
)

pytestmark = pytest.mark.aws

HOSTILE = textwrap.dedent(
    """\
    SchemaVersion: '1.0'
    SageMaker:
      TrainingJob:
        RoleArn: arn:aws:iam::666666666666:role/hostile
        EnableInterContainerTrafficEncryption: true
        EnableNetworkIsolation: true
        Environment: {HOSTILE: '1'}
        OutputDataConfig: {KmsKeyId: hostile}
        ResourceConfig: {VolumeKmsKeyId: hostile}
        Tags: [{Key: hostile, Value: '1'}]
        VpcConfig: {SecurityGroupIds: [sg-6], Subnets: [subnet-6]}
      PythonSDK:
        Modules:
          Session: {DefaultS3Bucket: hostile}
    """
)


def sent(aws):
    return [json.loads(one.body) for one in aws.seen if one.action == "CreateTrainingJob"]


@pytest.mark.parametrize("sender", ["sdk", "boto3"])
def test_what_arrives_is_the_plan(aws, planned, tmp_path, sender):
    plan = planned(sender=sender, env={"A": "ü \n'\""}, args=("$(x)", "a b"))
    handle = sagemaker.submit(plan, tmp_path)
    assert str(handle) == "sagemaker://us-east-1/digits-1"
    assert sent(aws) == [json.loads(plan.text)]
    assert (tmp_path / "sdk" / "request.json").exists() == (sender == "sdk")


def test_uploaded_source_is_the_bundle_and_goes_once(aws, planned, tmp_path, source):
    for run in ("digits-1", "digits-2"):
        sagemaker.submit(planned(run, sender="boto3"), tmp_path)
    puts = [one for one in aws.seen if one.method == "PUT"]
    assert len(puts) == 1
    assert len(sent(aws)) == 2
    key = json.loads(sent(aws)[0]["HyperParameters"]["sagemaker_submit_directory"])
    stored = boto3.client("s3", "us-east-1").get_object(
        Bucket="my-bucket", Key=key.removeprefix("s3://my-bucket/")
    )
    with tarfile.open(fileobj=BytesIO(stored["Body"].read())) as archive:
        names = archive.getnames()
        assert archive.extractfile("train.py").read() == (source / "train.py").read_bytes()
    assert ".deploykit/launch.py" in names


def test_changed_source_is_uploaded_again(aws, tmp_path, source):
    job, options = vary(sender="boto3")
    for run in ("digits-1", "digits-2"):
        plan = sagemaker.plan(job, options, run=run, bundle=bundles.scan(source, 10**6))
        sagemaker.submit(plan, tmp_path)
        (source / "train.py").write_text("print('other')\n")
    assert len([one for one in aws.seen if one.method == "PUT"]) == 2


def test_plan_that_the_sdk_would_not_send_is_refused_by_field(aws, planned, tmp_path):
    plan = planned(sender="sdk")
    request = json.loads(plan.text)
    request["StoppingCondition"]["MaxRuntimeInSeconds"] = 1
    request["EnableNetworkIsolation"] = True
    with pytest.raises(SubmitRefused) as caught:
        sagemaker.submit(replace(plan, text=json.dumps(request)), tmp_path)
    assert "StoppingCondition.MaxRuntimeInSeconds: planned 1, the SDK 1800" in str(caught.value)
    assert "EnableNetworkIsolation: planned true, the SDK null" in str(caught.value)
    assert aws.seen == []


def test_job_that_the_sdk_refuses_is_refused(aws, planned, tmp_path):
    plan = planned(sender="sdk")
    options = replace(plan.options, framework_version="2.4.0")
    with pytest.raises(SubmitRefused, match=r"the SageMaker SDK refuses this job.*2\.4\.0"):
        sagemaker.submit(replace(plan, options=options), tmp_path)
    assert aws.seen == []


def test_missing_sdk(aws, planned, tmp_path, monkeypatch):
    monkeypatch.setattr(sdk, "available", lambda: False)
    with pytest.raises(BackendUnavailable, match="not installed"):
        sagemaker.submit(planned(sender="sdk"), tmp_path)
    sagemaker.submit(planned(sender="auto"), tmp_path)
    assert len(sent(aws)) == 1


def test_nobody_but_the_endpoint_is_called_and_no_configuration_leaks_in(
    aws, planned, tmp_path, source
):
    """Every socket of the submitting process and of its SDK child, in a hostile home."""
    home, notes = tmp_path / "home", tmp_path / "notes"
    for place in (".config/sagemaker", "xdg/sagemaker"):
        (home / place).mkdir(parents=True)
        (home / place / "config.yaml").write_text(HOSTILE)
    notes.mkdir()
    (notes / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def note(event, args):\n"
        "    if event in ('socket.connect', 'socket.sendto'):\n"
        f"        with open({str(notes)!r} + f'/{{os.getpid()}}.txt', 'a') as file:\n"
        "            print(args[1], file=file)\n"
        "sys.addaudithook(note)\n"
        f"open({str(notes)!r} + f'/{{os.getpid()}}.txt', 'a').close()\n"
    )
    code = (
        "import sys; sys.path[:0] = sys.argv[3:]\n"
        "from pathlib import Path\n"
        "from sagemaker_jobs import vary\n"
        "from deploykit import bundle\n"
        "from deploykit.backends import sagemaker\n"
        "job, options = vary(sender='sdk')\n"
        "found = bundle.scan(Path(sys.argv[1]), 10**6)\n"
        "plan = sagemaker.plan(job, options, run='digits-1', bundle=found)\n"
        "Path(sys.argv[2], 'plan.json').write_text(plan.text)\n"
        "sagemaker.submit(plan, Path(sys.argv[2]))\n"
    )
    here = Path(__file__).parent
    environment = {
        name: value for name, value in os.environ.items() if name != "AWS_EC2_METADATA_DISABLED"
    }
    environment |= {
        "HOME": str(home),
        "XDG_CONFIG_DIRS": str(home / "xdg"),
        "SAGEMAKER_USER_CONFIG_OVERRIDE": str(home / "xdg/sagemaker/config.yaml"),
        "PYTHONPATH": str(notes),
    }
    places = [str(here), str(here.parents[1])]
    ran = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path), *places],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert sent(aws) == [json.loads((tmp_path / "plan.json").read_text())]
    processes = list(notes.glob("*.txt"))
    assert len(processes) == 2
    called = {line for notes in processes for line in notes.read_text().splitlines()}
    assert called == {f"('127.0.0.1', {aws.port})"}


def test_bucket_that_does_not_exist(aws, planned, tmp_path):
    with pytest.raises(SubmitRefused) as caught:
        sagemaker.submit(planned(sender="boto3", bucket="no-such-bucket"), tmp_path)
    assert caught.value.hint == "make the bucket, or correct sagemaker.bucket"
    assert sent(aws) == []


def test_no_credentials(aws, planned, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NotPermitted, match="no usable AWS credentials"):
        sagemaker.submit(planned(sender="boto3"), tmp_path)
    assert aws.seen == []


def test_nobody_answers(aws, planned, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(clients, "_ATTEMPTS", 1)
    with pytest.raises(BackendUnavailable, match="cannot be reached"):
        sagemaker.submit(planned(sender="boto3"), tmp_path)


REFUSALS = {
    "AccessDeniedException": (NotPermitted, "IAM"),
    "ExpiredTokenException": (NotPermitted, "log in again"),
    "ResourceLimitExceeded": (SubmitRefused, "quota"),
    "ThrottlingException": (TryAgain, "try again"),
    "ValidationException": (SubmitRefused, "sagemaker section"),
}


@pytest.fixture
def stubbed(monkeypatch):
    """The service's answers, one after the other, in place of any server's."""
    client = boto3.client(
        "sagemaker", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x"
    )
    monkeypatch.setattr(clients, "client", lambda *_: client)
    monkeypatch.setattr(uploading, "upload", lambda _: None)
    with Stubber(client) as stub:
        yield stub
        stub.assert_no_pending_responses()


@pytest.mark.parametrize(("code", "expected"), REFUSALS.items(), ids=REFUSALS)
def test_refusal_of_the_service_is_explained(stubbed, planned, tmp_path, code, expected):
    kind, words = expected
    stubbed.add_client_error("create_training_job", code, "the service's words")
    with pytest.raises(kind, match="the service's words") as caught:
        sagemaker.submit(planned(sender="boto3"), tmp_path)
    assert type(caught.value) is kind
    assert words in caught.value.hint


def test_role_that_cannot_be_assumed(stubbed, planned, tmp_path):
    message = "Could not assume role arn:aws:iam::123456789012:role/training."
    stubbed.add_client_error("create_training_job", "ValidationException", message)
    with pytest.raises(SubmitRefused) as caught:
        sagemaker.submit(planned(sender="boto3"), tmp_path)
    assert "trust sagemaker.amazonaws.com" in caught.value.hint


def test_job_that_is_there_already_is_found_not_sent_twice(stubbed, planned, tmp_path):
    stubbed.add_client_error("create_training_job", "ResourceInUse", "already exists")
    plan = planned(sender="boto3")
    stubbed.add_response("describe_training_job", described(plan), {"TrainingJobName": "digits-1"})
    handle = sagemaker.submit(plan, tmp_path)
    assert handle == watching.handle("digits-1", tmp_path, "us-east-1")


def test_broken_answer_is_resolved_by_asking(stubbed, planned, tmp_path):
    stubbed.add_client_error("create_training_job", "InternalFailure", "broken")
    plan = planned(sender="boto3")
    stubbed.add_response("describe_training_job", described(plan))
    assert sagemaker.submit(plan, tmp_path).id == "digits-1"


OTHERS = {
    "role": ("RoleArn", {"RoleArn": "arn:aws:iam::123456789012:role/other"}),
    "code": (
        "HyperParameters.sagemaker_submit_directory",
        {"HyperParameters": {"sagemaker_submit_directory": '"s3://b/k"'}},
    ),
    "no code": ("HyperParameters.deploykit_argv_0", {"HyperParameters": {}}),
    "image": (
        "TrainingImage",
        {"AlgorithmSpecification": {"TrainingInputMode": "File", "TrainingImage": "evil:1"}},
    ),
    "results": ("S3OutputPath", {"OutputDataConfig": {"S3OutputPath": "s3://evil/runs"}}),
}


@pytest.mark.parametrize("code", ["ResourceInUse", "InternalFailure"])
@pytest.mark.parametrize(("field", "changes"), OTHERS.values(), ids=OTHERS)
def test_a_job_of_the_same_name_that_somebody_else_made_is_not_taken_for_ours(
    stubbed, planned, tmp_path, code, field, changes
):
    plan = planned(sender="boto3")
    stubbed.add_client_error("create_training_job", code, "already exists")
    stubbed.add_response("describe_training_job", described(plan, **changes))
    with pytest.raises(SubmitRefused, match="a different training job digits-1") as caught:
        sagemaker.submit(plan, tmp_path)
    assert field in str(caught.value)
    assert "choose another --run" in caught.value.hint


def test_broken_answer_and_no_job(stubbed, planned, tmp_path):
    stubbed.add_client_error("create_training_job", "InternalFailure", "broken")
    stubbed.add_client_error("describe_training_job", "ValidationException", "job not found.")
    with pytest.raises(TryAgain, match="broken"):
        sagemaker.submit(planned(sender="boto3"), tmp_path)


def test_broken_answer_and_nobody_to_ask_is_left_open(stubbed, planned, tmp_path):
    stubbed.add_client_error("create_training_job", "InternalFailure", "broken")
    stubbed.add_client_error("describe_training_job", "ThrottlingException", "busy")
    with pytest.raises(Uncertain, match="cannot be asked whether it has it"):
        sagemaker.submit(planned(sender="boto3"), tmp_path)


@pytest.fixture
def stubbed_s3(monkeypatch):
    client = boto3.client("s3", "us-east-1", aws_access_key_id="x", aws_secret_access_key="x")
    monkeypatch.setattr(clients, "client", lambda *_: client)
    with Stubber(client) as stub:
        yield stub
        stub.assert_no_pending_responses()


def test_who_may_not_look_may_still_upload(stubbed_s3, planned):
    stubbed_s3.add_client_error("head_object", "403", "Forbidden", 403)
    stubbed_s3.add_response("put_object", {})
    uploading.upload(planned())


def test_who_may_not_upload_is_told_which_permission_is_missing(stubbed_s3, planned):
    stubbed_s3.add_client_error("head_object", "404", "Not Found", 404)
    stubbed_s3.add_client_error("put_object", "AccessDenied", "Access Denied", 403)
    with pytest.raises(NotPermitted) as caught:
        uploading.upload(planned())
    assert "PutObject" in caught.value.hint


def test_bucket_in_another_region(stubbed_s3, planned):
    stubbed_s3.add_client_error("head_object", "301", "Moved Permanently", 301)
    with pytest.raises(SubmitRefused) as caught:
        uploading.upload(planned())
    assert "another region" in caught.value.hint


def described(plan, **more):
    """DescribeTrainingJob's answer for the job of this plan, or another."""
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/digits-1"
    request = json.loads(plan.text)
    kept = ("RoleArn", "HyperParameters", "AlgorithmSpecification", "OutputDataConfig")
    answer = {
        **{name: request[name] for name in kept},
        "TrainingJobName": "digits-1",
        "TrainingJobArn": arn,
        "ModelArtifacts": {"S3ModelArtifacts": "s3://b/m"},
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": 0,
    }
    return answer | more
