"""For many jobs: deploykit's request equals the one that the real SDK's estimator would send."""

from __future__ import annotations

import json
import random

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import (
    catalog,
    estimator,
    request,
)
from deploykit.backends.sagemaker import rules as oracle
from deploykit.backends.sagemaker.options import Channel, InstanceGroup, ModelParallel
from tests.backends.sagemaker.sagemaker_jobs import vary
from tests.backends.sagemaker.sdk_requests import sdk_requests
from tests.backends.sagemaker.test_sagemaker_request import SETTINGS

pytestmark = pytest.mark.slow

COUNT = 240
HASH = "0123456789abcdef" * 4
OWN = {"image_uri": "public.ecr.aws/somebody/image:1", "framework_version": None}
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
VPC = {"subnets": ("subnet-1", "subnet-2"), "security_group_ids": ("sg-1",)}
GROUPS = (InstanceGroup("gpu", "ml.p4d.24xlarge", 2), InstanceGroup("cpu", "ml.c5.4xlarge", 1))
CLUSTER = {"instance_type": None, "distribution_group": "gpu", "nodes": 2}
SMP = {"distribution": "smdistributed.modelparallel", "instance_type": "ml.p4d.24xlarge"}
EIGHT = {"nodes": 2, "processes_per_node": 8}
MANIFEST = {"s3": "s3://data-1/list.json", "shuffle_seed": 7}
LUSTRE = {"file_system_id": "fs-0123456789abcdef0", "directory_path": "/fsx/train"}


def versions(*numbers, **others):
    return [{"framework_version": number, **others} for number in numbers]


LAUNCHED = [
    *versions(*(v for v in catalog.VERSIONS if v not in catalog.NOT_TORCHRUN)),
    *[OWN | {"instance_type": kind} for kind in ("ml.m5.xlarge", "ml.p5en.48xlarge")],
    *versions(*catalog.SMDDP_VERSIONS, distribution="pytorchddp", instance_type="ml.p4d.24xlarge"),
    *versions(*catalog.SMDDP_VERSIONS, distribution="smdistributed.dataparallel"),
    OWN | {"distribution": "smdistributed.dataparallel", "mpi_options": "-x NCCL_ALGO=Ring"},
    *versions(*catalog.SMP_IMAGES, **SMP),
    *versions("2.0.1", "2.5.1", **SMP | {"instance_type": "ml.p5.48xlarge"}, py_version=None),
    *[
        SMP | EIGHT | {"framework_version": "2.4.1", "model_parallel": chosen}
        for chosen in (
            ModelParallel(hybrid_shard_degree=8, sm_activation_offloading=True),
            ModelParallel(0, 2, 4, 8, allow_empty_shards=False, random_seed=0),
            ModelParallel(activation_loading_horizon=3, fsdp_cache_flush_warnings=True),
        )
    ],
    *versions(*catalog.VERSIONS, distribution="mpi"),
    OWN | {"distribution": "mpi", "mpi_options": "--verbose -x A=b"},
    *versions("2.4.0", "2.8.0", distribution="none", nodes=1, processes_per_node=1),
    CLUSTER | {"instance_groups": GROUPS, "distribution": "mpi", "framework_version": "2.8.0"},
    CLUSTER
    | {
        "instance_groups": GROUPS[::-1],
        "distribution": "smdistributed.dataparallel",
        "framework_version": "2.2.0",
    },
    CLUSTER | {"instance_groups": GROUPS[:1], "framework_version": "2.8.0"},
]
"""What starts the ranks in which image; used in turn."""

CHOICES = [
    [{}, {"time_limit": 60}, {"time_limit": 5 * 86400}],
    [{}, {"nodes": 1}, {"nodes": 16}],
    [{}, {"processes_per_node": 1}, {"processes_per_node": 8}],
    [{}, {"region": "eu-west-1"}, {"region": "cn-north-1"}, {"region": "us-gov-west-1"}],
    [{}, {"region": "eu-central-2"}],
    [{}, {"prefix": "a/b.c"}],
    [{}, {"volume_size": 500}, {"volume_kms_key": KEY, "instance_type": "ml.p3.8xlarge"}],
    [
        {},
        {"spot": True, "max_wait": 6 * 86400},
        {"keep_alive": 600},
        {"training_plan": PLAN},
    ],
    [{}, VPC],
    [{}, {"encrypt_inter_container_traffic": True}],
    [{}, {"network_isolation": True}],
    [{}, {"image_entrypoint": ("bash", "-m", "start_with_right_hostname.sh")}],
    [{}, {"tags": {"team": "vision ü", "cost center": "1+2"}}],
    [{}, {"retries": 3}, {"retries": 30}],
    [
        {},
        {"env": {"A": "b c", "NCCL_DEBUG": "INFO", "U": 'ü"\n\\'}},
        {"env": {"TOKEN": "secret:ssm:/t"}},
    ],
    [
        {},
        {"data": {"train": "s3://data-1/train", "test": "s3://data-1/test set/"}},
        {"data": {"train": "/local"}, "channels": {"train": Channel(s3="s3://data-1/train")}},
        {"channels": {"train": Channel(**MANIFEST, s3_data_type="ManifestFile")}},
        {
            "channels": {
                "train": Channel(
                    **MANIFEST,
                    s3_data_type="AugmentedManifestFile",
                    attribute_names=("source-ref", "label"),
                    input_mode="Pipe",
                    record_wrapping="RecordIO",
                    compression="Gzip",
                )
            }
        },
        {
            "data": {"train": "s3://data-1/train"},
            "channels": {
                "train": Channel(input_mode="FastFile", s3_distribution="ShardedByS3Key"),
                "extra": Channel(s3="s3://data-1/extra", content_type="text/csv"),
            },
        },
        {"channels": {"train": Channel(**LUSTRE, content_type="text/csv")}, **VPC},
        {
            "channels": {
                "train": Channel(**LUSTRE, file_system_type="EFS", file_system_access="rw")
            },
            **VPC,
        },
    ],
    [{}, {"output": "s3://results-1"}, {"output": "s3://results-1/a/"}],
    [{}, {"output_kms_key": "alias/results"}, {"output_compression": "none"}],
    [{}, {"checkpoints": "s3://results-1/checkpoints"}, {"debugger": True}],
    [{}, {"metrics": "deploykit"}, {"metric_definitions": {"loss": r"loss=(\S+)"}}],
    [{}, {"tensorboard_output": "s3://results-1/board"}],
    [{}, {"remote_debug": True}],
    [{}, {"infra_check": True}],
    [{}, {"metrics_time_series": False}, {"metrics_time_series": True}],
    [{}, {"profiler_interval": 100}, {"profiler_interval": 60000}],
    [
        {},
        {"args": ("--epochs", "5")},
        {"args": ("a b", "$(x)", '"', "ü\n", "--flag")},
        {"args": ("x" * 9000,)},
    ],
]
"""Everything else. The first of each list is the default; every other one is used at least once."""


