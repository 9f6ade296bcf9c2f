"""`deploykit.sagemaker.model_trainer`: version 3 of the SDK sends the request of the dry run.

The SDK is in an environment of its own: version 2, which `.venv` has, excludes version 3.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest
import yaml

from deploykit import sagemaker
from deploykit.backends import sagemaker as backend
from deploykit.backends.sagemaker import estimator, model_trainer
from deploykit.backends.sagemaker.deployment import plan_deployment
from deploykit.backends.sagemaker.options import (
    Channel,
    InstanceGroup,
    InstancePreference,
    ModelParallel,
)
from deploykit.bundle import archive
from deploykit.job.model import Entrypoint
from deploykit.lib.errors import BackendUnavailable, JobFileError
from tests.aws_server import as_json, recorder, sent_requests
from tests.backends.sagemaker import test_sagemaker_deployment as deployment
from tests.backends.sagemaker.launcher.sagemaker_hosts import run_on_hosts
from tests.backends.sagemaker.launcher.sagemaker_namespaces import GATEWAY, namespaces
from tests.backends.sagemaker.launcher.test_sagemaker_launcher import ARGUMENTS, PROGRAM
from tests.backends.sagemaker.sagemaker_jobs import vary
from tests.backends.sagemaker.sdk_requests import environment
from tests.backends.sagemaker.test_sagemaker_deployment import PACKAGE
from tests.programs import needs

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv-sagemaker3/bin/python"
pytestmark = [
    pytest.mark.aws,
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs make .venv-sagemaker3/.ready"),
]

KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
VPC = {"subnets": ("subnet-1", "subnet-2"), "security_group_ids": ("sg-1",)}
OWN = {"image_uri": "public.ecr.aws/somebody/image:1", "framework_version": None}
JOBS = [
    {},
    {"args": ("a b", "$(x)", '"', "ü\n", "--flag", "x" * 9000)},
    {"env": {"A": "b c", "NCCL_DEBUG": "INFO", "U": 'ü"\n\\'}, "retries": 3},
    {"data": {"train": "s3://data-1/train", "test": "s3://data-1/test set/"}},
    {"network_isolation": True, "data": {"train": "s3://data-1/train"}},
    {"checkpoints": "s3://results-1/c", "spot": True, "max_wait": 6 * 86400, **VPC},
    {"output": "s3://results-1/a/", "output_kms_key": KEY, "output_compression": "none"},
    {"volume_size": 500, "keep_alive": 600, "encrypt_inter_container_traffic": True, **OWN},
    {"tags": {"team": "vision ü"}, "metrics": "deploykit", "remote_debug": True},
    {"tensorboard_output": "s3://results-1/board", "debugger": True, "profiler_interval": 100},
    {"training_plan": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"},
    {"entrypoint": Entrypoint(module="package.train", launcher="python"), **OWN},
    {"nodes": 1, "processes_per_node": 1, "distribution": "none"},
    {
        "distribution": "smdistributed.modelparallel",
        "instance_type": "ml.p4d.24xlarge",
        "framework_version": "2.4.1",
        "model_parallel": ModelParallel(hybrid_shard_degree=8, sm_activation_offloading=True),
    },
    {
        "channels": {
            "train": Channel(
                s3="s3://data-1/list.json",
                s3_data_type="AugmentedManifestFile",
                attribute_names=("source-ref", "label"),
                input_mode="Pipe",
                shuffle_seed=7,
            ),
            "fast": Channel(s3="s3://data-1/x", input_mode="FastFile", content_type="text/csv"),
            "fsx": Channel(file_system_id="fs-0123456789abcdef0", directory_path="/fsx/train"),
        },
        **VPC,
    },
    {
        "instance_type": None,
        "instance_preferences": (
            InstancePreference("ml.g5.12xlarge"),
            InstancePreference("ml.g5.24xlarge"),
        ),
        "max_pending": 7200,
        "infra_check": True,
    },
]
"""Jobs that use every field of the request which version 3 has."""
SEND = textwrap.dedent(
    """\
    import json, pickle, sys
    from deploykit.backends.sagemaker import model_trainer
    from tests.backends.sagemaker import sdk_requests

    sdk_requests.share_clients()
    sdk_requests.share_descriptions()
    plans = pickle.load(open(sys.argv[1], "rb"))
    session = model_trainer.session(plans[0])
    for plan in plans:
        trainer = model_trainer.model_trainer(plan, json.loads(plan.text), session, lambda: None)
        trainer.train(wait=False)
    """
)


DENIED = b"<ErrorResponse><Error><Code>AccessDenied</Code></Error></ErrorResponse>"


@pytest.fixture(autouse=True)
def _may_not_simulate(aws):
    """moto cannot simulate IAM's policies: the SDK goes on without."""

    def respond(request, forward):
        return (403, [], DENIED) if b"SimulatePrincipalPolicy" in request.body else forward()

    aws.respond = respond


