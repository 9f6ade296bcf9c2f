"""`deploykit register`: versions of a model package group, with metrics, approval and lineage."""

from __future__ import annotations

import json

import boto3
import pytest

from deploykit.backends.sagemaker import service_model
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.run import registry
from deploykit.run.registry import Run
from tests.aws_server import SECTION
from tests.backends.sagemaker.test_sagemaker_hosting import Killer, changes
from tests.model_package import package

pytestmark = pytest.mark.aws
JOB = "arn:aws:sagemaker:us-east-1:123456789012:training-job/exp-1"
WORDS = ("register", "model", "-b", "sagemaker")


@pytest.fixture
def home(project, tmp_path, monkeypatch):
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "home"))
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION + "  deploy: {instance_type: ml.m5.xlarge}\n")
    package(project / "model", "exp-1")
    folder = tmp_path / "exp-1"
    (folder / "output").mkdir(parents=True)
    lines = [{"step": 1, "loss": 0.5}, {"step": 9, "test_accuracy": 0.97, "test_loss": 0.1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "output/metrics.jsonl").write_text(text)
    job = {"name": "vision", "data": {"train": {"path": "s3://my-bucket/train"}}}
    (folder / "job.json").write_text(json.dumps(job))
    return folder


@pytest.fixture
def register(aws, home, capsys):
    """A function that runs the verb; its JSON."""

    def run(*words, code=0):
        capsys.readouterr()
        assert cli.main([*map(str, words), "--json"]) == code, "".join(capsys.readouterr())
        return json.loads(capsys.readouterr().out)

    return run


def trained(folder, engine="local", target="here"):
    """A run in the registry, whose folder this is."""
    row = Run("exp-1", "vision", engine, target, str(folder), "", "", None, 1.0, "")
    registry.add(row)
    registry.confirm("exp-1", "exp-1", Status(State.SUCCEEDED))


def client():
    return boto3.client("sagemaker", "us-east-1")


def versions(name="vision"):
    found = client().list_model_packages(ModelPackageGroupName=name)
    return found["ModelPackageSummaryList"]


def test_a_dry_run_is_exact_and_asks_nothing(aws, home, register):
    trained(home)
    (shown,) = register(*WORDS, "--dry-run")["registries"]
    assert aws.requests == []
    assert shown["package"].startswith("s3://my-bucket/deploykit/models/")
    for one in shown["requests"]:
        known = service_model.shapes(one["service"])
        ends = ("Input", "Request")
        shape = next(
            f"{one['operation']}{end}" for end in ends if f"{one['operation']}{end}" in known
        )
        assert list(service_model.type_errors(shape, one["request"], one["service"])) == []
        assert list(service_model.violations(shape, one["request"], one["service"])) == []
    register(*WORDS)
    created = {one.action: one.body for one in aws.requests if one.action.startswith("CreateModel")}
    for one in shown["requests"][1:]:
        assert json.loads(created[one["operation"]]) | {"ClientToken": None} == (
            one["request"] | {"ClientToken": None}
        )
    put = shown["requests"][0]["request"]
    body = boto3.client("s3").get_object(Bucket="my-bucket", Key=put["Key"])["Body"].read()
    assert body.decode() == put["Body"]


def test_a_version_has_metrics_approval_and_lineage(home, register):
    trained(home)
    (made,) = register(*WORDS)["versions"]
    assert (made["name"], made["version"], made["approval"]) == ("vision", "1", "pending")
    known = client().describe_model_package(ModelPackageName=made["address"])
    assert known["ModelApprovalStatus"] == "PendingManualApproval"
    (container,) = known["InferenceSpecification"]["Containers"]
    assert container["Image"].endswith("pytorch-inference:2.6.0-cpu-py312")
    assert (container["Framework"], container["FrameworkVersion"]) == ("PYTORCH", "2.6.0")
    assert known["InferenceSpecification"]["SupportedRealtimeInferenceInstanceTypes"] == [
        "ml.m5.xlarge"
    ]
    bucket, _, key = container["ModelDataUrl"].removeprefix("s3://").partition("/")
    boto3.client("s3").head_object(Bucket=bucket, Key=key)
    source = known["MetadataProperties"]
    assert source["CommitId"] == "0123456789abcdef0123456789abcdef01234567"
    assert source["GeneratedBy"] == "local://here/exp-1"
    facts = known["CustomerMetadataProperties"]
    assert facts["run"] == "exp-1"
    assert facts["data.train"] == "s3://my-bucket/train"
    assert facts["metric.test_accuracy"] == "0.97"
    assert "metric.loss" not in facts  # those of the evaluation
    uri = known["ModelMetrics"]["ModelQuality"]["Statistics"]["S3Uri"]
    bucket, _, key = uri.removeprefix("s3://").partition("/")
    statistics = json.loads(boto3.client("s3").get_object(Bucket=bucket, Key=key)["Body"].read())
    group = statistics["multiclass_classification_metrics"]
    assert group["test_accuracy"] == {"value": 0.97, "standard_deviation": "NaN"}


def test_the_metrics_include_the_newest_evaluation_of_the_checkpoint(home, register):
    (home / "output/metrics.jsonl").write_text('{"loss": 0.5}\n')  # without a step
    trained(home)
    checkpoints = {"older": "step-00000034", "newer": "step-00000034", "newest": "step-00000012"}
    for age, (name, checkpoint) in enumerate(checkpoints.items()):
        folder = home.parent / name
        (folder / "output").mkdir(parents=True)
        result = {"accuracy": 0.5 + age / 10, "worst": []}
        (folder / "output/evaluation.json").write_text(json.dumps(result))
        record = {"run": "exp-1", "checkpoint": checkpoint}
        (folder / "evaluation_of.json").write_text(json.dumps(record))
        with (home / "evaluations.jsonl").open("a") as file:
            file.write(json.dumps(name) + "\n")
        registry.add(Run(name, name, "local", "here", str(folder), "", "", None, 2.0 + age, ""))
        registry.confirm(name, name, Status(State.SUCCEEDED))
    (shown,) = register(*WORDS, "--dry-run")["registries"]
    sent = json.loads(shown["requests"][0]["request"]["Body"])
    (metrics,) = [group for group in sent.values() if isinstance(group, dict)]
    assert {name: each["value"] for name, each in metrics.items()} == {
        "loss": 0.5,
        "evaluation accuracy": 0.6,
    }


def test_the_same_package_is_one_version_and_another_the_next(aws, home, register, project):
    trained(home)
    package(project / "other", "exp-1", b"other weights")
    assert register(*WORDS)["versions"][0]["version"] == "1"
    assert register("register", "other", *WORDS[2:])["versions"][0]["version"] == "2"
    (again,) = register(*WORDS, "--approval", "approved")["versions"]
    assert (again["version"], again["approval"], again["is_new"]) == ("1", "approved", False)
    (again,) = register(*WORDS)["versions"]
    assert (again["version"], again["approval"]) == ("1", "approved")
    assert len(versions()) == 2
    puts = [one.path for one in aws.requests if one.method == "PUT" and "model.tar.gz" in one.path]
    assert len(puts) == 2


def test_the_training_job_is_named_by_its_arn(aws, home, register):
    (home / "training-job.json").write_text(json.dumps({"TrainingJobArn": JOB}))
    trained(home, "sagemaker", "us-east-1")
    (shown,) = register("register", "model", "--dry-run")["registries"]  # the run's own backend
    create = shown["requests"][-1]["request"]
    assert create["MetadataProperties"]["GeneratedBy"] == JOB
    (home / "training-job.json").unlink()  # attached
    (shown,) = register("register", "model", "--dry-run")["registries"]
    assert shown["requests"][-1]["request"]["MetadataProperties"]["GeneratedBy"] == JOB


def test_a_package_of_an_unknown_run_needs_a_name(register):
    error = register(*WORDS, code=66)["error"]
    assert "this machine has no record of exp-1, the run of this package" in error["message"]
    (made,) = register(*WORDS, "--name", "theirs")["versions"]
    assert (made["name"], made["version"]) == ("theirs", "1")
    known = client().describe_model_package(ModelPackageName=made["address"])
    assert known["MetadataProperties"]["GeneratedBy"] == "run exp-1"
    assert "ModelMetrics" not in known


def test_what_cannot_be_registered_is_a_sentence(aws, home, register, project):
    trained(home)
    error = register("register", "model", code=64)["error"]
    assert "no registry found for the model of exp-1" in error["message"]
    assert "--backend sagemaker" in error["hint"]
    assert register(*WORDS, "--name", "a b", code=64)["error"]["message"] == "invalid name 'a b'"
    assert register("register", "nothing", code=66)["error"]["message"].startswith("no run matches")
    assert "offer" in register("register", "model", "-b", "slurm", code=64)["error"]["message"]
    package(project / "new", "exp-1", versions={"torch": "2.9.0"})
    error = register("register", "new", *WORDS[2:], code=65)["error"]
    assert "AWS has no inference image with" in json.dumps(error)
    assert aws.requests == []


@changes
@pytest.mark.slow
def test_a_kill_at_any_request_makes_no_second_version(aws, home, register, project, reads):
    trained(home)
    number, code = 0, -9
    while code:
        words = (*WORDS, "--name", f"vision-{number}")
        code = Killer(aws, project, number, *words, reads=reads).code
        assert code in {0, -9}
        assert register(*words)["versions"][0]["version"] == "1"
        assert len(versions(f"vision-{number}")) == 1
        number += 1
    assert number >= (5 if reads else 3)
