"""What each setting of a job file changes in the request, and that it changes nothing else.

`test_sagemaker_estimator_args.py` compares requests with those of the SDK, which takes minutes.
"""

from __future__ import annotations

import json

import pytest

from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import METRICS, InstanceGroup, ModelParallel
from tests.backends.sagemaker.sagemaker_jobs import vary

HASH = "0123456789abcdef" * 4
SOURCE = f"s3://my-bucket/deploykit/bundles/{HASH}/sourcedir.tar.gz"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
RUNS = "s3://my-bucket/deploykit/runs"
SMDDP = "sagemaker_distributed_dataparallel_enabled"
SMDDP_OPTIONS = "sagemaker_distributed_dataparallel_custom_mpi_options"
MPI_OPTIONS = "sagemaker_mpi_custom_mpi_options"
TORCHRUN = "sagemaker_torch_distributed_enabled"
TYPE = "sagemaker_instance_type"
ARGV = (
    '["torchrun","--nnodes=2","--nproc-per-node=2","--max-restarts=0","--",'
    '"train.py","--epochs","5"]'
)
GROUPS = (InstanceGroup("gpu", "ml.g5.12xlarge", 2), InstanceGroup("data", "ml.c5.xlarge", 1))
GROUPS_SENT = [
    {"InstanceGroupName": "gpu", "InstanceType": "ml.g5.12xlarge", "InstanceCount": 2},
    {"InstanceGroupName": "data", "InstanceType": "ml.c5.xlarge", "InstanceCount": 1},
]


def image(name):
    return f"763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:{name}"


def rendered(**changes):
    """The request, with the hyperparameters as the program reads them."""
    job, options = vary(**changes)
    request = rendering.render(job, options, run="digits-1", bundle=HASH)
    sent = request["HyperParameters"]
    return request | {"HyperParameters": {name: json.loads(text) for name, text in sent.items()}}


def differences(before, after):
    """The values that differ, by their path; None for what is gone."""
    found = {}
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            found |= {f"{name}.{path}": each for path, each in differences(old, new).items()}
        elif old != new:
            found[name] = new
    return found