def python(text, folder, *arguments):
    """Run a program in the environment of version 3, without settings of the user."""
    aws = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    own = {"SAGEMAKER_VALIDATE_ROLE": "false", "DEPLOYKIT_HOME": os.environ["DEPLOYKIT_HOME"]}
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", text, *arguments],
        env={**environment(folder), **aws, **own},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def common(planned, sent):
    """The two requests without what `model_trainer` says is different."""
    planned, sent = json.loads(json.dumps(planned)), json.loads(json.dumps(sent))
    algorithm = sent["AlgorithmSpecification"]
    assert algorithm.pop("ContainerEntrypoint") == ["/bin/bash"]
    assert algorithm.pop("ContainerArguments")[1].endswith("/sm_drivers/sm_train.sh")
    planned["AlgorithmSpecification"].pop("EnableSageMakerMetricsTimeSeries", None)
    planned["OutputDataConfig"].setdefault("CompressionType", "GZIP")
    for name in {"ProfilerConfig", "DebugHookConfig"} & planned.keys():  # it omits what is empty
        planned[name] = {key: value for key, value in planned[name].items() if value}
    code, drivers = sent["InputDataConfig"][-2:]
    assert code["ChannelName"] == "code"
    source = code["DataSource"]["S3DataSource"]["S3Uri"]
    hyperparameters = planned["HyperParameters"]
    if not hyperparameters["sagemaker_submit_directory"].startswith('"/opt/ml'):
        assert json.loads(hyperparameters["sagemaker_submit_directory"]) == source
    assert drivers["ChannelName"] == "sm_drivers"
    channels = planned.get("InputDataConfig", [])
    planned["InputDataConfig"] = [one for one in channels if one["ChannelName"] != "code"]
    del sent["InputDataConfig"][-2:]
    return planned, sent


def test_requests_are_equal(aws, tmp_path):
    bundle = archive.Bundle(tmp_path, (), "0123456789abcdef" * 4)
    plans = [
        backend.plan(*vary(**changes), run=f"digits-{number}", bundle=bundle)
        for number, changes in enumerate(JOBS)
    ]
    (tmp_path / "plans").write_bytes(pickle.dumps(plans))
    python(SEND, tmp_path, tmp_path / "plans")
    sent = sent_requests(aws)
    assert len(sent) == len(JOBS)
    different = {}
    for changes, plan, from_sdk in zip(JOBS, plans, sent, strict=True):
        found = list(estimator.differences(*common(json.loads(plan.text), from_sdk)))
        if found:
            different[str(changes)] = found
    assert different == {}
    fields = {name for request in sent for name in request}
    assert {"VpcConfig", "CheckpointConfig", "RetryStrategy", "Tags", "DebugHookConfig"} <= fields


