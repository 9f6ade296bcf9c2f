"""What each setting of a job file changes in the request, and that it changes nothing else.

`UPDATE_GOLDEN=1 pytest tests/backends/sagemaker/test_sagemaker_request_settings.py` rewrites
golden/requests.json: the request of a job without settings, and for each setting the values that
differ from it, by their path; null for what is gone. `test_sagemaker_sdk.py` compares requests with
those of the SDK, which takes minutes.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import Channel, InstanceGroup, ModelParallel
from tests.backends.sagemaker.sagemaker_jobs import vary

GOLDEN = Path(__file__).with_name("golden") / "requests.json"
HASH = "0123456789abcdef" * 4
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
RUNS = "s3://my-bucket/deploykit/runs"
GROUPS = (InstanceGroup("gpu", "ml.g5.12xlarge", 2), InstanceGroup("data", "ml.c5.xlarge", 1))
TRAIN = {"train": "s3://b-b/train"}
SMP = {"distribution": "smdistributed.modelparallel"}
LUSTRE = {"file_system_id": "fs-1", "directory_path": "/fsx/a"}
EVERYTHING = Channel(
    s3_data_type="AugmentedManifestFile",
    s3_distribution="ShardedByS3Key",
    input_mode="Pipe",
    attribute_names=("source-ref", "label"),
    content_type="text/csv",
    compression="Gzip",
    record_wrapping="RecordIO",
    shuffle_seed=0,
    instance_groups=("gpu",),
)
SETTINGS = {
    "no launcher": {"distribution": "none"},
    "mpirun": {"distribution": "mpi", "mpi_options": "-x A=b"},
    "mpirun without options": {"distribution": "mpi"},
    "SMDDP": {"distribution": "smdistributed.dataparallel", "mpi_options": "--verbose"},
    "SMDDP by its old name": {"distribution": "pytorchddp"},
    "the model parallel library": {
        **SMP,
        "framework_version": "2.4.1",
        "model_parallel": ModelParallel(tensor_parallel_degree=2),
    },
    "the model parallel library without parameters": {**SMP, "image_uri": "a/b:c"},
    "groups of instances, of which one trains": {
        "distribution": "mpi",
        "instance_type": None,
        "instance_groups": GROUPS,
        "distribution_group": "gpu",
    },
    "groups of instances under torchrun": {"instance_type": None, "instance_groups": GROUPS[::-1]},
    "groups of instances without GPUs": {"instance_type": None, "instance_groups": GROUPS[1:]},
    "an image of one's own": {"image_uri": "a/b:c", "framework_version": None},
    "a Python version": {"framework_version": "2.2.0", "py_version": "py39"},
    "an image's entrypoint": {"image_entrypoint": ("bash", "start.sh")},
    "network isolation": {"network_isolation": True, "data": TRAIN},
    "data": {"data": TRAIN},
    "the trainer's metrics, one replaced": {
        "metrics": "deploykit",
        "metric_definitions": {"test:accuracy": "acc (.)", "f1": "f1 (.)"},
    },
    "a metric": {"metric_definitions": {"loss": "loss (.)"}},
    "spot": {"spot": True, "max_wait": 3600, "checkpoints": "s3://b-b/saved"},
    "a warm pool": {"keep_alive": 600},
    "a training plan": {"training_plan": "arn"},
    "an encrypted disk": {"volume_size": 1, "volume_kms_key": KEY},
    "encrypted results": {"output_kms_key": KEY},
    "results as files": {"output_compression": "none"},
    "results elsewhere": {"output": "s3://b-b/results"},
    "encrypted traffic": {"encrypt_inter_container_traffic": True},
    "a VPC": {"subnets": ("subnet-1",), "security_group_ids": ("sg-1", "sg-2")},
    "retries": {"retries": 3},
    "tags": {"tags": {"team": "a"}},
    "the profiler": {"profiler_interval": 500},
    "the debugger": {"debugger": True},
    "TensorBoard": {"tensorboard_output": "s3://b-b/board"},
    "a remote shell": {"remote_debug": True},
    "a channel with all settings": {"data": TRAIN, "channels": {"train": EVERYTHING}},
    "channels beside data": {
        "data": {**TRAIN, "test": "s3://b-b/test"},
        "channels": {"extra": Channel(s3="s3://b-b/extra"), "test": Channel(s3="s3://b-b/other")},
    },
    "a file system": {"channels": {"train": Channel(**LUSTRE)}},
    "a file system with a type": {
        "channels": {"train": Channel(**LUSTRE, content_type="text/csv")}
    },
}


def rendered(**changes):
    """The request, with the hyperparameters as the program reads them."""
    job, options = vary(**changes)
    request = rendering.render(job, options, run="digits-1", bundle=HASH)
    sent = request["HyperParameters"]
    return request | {"HyperParameters": {name: json.loads(text) for name, text in sent.items()}}


def differences(before, after):
    """The values that differ, by their path; None for what is gone."""
    different = {}
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            different |= {f"{name}.{path}": each for path, each in differences(old, new).items()}
        elif old != new:
            different[name] = new
    return different


@pytest.fixture(autouse=True)
def _no_region(monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def test_every_setting_changes_its_part_of_the_request():
    plain = rendered()
    assert list(plain["Environment"]) == sorted(plain["Environment"])
    requests = {name: differences(plain, rendered(**changes)) for name, changes in SETTINGS.items()}
    requests = {"no settings": plain, **requests}
    if os.environ.get("UPDATE_GOLDEN"):
        text = json.dumps(requests, indent=1, ensure_ascii=False)
        GOLDEN.write_text(f"{text}\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert list(requests) == list(golden)
    for name, request in requests.items():
        assert request == golden[name], name


def test_a_region_of_the_environment_selects_the_image(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    host = "763104351884.dkr.ecr.eu-west-1.amazonaws.com"
    assert differences(rendered(region="us-east-1"), rendered(region=None)) == {
        "AlgorithmSpecification.TrainingImage": f"{host}/pytorch-training:2.8.0-gpu-py312",
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