@pytest.fixture(autouse=True)
def _no_region(monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def test_the_request_of_a_job_without_settings():
    request = rendered()
    variables = request.pop("Environment")
    assert variables["DEPLOYKIT_BUNDLE"] == HASH
    assert list(variables) == sorted(variables)
    assert request == {
        "TrainingJobName": "digits-1",
        "RoleArn": "arn:aws:iam::123456789012:role/training",
        "AlgorithmSpecification": {
            "TrainingInputMode": "File",
            "TrainingImage": image("2.8.0-gpu-py312"),
            "EnableSageMakerMetricsTimeSeries": True,
        },
        "ResourceConfig": {
            "VolumeSizeInGB": 30,
            "InstanceCount": 2,
            "InstanceType": "ml.g5.12xlarge",
        },
        "StoppingCondition": {"MaxRuntimeInSeconds": 1800},
        "HyperParameters": {
            "deploykit_argv_0": ARGV,
            "sagemaker_mpi_num_of_processes_per_host": 2,
            "sagemaker_program": ".deploykit/launch.py",
            "sagemaker_submit_directory": SOURCE,
            "sagemaker_job_name": "digits-1",
            "sagemaker_region": "us-east-1",
            "sagemaker_container_log_level": 20,
            TORCHRUN: True,
            TYPE: "ml.g5.12xlarge",
        },
        "OutputDataConfig": {"S3OutputPath": RUNS},
        "ProfilerConfig": {"DisableProfiler": True},
    }


SETTINGS = {
    "no launcher": (
        {"distribution": "none"},
        {f"HyperParameters.{TORCHRUN}": None, f"HyperParameters.{TYPE}": None},
    ),
    "mpirun": (
        {"distribution": "mpi", "mpi_options": "-x A=b"},
        {
            f"HyperParameters.{TORCHRUN}": None,
            f"HyperParameters.{TYPE}": None,
            "HyperParameters.sagemaker_mpi_enabled": True,
            f"HyperParameters.{MPI_OPTIONS}": "-x A=b",
        },
    ),
    "mpirun without options": (
        {"distribution": "mpi"},
        {
            f"HyperParameters.{TORCHRUN}": None,
            f"HyperParameters.{TYPE}": None,
            "HyperParameters.sagemaker_mpi_enabled": True,
            f"HyperParameters.{MPI_OPTIONS}": "",
        },
    ),
    "SMDDP": (
        {"distribution": "smdistributed.dataparallel", "mpi_options": "--verbose"},
        {
            f"HyperParameters.{TORCHRUN}": None,
            f"HyperParameters.{SMDDP}": True,
            f"HyperParameters.{SMDDP_OPTIONS}": "--verbose",
        },
    ),
    "SMDDP by its old name": (
        {"distribution": "pytorchddp"},
        {
            f"HyperParameters.{TORCHRUN}": None,
            f"HyperParameters.{SMDDP}": True,
            f"HyperParameters.{SMDDP_OPTIONS}": "",
        },
    ),
    "the model parallel library": (
        {
            "distribution": "smdistributed.modelparallel",
            "framework_version": "2.4.1",
            "model_parallel": ModelParallel(tensor_parallel_degree=2),
        },
        {
            "AlgorithmSpecification.TrainingImage": (
                "658645717510.dkr.ecr.us-east-1.amazonaws.com/"
                "smdistributed-modelparallel:2.4.1-gpu-py311-cu121"
            ),
            "HyperParameters.mp_parameters": {"tensor_parallel_degree": 2},
            f"HyperParameters.{SMDDP}": False,
        },
    ),
    "the model parallel library without parameters": (
        {"distribution": "smdistributed.modelparallel", "image_uri": "a/b:c"},
        {
            "AlgorithmSpecification.TrainingImage": "a/b:c",
            "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries": None,
            f"HyperParameters.{SMDDP}": False,
        },
    ),
    "groups of instances, of which one trains": (
        {
            "distribution": "mpi",
            "instance_type": None,
            "instance_groups": GROUPS,
            "distribution_group": "gpu",
        },
        {
            f"HyperParameters.{TORCHRUN}": None,
            f"HyperParameters.{TYPE}": None,
            "HyperParameters.sagemaker_mpi_enabled": True,
            f"HyperParameters.{MPI_OPTIONS}": "",
            "HyperParameters.sagemaker_distribution_instance_groups": ["gpu"],
            "ResourceConfig.InstanceCount": None,
            "ResourceConfig.InstanceType": None,
            "ResourceConfig.InstanceGroups": GROUPS_SENT,
        },
    ),
    "groups of instances under torchrun": (
        {"instance_type": None, "instance_groups": GROUPS[::-1]},
        {
            f"HyperParameters.{TYPE}": None,
            "ResourceConfig.InstanceCount": None,
            "ResourceConfig.InstanceType": None,
            "ResourceConfig.InstanceGroups": GROUPS_SENT[::-1],
        },
    ),
    "groups of instances without GPUs": (
        {"instance_type": None, "instance_groups": GROUPS[1:]},
        {
            "AlgorithmSpecification.TrainingImage": image("2.8.0-cpu-py312"),
            f"HyperParameters.{TYPE}": None,
            "ResourceConfig.InstanceCount": None,
            "ResourceConfig.InstanceType": None,
            "ResourceConfig.InstanceGroups": GROUPS_SENT[1:],
        },
    ),
    "an image of one's own": (
        {"image_uri": "a/b:c", "framework_version": None},
        {
            "AlgorithmSpecification.TrainingImage": "a/b:c",
            "AlgorithmSpecification.EnableSageMakerMetricsTimeSeries": None,
        },
    ),
    "a Python version": (
        {"framework_version": "2.2.0", "py_version": "py39"},
        {"AlgorithmSpecification.TrainingImage": image("2.2.0-gpu-py39")},
    ),
    "an image's entrypoint": (
        {"image_entrypoint": ("bash", "start.sh")},
        {
            "AlgorithmSpecification.ContainerEntrypoint": ["sh", "-c", rendering._VERIFY, HASH],
            "AlgorithmSpecification.ContainerArguments": ["bash", "start.sh", "train"],
            "HyperParameters.sagemaker_submit_directory": (
                "/opt/ml/input/data/code/sourcedir.tar.gz"
            ),
            "InputDataConfig": [rendering._s3_channel("code", SOURCE)],
        },
    ),
    "network isolation": (
        {"network_isolation": True, "data": {"train": "s3://b-b/train"}},
        {
            "EnableNetworkIsolation": True,
            "Environment.DEPLOYKIT_DATA_TRAIN": "/opt/ml/input/data/train",
            "HyperParameters.sagemaker_submit_directory": (
                "/opt/ml/input/data/code/sourcedir.tar.gz"
            ),
            "InputDataConfig": [
                rendering._s3_channel("train", "s3://b-b/train"),
                rendering._s3_channel("code", SOURCE),
            ],
        },
    ),
    "data": (
        {"data": {"train": "s3://b-b/train"}},
        {
            "Environment.DEPLOYKIT_DATA_TRAIN": "/opt/ml/input/data/train",
            "InputDataConfig": [rendering._s3_channel("train", "s3://b-b/train")],
        },
    ),
    "the trainer's metrics, one replaced": (
        {
            "metrics": "deploykit",
            "metric_definitions": {"test:accuracy": "acc (.)", "f1": "f1 (.)"},
        },
        {
            "AlgorithmSpecification.MetricDefinitions": [
                *({"Name": name, "Regex": METRICS[name]} for name in list(METRICS)[:2]),
                {"Name": "test:accuracy", "Regex": "acc (.)"},
                {"Name": "f1", "Regex": "f1 (.)"},
            ]
        },
    ),
    "a metric": (
        {"metric_definitions": {"loss": "loss (.)"}},
        {"AlgorithmSpecification.MetricDefinitions": [{"Name": "loss", "Regex": "loss (.)"}]},
    ),
    "spot": (
        {"spot": True, "max_wait": 3600, "checkpoints": "s3://b-b/saved"},
        {
            "EnableManagedSpotTraining": True,
            "StoppingCondition.MaxWaitTimeInSeconds": 3600,
            "CheckpointConfig": {"S3Uri": "s3://b-b/saved", "LocalPath": "/opt/ml/checkpoints"},
        },
    ),
    "a warm pool": ({"keep_alive": 600}, {"ResourceConfig.KeepAlivePeriodInSeconds": 600}),
    "a training plan": ({"training_plan": "arn"}, {"ResourceConfig.TrainingPlanArn": "arn"}),
    "an encrypted disk": (
        {"volume_size": 1, "volume_kms_key": KEY},
        {"ResourceConfig.VolumeSizeInGB": 1, "ResourceConfig.VolumeKmsKeyId": KEY},
    ),
    "encrypted results": ({"output_kms_key": KEY}, {"OutputDataConfig.KmsKeyId": KEY}),
    "results as files": (
        {"output_compression": "none"},
        {"OutputDataConfig.CompressionType": "NONE"},
    ),
    "results elsewhere": (
        {"output": "s3://b-b/results"},
        {"OutputDataConfig.S3OutputPath": "s3://b-b/results"},
    ),
    "encrypted traffic": (
        {"encrypt_inter_container_traffic": True},
        {"EnableInterContainerTrafficEncryption": True},
    ),
    "a VPC": (
        {"subnets": ("subnet-1",), "security_group_ids": ("sg-1", "sg-2")},
        {"VpcConfig": {"Subnets": ["subnet-1"], "SecurityGroupIds": ["sg-1", "sg-2"]}},
    ),
    "retries": (
        {"retries": 3},
        {
            "HyperParameters.deploykit_argv_0": ARGV.replace("restarts=0", "restarts=3"),
            "RetryStrategy": {"MaximumRetryAttempts": 3},
        },
    ),
    "tags": ({"tags": {"team": "a"}}, {"Tags": [{"Key": "team", "Value": "a"}]}),
    "the profiler": (
        {"profiler_interval": 500},
        {
            "ProfilerConfig.DisableProfiler": False,
            "ProfilerConfig.S3OutputPath": RUNS,
            "ProfilerConfig.ProfilingIntervalInMilliseconds": 500,
        },
    ),
    "the debugger": (
        {"debugger": True},
        {"DebugHookConfig": {"S3OutputPath": RUNS, "CollectionConfigurations": []}},
    ),
    "TensorBoard": (
        {"tensorboard_output": "s3://b-b/board"},
        {
            "TensorBoardOutputConfig": {
                "S3OutputPath": "s3://b-b/board",
                "LocalPath": "/opt/ml/output/data/tensorboard",
            }
        },
    ),
    "a remote shell": (
        {"remote_debug": True},
        {"RemoteDebugConfig": {"EnableRemoteDebug": True}},
    ),
}


@pytest.mark.parametrize(("changes", "expected"), SETTINGS.values(), ids=SETTINGS)
def test_a_setting_changes_its_part_of_the_request(changes, expected):
    assert differences(rendered(), rendered(**changes)) == expected


def test_a_region_of_the_environment_selects_the_image(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    assert differences(rendered(), rendered(region=None)) == {
        "AlgorithmSpecification.TrainingImage": image("2.8.0-gpu-py312").replace(
            "us-east-1", "eu-west-1"
        ),
        "HyperParameters.sagemaker_region": "eu-west-1",
    }


@pytest.mark.parametrize(
    ("changes", "location"),
    [
        ({}, f"{RUNS}/digits-1/output/output.tar.gz"),
        ({"output": "s3://b-b/a/"}, "s3://b-b/a/digits-1/output/output.tar.gz"),
        ({"output_compression": "none"}, f"{RUNS}/digits-1/output/"),
    ],
)
def test_where_the_results_are(changes, location):
    assert rendering.results(rendered(**changes)) == location


@pytest.mark.parametrize(
    ("quotes", "sizes"),
    [(0, [2000, 400]), (498, [2000, 400]), (499, [1900, 500]), (1500, [1200, 1200])],
)
def test_a_chunk_is_within_the_services_limit_once_it_is_json(quotes, sizes):
    """2500 characters with the quotes around it; each quote in it takes two."""
    chunks = list(rendering._chunks('"' * quotes + "x" * (2400 - quotes)))
    assert [len(chunk) for chunk in chunks] == sizes
    assert max(len(json.dumps(chunk)) for chunk in chunks) <= 2500