CELL = textwrap.dedent(
    """\
    import sys
    from deploykit.sagemaker import model_trainer

    assert "sagemaker" not in sys.modules
    trainer = model_trainer("job.yaml", ["env.CHOSEN=1"], run="one")
    from sagemaker.train import ModelTrainer

    assert isinstance(trainer, ModelTrainer)
    trainer.train(wait=False)
    """
)
PIPELINE = textwrap.dedent(
    """\
    import json
    import boto3
    from deploykit.sagemaker import model_trainer
    from sagemaker.core.workflow.pipeline_context import PipelineSession

    session = PipelineSession(boto3.Session(region_name="us-east-1"), default_bucket="my-bucket")
    trainer = model_trainer("job.yaml", run="one", sagemaker_session=session)
    step = trainer.train()
    step.func(*step.func_args, **step.func_kwargs)  # as a TrainingStep does
    print(json.dumps(session.context.args))
    """
)


@pytest.fixture
def notebook(project):
    """The folder of a SageMaker job with data, whose ranks record what they are given."""
    job = yaml.safe_load((project / "job.yaml").read_text())
    job |= {"checkpoints": "s3://my-bucket/c", "env": {"NCCL_PROTO": "LL"}}
    job["entrypoint"]["args"] = list(ARGUMENTS)
    job["resources"] |= {"nodes": 2, "processes_per_node": 2}
    job["sagemaker"] = {
        "role": "arn:aws:iam::123456789012:role/training",
        "bucket": "my-bucket",
        "region": "us-east-1",
        "instance_type": "ml.g5.12xlarge",
        "image_uri": "public.ecr.aws/somebody/image:1",
    }
    (project / "job.yaml").write_text(yaml.safe_dump(job))
    (project / "train.py").write_text(PROGRAM)
    return project


