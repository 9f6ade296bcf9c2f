"""Our request beside the one that the real SDK's estimator would send, for many jobs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from sagemaker_jobs import vary

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import images, request, sdk
from deploykit.backends.sagemaker.sending import differences

COUNT = 120
HASH = "0123456789abcdef" * 4
IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:2.10.0-gpu-py313"
CHOICES = {
    "nodes": [1, 2, 16],
    "processes_per_node": [1, 2, 8],
    "time_limit": [60, 3600, 5 * 86400],
    "instance_type": ["ml.g5.12xlarge", "ml.p4d.24xlarge", "ml.p5.48xlarge", "ml.m5.xlarge"],
    "framework_version": [None, *images.VERSIONS],
    "image_uri": [None, IMAGE],
    "distribution": ["torch_distributed", "pytorchddp", "smdistributed", "none"],
    "region": ["us-east-1", "eu-central-2", "cn-north-1", "us-gov-west-1"],
    "prefix": ["deploykit", "a/b.c"],
    "volume_size": [30, 500],
    "spot": [False, True],
    "max_wait": [None, 6 * 86400],
    "keep_alive": [None, 600],
    "subnets": [(), ("subnet-1", "subnet-2")],
    "security_group_ids": [(), ("sg-1",)],
    "encrypt_inter_container_traffic": [False, True],
    "tags": [{}, {"team": "vision ü", "cost center": "1+2"}],
    "retries": [0, 3, 30],
    "env": [{}, {"A": "b c", "NCCL_DEBUG": "INFO", "TOKEN": "secret:ssm:/t", "U": 'ü"\n\\'}],
    "data": [{}, {"train": "s3://data-1/train", "test": "s3://data-1/test set/"}],
    "output": [None, "s3://results-1", "s3://results-1/a/"],
    "checkpoints": [None, "s3://results-1/checkpoints"],
    "args": [(), ("--epochs", "5"), ("a b", "$(x)", '"', "ü\n", "--flag"), ("x" * 9000,)],
}


def valid_jobs():
    """Pseudo-random jobs that `check` lets through, every choice taken about equally often."""
    chance = random.Random(5)
    while True:
        job, options = vary(**{name: chance.choice(values) for name, values in CHOICES.items()})
        if not any(problem.severity == "error" for problem in sagemaker.check(job, options)):
            yield job, options


@pytest.fixture(scope="module")
def jobs():
    stream = valid_jobs()
    alone = {"nodes": 1, "processes_per_node": 1, "distribution": "none"}
    return [vary(framework_version="2.4.0", **alone), *(next(stream) for _ in range(COUNT - 1))]


@pytest.fixture(scope="module")
def every_image():
    types = ("ml.g5.12xlarge", "ml.p4d.24xlarge", "ml.m5.xlarge")
    versions = images.VERSIONS.items()
    regions = [*images._USUAL_REGIONS, *images._ACCOUNTS]
    everywhere = [(region, "2.8.0", "py312", types[0]) for region in regions]
    return everywhere + [("us-east-1", *pair, kind) for pair in versions for kind in types]


@pytest.fixture(scope="module")
def answers(jobs, every_image, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sdk")
    asked = [sdk.arguments(*pair, run=f"digits-{n}", bundle=HASH) for n, pair in enumerate(jobs)]
    question, answer = folder / "questions.json", folder / "answers.json"
    question.write_text(json.dumps({"jobs": asked, "images": every_image}))
    script = Path(__file__).with_name("ask_sdk.py")
    subprocess.run(
        [sys.executable, "-P", script, sdk.__file__, question, answer],
        env=sdk.surroundings(folder),
        cwd=folder,
        check=True,
        capture_output=True,
    )
    return json.loads(answer.read_text())


def test_the_sdk_is_installed():
    assert sdk.available()


def test_requests_are_equal(jobs, answers):
    different = {}
    for number, (pair, theirs) in enumerate(zip(jobs, answers["requests"], strict=True)):
        ours = request.render(*pair, run=f"digits-{number}", bundle=HASH)
        if ours != theirs:
            different[number] = list(differences(ours, theirs))
    assert different == {}


def test_every_choice_was_taken(jobs):
    for name, values in CHOICES.items():
        if name == "args":
            taken = {job.entrypoint.args for job, _ in jobs}
        elif hasattr(jobs[0][1], name):
            taken = [getattr(options, name) for _, options in jobs]
        else:
            taken = [getattr(job, name, getattr(job.resources, name, None)) for job, _ in jobs]
        missing = [value for value in values if value not in taken]
        assert missing == [], name


def test_images_are_the_sdks(every_image, answers):
    assert [images.uri(*one) for one in every_image] == answers["images"]
