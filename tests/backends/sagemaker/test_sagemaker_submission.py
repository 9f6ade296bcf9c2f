"""Submit to a real moto server over HTTP: what arrives, and what is never sent."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import boto3
import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import uploads
from deploykit.bundle import archive as bundles
from deploykit.lib.errors import (
    BackendUnavailable,
    NotPermitted,
    SubmitRefused,
    TryAgain,
    Uncertain,
)
from tests.aws_server import sent_requests
from tests.backends.sagemaker.sagemaker_jobs import vary

pytestmark = [
    pytest.mark.aws,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*SageMaker Python SDK v2"),
]

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


@pytest.mark.parametrize("sender", ["sdk", "boto3"])
def test_the_request_that_arrives_is_the_plan(aws, planned, tmp_path, sender):
    plan = planned(sender=sender, env={"A": "ü \n'\""}, args=("$(x)", "a b"))
    handle = sagemaker.submit(plan, tmp_path)
    assert str(handle) == "sagemaker://us-east-1/digits-1"
    assert sent_requests(aws) == [json.loads(plan.text)]


def test_the_bundle_is_uploaded_once(aws, planned, tmp_path, source):
    for run in ("digits-1", "digits-2"):
        sagemaker.submit(planned(run), tmp_path)
    puts = [one for one in aws.requests if one.method == "PUT"]
    assert len(puts) == 1
    assert len(sent_requests(aws)) == 2
    key = json.loads(sent_requests(aws)[0]["HyperParameters"]["sagemaker_submit_directory"])
    stored = boto3.client("s3", "us-east-1").get_object(
        Bucket="my-bucket", Key=key.removeprefix("s3://my-bucket/")
    )
    with tarfile.open(fileobj=BytesIO(stored["Body"].read())) as archive:
        names = archive.getnames()
        assert archive.extractfile("train.py").read() == (source / "train.py").read_bytes()
    assert ".deploykit/launch.py" in names


def test_a_changed_source_is_uploaded_again(aws, tmp_path, source):
    job, options = vary()
    for run in ("digits-1", "digits-2"):
        plan = sagemaker.plan(job, options, run=run, bundle=bundles.scan(source, 10**6))
        sagemaker.submit(plan, tmp_path)
        (source / "train.py").write_text("print('other')\n")
    assert len([one for one in aws.requests if one.method == "PUT"]) == 2


def test_a_difference_from_the_sdks_request_is_refused_and_named(aws, planned, tmp_path):
    plan = planned(sender="sdk")
    request = json.loads(plan.text)
    request["HyperParameters"]["sagemaker_program"] = '"other.py"'
    request["AlgorithmSpecification"]["TrainingImage"] = "other"
    with pytest.raises(SubmitRefused) as caught:
        sagemaker.submit(plan._replace(text=json.dumps(request)), tmp_path)
    assert ', not "other"' in str(caught.value)
    assert "HyperParameters.sagemaker_program is " in str(caught.value)
    assert aws.requests == []


def test_a_job_that_the_sdk_refuses_is_refused(aws, planned, tmp_path):
    plan = planned(sender="sdk")
    options = replace(plan.options, framework_version="2.4.0")
    with pytest.raises(SubmitRefused, match=r"the SageMaker SDK rejected this job.*2\.4\.0"):
        sagemaker.submit(plan._replace(options=options), tmp_path)
    assert aws.requests == []


def test_a_missing_sdk_matters_only_if_it_is_required(aws, planned, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.metadata.version", lambda _: "3.1.0")
    with pytest.raises(BackendUnavailable, match=r"installed: 3\.1\.0"):
        sagemaker.submit(planned(sender="sdk"), tmp_path)
    assert aws.requests == []
    sagemaker.submit(planned(), tmp_path)
    assert len(sent_requests(aws)) == 1


@pytest.mark.parametrize("sender", ["boto3", "sdk"])
def test_only_the_endpoint_is_contacted_and_no_configuration_is_read(aws, tmp_path, source, sender):
    """Records every socket of the submitting process, in a hostile home."""
    home, records = tmp_path / "home", tmp_path / "records"
    for folder in (".config/sagemaker", "xdg/sagemaker"):
        (home / folder).mkdir(parents=True)
        (home / folder / "config.yaml").write_text(HOSTILE)
    records.mkdir()
    (records / "sitecustomize.py").write_text(
        "import os, sys\n"
        "def record(event, args):\n"
        "    if event in ('socket.connect', 'socket.sendto'):\n"
        f"        with open({str(records)!r} + f'/{{os.getpid()}}.txt', 'a') as file:\n"
        "            print(args[1], file=file)\n"
        "sys.addaudithook(record)\n"
        f"open({str(records)!r} + f'/{{os.getpid()}}.txt', 'a').close()\n"
    )
    code = (
        "import sys; sys.path[:0] = sys.argv[4:]\n"
        "from pathlib import Path\n"
        "from sagemaker_jobs import vary\n"
        "from deploykit.bundle import archive as bundle\n"
        "from deploykit.backends import sagemaker\n"
        "job, options = vary(sender=sys.argv[3])\n"
        "scanned = bundle.scan(Path(sys.argv[1]), 10**6)\n"
        "plan = sagemaker.plan(job, options, run='digits-1', bundle=scanned)\n"
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
        "PYTHONPATH": str(records),
    }
    import_path = [str(here), str(here.parents[1])]
    ran = subprocess.run(
        [sys.executable, "-c", code, str(source), str(tmp_path), sender, *import_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (0, ""), ran.stderr
    assert sent_requests(aws) == [json.loads((tmp_path / "plan.json").read_text())]
    (process,) = records.glob("*.txt")
    contacted = set(process.read_text().splitlines())
    assert contacted == {f"('127.0.0.1', {aws.port})"}


def test_a_bucket_that_does_not_exist_is_refused(aws, planned, tmp_path):
    with pytest.raises(SubmitRefused) as caught:
        sagemaker.submit(planned(bucket="no-such-bucket"), tmp_path)
    assert caught.value.hint == "create the bucket, or correct sagemaker.bucket"
    assert sent_requests(aws) == []


def test_missing_credentials_are_reported(aws, planned, tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(NotPermitted, match="no valid AWS credentials"):
        sagemaker.submit(planned(), tmp_path)
    assert aws.requests == []


def test_an_unreachable_endpoint_is_reported(aws, planned, tmp_path, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(clients, "_ATTEMPTS", 1)
    with pytest.raises(BackendUnavailable, match="cannot reach AWS"):
        sagemaker.submit(planned(), tmp_path)


ROLE = "arn:aws:iam::123456789012:role/training"
DENIED = f"User: ada is not authorized to perform: iam:PassRole on resource: {ROLE}"
REFUSALS = [
    ("AccessDeniedException", "no", NotPermitted, "to your user or role in IAM"),
    (
        *("AccessDeniedException", f"{DENIED} because no policy allows it", NotPermitted),
        f"grant iam:PassRole on {ROLE} to your user or role in IAM",
    ),
    (
        *("AccessDeniedException", f"{DENIED} with an explicit deny in a policy", NotPermitted),
        f"a policy explicitly denies iam:PassRole on {ROLE}, overriding any Allow",
    ),
    ("ExpiredTokenException", "late", NotPermitted, "log in again"),
    ("ResourceLimitExceeded", "too many", SubmitRefused, "quota"),
    ("ThrottlingException", "too fast", TryAgain, "try again"),
    ("ValidationException", "wrong", SubmitRefused, "sagemaker section"),
    (
        *("ValidationException", f"Could not assume role {ROLE}.", SubmitRefused),
        "trust sagemaker.amazonaws.com",
    ),
]


@pytest.fixture
def stubbed(stub_client, monkeypatch):
    monkeypatch.setattr(uploads, "upload", lambda _: None)
    return stub_client("sagemaker")


@pytest.mark.parametrize(("code", "message", "kind", "hint"), REFUSALS)
def test_an_error_of_the_service_has_its_class_and_a_hint(
    stubbed, planned, tmp_path, code, message, kind, hint
):
    stubbed.add_client_error("create_training_job", code, message)
    with pytest.raises(kind, match=re.escape(message)) as caught:
        sagemaker.submit(planned(), tmp_path)
    assert type(caught.value) is kind
    assert hint in caught.value.hint


@pytest.mark.parametrize("code", ["ResourceInUse", "InternalFailure"])
def test_an_existing_job_of_the_same_plan_is_accepted(stubbed, planned, tmp_path, code):
    plan = planned()
    stubbed.add_client_error("create_training_job", code, "broken")
    stubbed.add_response("describe_training_job", described(plan), {"TrainingJobName": "digits-1"})
    assert sagemaker.submit(plan, tmp_path).id == "digits-1"


@pytest.mark.parametrize(
    ("code", "message", "kind", "said"),
    [
        ("ValidationException", "job not found.", TryAgain, "broken"),
        ("ThrottlingException", "busy", Uncertain, "could not be asked whether it exists"),
    ],
)
def test_after_a_failed_answer_the_job_is_looked_up(
    stubbed, planned, tmp_path, code, message, kind, said
):
    stubbed.add_client_error("create_training_job", "InternalFailure", "broken")
    stubbed.add_client_error("describe_training_job", code, message)
    with pytest.raises(kind, match=said):
        sagemaker.submit(planned(), tmp_path)


DIFFERENCES = {
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
@pytest.mark.parametrize(("field", "changes"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_a_different_job_of_the_same_name_is_refused(
    stubbed, planned, tmp_path, code, field, changes
):
    plan = planned()
    stubbed.add_client_error("create_training_job", code, "already exists")
    stubbed.add_response("describe_training_job", described(plan, **changes))
    with pytest.raises(SubmitRefused, match="a different training job digits-1") as caught:
        sagemaker.submit(plan, tmp_path)
    assert field in str(caught.value)
    assert "choose another --run" in caught.value.hint


def test_upload_works_without_permission_to_list(stub_client, planned):
    s3 = stub_client("s3")
    s3.add_client_error("head_object", "403", "Forbidden", 403)
    s3.add_response("put_object", {})
    uploads.upload(planned())


@pytest.mark.parametrize(
    ("status", "put", "kind", "hint"),
    [
        ("404", "AccessDenied", NotPermitted, "PutObject"),
        ("301", None, SubmitRefused, "another region"),
    ],
)
def test_a_refused_upload_has_a_hint(stub_client, planned, status, put, kind, hint):
    s3 = stub_client("s3")
    s3.add_client_error("head_object", status, "no", int(status))
    if put:
        s3.add_client_error("put_object", put, "no", 403)
    with pytest.raises(kind) as caught:
        uploads.upload(planned())
    assert hint in caught.value.hint


def described(plan, **more):
    """The response of DescribeTrainingJob for this plan, or for one that differs."""
    arn = "arn:aws:sagemaker:us-east-1:123456789012:training-job/digits-1"
    request = json.loads(plan.text)
    fields = ("RoleArn", "HyperParameters", "AlgorithmSpecification", "OutputDataConfig")
    response = {
        **{name: request[name] for name in fields},
        "TrainingJobName": "digits-1",
        "TrainingJobArn": arn,
        "ModelArtifacts": {"S3ModelArtifacts": "s3://b/m"},
        "TrainingJobStatus": "InProgress",
        "SecondaryStatus": "Training",
        "ResourceConfig": {"VolumeSizeInGB": 1},
        "StoppingCondition": {},
        "CreationTime": 0,
    }
    return response | more