def dry_run(*changes):
    command = [sys.executable, "-m", "deploykit", "submit", "--backend", "sagemaker", "--dry-run"]
    planned = subprocess.run(
        [*command, "--run", "one", *changes],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    return json.loads(planned.stdout)


@pytest.mark.torch
@pytest.mark.xdist_group("port-7777")
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@needs("ip", "sshd", "unshare")
def test_the_launcher_of_the_sdk_starts_our_ranks(aws, moto, notebook, tmp_path):
    """From the notebook's cell to four ranks on two hosts, below the SDK's own sm_train.sh."""
    python(CELL, tmp_path)
    (request,) = sent_requests(aws)
    planned, sent = common(dry_run("--set", "env.CHOSEN=1"), request)
    assert sent == planned
    with namespaces(tmp_path / "hosts", 2) as hosts, recorder(moto, GATEWAY) as server:
        outputs = run_on_hosts(request, server.endpoint, hosts)
    for rank in range(4):
        given = json.loads((outputs[rank // 2] / f"rank-{rank}.json").read_text())
        assert tuple(given["argv"]) == ARGUMENTS
        assert given["total"] == 10
        expected = {"CHOSEN": "1", "NCCL_PROTO": "LL", "NCCL_SOCKET_IFNAME": "=eth0"}
        assert {name: given["env"].get(name) for name in expected} == expected
        assert given["env"]["DEPLOYKIT_RUN"] == "one"


def test_a_step_of_a_pipeline_has_the_request(aws, notebook, tmp_path):
    step = json.loads(python(PIPELINE, tmp_path).splitlines()[-1])
    planned = dry_run()
    del planned["TrainingJobName"]  # the pipeline names it
    planned, sent = common(planned, step)
    assert sent == planned
    assert sent_requests(aws) == []


def test_what_version_3_cannot_express_is_refused_at_once():
    groups = (InstanceGroup("gpu", "ml.p4d.24xlarge", 2),)
    job, options = vary(
        distribution="mpi",
        instance_groups=groups,
        image_entrypoint=("env",),
        request={"ExperimentConfig": {"ExperimentName": "one"}},
        data={"code": "s3://data-1/code"},
    )
    with pytest.raises(JobFileError) as caught:
        model_trainer.check(job, options)
    paths = [problem.path for problem in caught.value.problems]
    distribution, *others = paths
    assert distribution == "sagemaker.distribution"
    assert others == ["sagemaker.image_entrypoint", "sagemaker.request", "data.code"]


def test_a_missing_sdk_is_reported(monkeypatch):
    def version(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", version)
    with pytest.raises(BackendUnavailable, match="SageMaker SDK 3") as caught:
        sagemaker.model_trainer()
    assert "into a separate environment" in caught.value.hint


DEPLOYED = ("real-time", "own VPC, keys and tags", "autoscaling", "serverless", "asynchronous")
DEPLOYED += ("batch",)
"""Configurations that `ModelBuilder` can express; of the eight it lacks two, a canary and a shadow:
its endpoints have one variant."""
EMPTY = ({}, [], None)
ARNS = {
    "CreateEndpointConfig": {
        "EndpointConfigArn": "arn:aws:sagemaker:us-east-1:1:endpoint-config/a"
    },
    "CreateEndpoint": {"EndpointArn": "arn:aws:sagemaker:us-east-1:1:endpoint/a"},
    "DescribeEndpoint": {
        "EndpointName": "a",
        "EndpointArn": "arn:aws:sagemaker:us-east-1:1:endpoint/a",
        "EndpointConfigName": "a",
        "EndpointStatus": "Creating",
        "CreationTime": 1.0,
        "LastModifiedTime": 1.0,
    },
}
"""Answers to the requests whose newer instance types moto refuses."""


@pytest.mark.skipif(
    not list(PYTHON.parents[1].glob("lib/python3*/site-packages/sagemaker/serve")),
    reason="needs make .venv-sagemaker3/.ready",
)
def test_a_model_builder_sends_what_deploy_sends(aws, tmp_path, monkeypatch):
    """`ModelBuilder` with the same settings sends the same requests, with these differences:

    | request | `ModelBuilder` | `deploykit deploy` |
    |---|---|---|
    | CreateEndpointConfig | has the name of the endpoint | a name with a hash of its content |
    | CreateEndpointConfig, CreateEndpoint | tag with the address of the model | tags of the job |
    | CreateEndpoint | | tag `deploykit:run` |
    | autoscaling | none | RegisterScalableTarget, PutScalingPolicy |
    """
    plans = [
        plan_deployment(
            deployment.options(*deployment.CONFIGURATIONS[name]), PACKAGE, name=f"m-{n}"
        )
        for n, name in enumerate(DEPLOYED)
    ]

    def respond(one, forward):
        if one.action in ARNS:
            return as_json(200, ARNS[one.action])
        status, headers, content = forward()
        if one.action == "DescribeModel":  # moto's has an empty VPC
            known = json.loads(content).items()
            return as_json(status, {key: value for key, value in known if value not in EMPTY})
        return status, headers, content

    aws.respond = respond
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")  # which importing it requires
    (tmp_path / "plans").write_bytes(pickle.dumps(plans))
    sdk = "import sys; from tests.backends.sagemaker import sdk3_deployments as sdk"
    python(f"{sdk}; sdk.main(sys.argv[1])", tmp_path, tmp_path / "plans")
    requests = [one for one in aws.requests if (one.action or "").startswith("Create")]
    sent = [(one.action, json.loads(one.body)) for one in requests]
    planned = [
        (each.operation, json.loads(json.dumps(each.parameters)))
        for plan in plans
        for each in plan.requests
        if each.operation.startswith("Create")
    ]
    assert [name for name, _ in sent] == [name for name, _ in planned]
    for (name, by_sdk), (_, own) in zip(sent, planned, strict=True):
        if "EndpointConfigName" in by_sdk:
            config = own.pop("EndpointConfigName")
            assert config.startswith(f"{by_sdk.pop('EndpointConfigName')}-")
            marks = [tags_of(by_sdk) - tags_of(own), tags_of(own) - tags_of(by_sdk)]
            by_deploykit = {("deploykit:run", "exp-1")} if name == "CreateEndpoint" else set()
            archive = next(plan.archive for plan in plans)
            assert marks == [{("sagemaker.amazonaws.com/model-source", archive)}, by_deploykit]
            del by_sdk["Tags"], own["Tags"]
        assert list(estimator.differences(own, by_sdk)) == [], name


def tags_of(request):
    return {(tag["Key"], tag["Value"]) for tag in request.setdefault("Tags", [])}