def random_changes(random_, base):
    """The changes of `base` with one choice of each list added, unless the job becomes invalid."""
    used, changes = [], dict(base)
    for choices in CHOICES:
        choice = random_.choice(choices)
        if is_valid(changes | choice):
            changes |= choice
            used.append(json.dumps(choice, default=str))
    return changes, used


def is_valid(changes):
    """Whether the oracle refuses nothing; the choices respect the service's own limits."""
    consequences = oracle.consequences(*vary(**changes))
    return not any(one.rule.severity == "error" for one in consequences)


@pytest.fixture(scope="module")
def samples():
    """Pseudo-random jobs that `check` accepts, and the choices used for each."""
    random_ = random.Random(5)
    base = {"nodes": 2, "processes_per_node": 4}
    return [random_changes(random_, base | LAUNCHED[at % len(LAUNCHED)]) for at in range(COUNT)]


@pytest.fixture(scope="module")
def jobs(samples):
    return [vary(**changes) for changes, _ in samples]


@pytest.fixture(scope="module")
def every_image():
    types = ("ml.g5.12xlarge", "ml.p4d.24xlarge", "ml.m5.xlarge")
    numbers = catalog.VERSIONS.items()
    regions = [*catalog._USUAL_REGIONS, *catalog._ACCOUNTS]
    everywhere = [(region, "2.8.0", "py312", types[0]) for region in regions]
    return everywhere + [("us-east-1", *pair, kind) for pair in numbers for kind in types]


@pytest.fixture(scope="module")
def golden():
    """The jobs of golden/requests.json whose image the SDK and the oracle know."""
    return [vary(**changes) for changes in SETTINGS.values() if is_valid(changes)]


@pytest.fixture(scope="module")
def answers(jobs, golden, every_image, tmp_path_factory):
    asked = [
        (*pair, request.render(*pair, run=f"digits-{number}", bundle=HASH), {})
        for number, pair in enumerate([*jobs, *golden])
    ]
    return sdk_requests(tmp_path_factory.mktemp("sdk"), asked, every_image)


def leaves(value):
    """The number of single values in a request."""
    if isinstance(value, dict):
        return sum(map(leaves, value.values()))
    return sum(map(leaves, value)) if isinstance(value, list) else 1


def test_requests_are_equal(jobs, golden, answers, record_property):
    different, fields = {}, 0
    pairs = zip([*jobs, *golden], answers["requests"], strict=True)
    for number, (pair, from_sdk) in enumerate(pairs):
        rendered = request.render(*pair, run=f"digits-{number}", bundle=HASH)
        fields += leaves(rendered)
        if rendered != from_sdk:
            different[number] = list(estimator.differences(rendered, from_sdk))
    record_property("jobs", len(jobs))
    record_property("fields", fields)
    assert different == {}
    distinct = {json.dumps(request, sort_keys=True) for request in answers["requests"]}
    assert len(distinct) == COUNT + len(golden)
    assert len(golden) > len(SETTINGS) / 2


def test_check_accepts_all_jobs(jobs):
    for job, options in jobs:
        assert [p for p in sagemaker.check(job, options) if p.severity == "error"] == []


def test_an_accepted_job_is_valid_for_every_run(jobs):
    """`plan` does not repeat `check`, which validates a request with a placeholder as run id."""
    for number, pair in enumerate(jobs):
        rendered = request.render(*pair, run=f"digits-{number}", bundle=HASH)
        assert oracle.request_problems(rendered) == []


def test_every_choice_was_used(samples):
    used = {choice for _, choices in samples for choice in choices}
    expected = {json.dumps(choice, default=str) for choices in CHOICES for choice in choices}
    assert expected - used == set()


def test_every_key_of_the_section_was_varied(jobs):
    """Except keys that the SDK ignores or that every job has."""
    constant = {
        name
        for name in vars(jobs[0][1])
        if len({repr(getattr(options, name)) for _, options in jobs}) == 1
    }
    sdk_ignores = {"assume_role", "bucket_owner", "deploy", "kms_key", "profile", "sender"}
    sdk_lacks = {"instance_preferences", "max_pending", "request"}
    assert constant == {"role", "bucket", "py_version"} | sdk_ignores | sdk_lacks


@pytest.mark.nightly
def test_images_equal_those_of_the_sdk(every_image, answers):
    assert [catalog.image_for(*one) for one in every_image] == answers["images"]
