"""Our request beside the one that the real SDK's estimator would send, for many jobs."""

from __future__ import annotations

import json
import random

import pytest
import sdk_child
from sagemaker_jobs import vary

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import images, oracle, request, sdk, sdk_terms
from deploykit.backends.sagemaker.sections import Channel, InstanceGroup, ModelParallel
from deploykit.backends.sagemaker.sending import differences

COUNT = 240
HASH = "0123456789abcdef" * 4
OWN = {"image_uri": "somebody/image:1", "framework_version": None}
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
    *versions(*(v for v in images.VERSIONS if v not in images.NOT_TORCHRUN)),
    *[OWN | {"instance_type": kind} for kind in ("ml.m5.xlarge", "ml.p5en.48xlarge")],
    *versions(*images.SMDDP, distribution="pytorchddp", instance_type="ml.p4d.24xlarge"),
    *versions(*images.SMDDP, distribution="smdistributed.dataparallel"),
    OWN | {"distribution": "smdistributed.dataparallel", "mpi_options": "-x NCCL_ALGO=Ring"},
    *versions(*images.SMP, **SMP),
    *versions("2.0.1", "2.5.1", **SMP | {"instance_type": "ml.p5.48xlarge"}, py_version=None),
    *[
        SMP | EIGHT | {"framework_version": "2.4.1", "model_parallel": chosen}
        for chosen in (
            ModelParallel(hybrid_shard_degree=8, sm_activation_offloading=True),
            ModelParallel(0, 2, 4, 8, allow_empty_shards=False, random_seed=0),
            ModelParallel(activation_loading_horizon=3, fsdp_cache_flush_warnings=True),
        )
    ],
    *versions(*images.VERSIONS, distribution="mpi"),
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
"""What starts the ranks in which image; each is taken in turn."""

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
    [{}, {"metric_definitions": {}}, {"metric_definitions": {"loss": r"loss=(\S+)"}}],
    [{}, {"tensorboard_output": "s3://results-1/board"}],
    [{}, {"remote_debug": True}],
    [{}, {"profiler_interval": 100}, {"profiler_interval": 60000}],
    [
        {},
        {"args": ("--epochs", "5")},
        {"args": ("a b", "$(x)", '"', "ü\n", "--flag")},
        {"args": ("x" * 9000,)},
    ],
]
"""Everything else. Of each list the first is usual, and every other one is taken."""


def drawn(chance, usual):
    """A job: what is usual, with some choices of the lists on top, as long as it stays right."""
    taken, changes = [], dict(usual)
    for choices in CHOICES:
        choice = chance.choice(choices)
        if is_right(changes | choice):
            changes |= choice
            taken.append(json.dumps(choice, default=str))
    return changes, taken


def is_right(changes):
    """Whether the oracle refuses nothing; the service's own limits are kept by the choices."""
    return not any(one.rule.severity == "error" for one in oracle.ask(*vary(**changes)))


@pytest.fixture(scope="module")
def drawings():
    """Pseudo-random jobs that `check` lets through, and what was taken for each."""
    chance = random.Random(5)
    usual = {"nodes": 2, "processes_per_node": 4}
    return [drawn(chance, usual | LAUNCHED[at % len(LAUNCHED)]) for at in range(COUNT)]


@pytest.fixture(scope="module")
def jobs(drawings):
    return [vary(**changes) for changes, _ in drawings]


@pytest.fixture(scope="module")
def every_image():
    types = ("ml.g5.12xlarge", "ml.p4d.24xlarge", "ml.m5.xlarge")
    numbers = images.VERSIONS.items()
    regions = [*images._USUAL_REGIONS, *images._ACCOUNTS]
    everywhere = [(region, "2.8.0", "py312", types[0]) for region in regions]
    return everywhere + [("us-east-1", *pair, kind) for pair in numbers for kind in types]


@pytest.fixture(scope="module")
def answers(jobs, every_image, tmp_path_factory):
    asked = [
        sdk_terms.arguments(*pair, run=f"digits-{n}", bundle=HASH) for n, pair in enumerate(jobs)
    ]
    return sdk_child.ask(tmp_path_factory.mktemp("sdk"), asked, every_image)


def leaves(value):
    """How many single values a request holds."""
    if isinstance(value, dict):
        return sum(map(leaves, value.values()))
    return sum(map(leaves, value)) if isinstance(value, list) else 1


def test_the_sdk_is_installed():
    assert sdk.available()


def test_requests_are_equal(jobs, answers, record_property):
    different, fields = {}, 0
    for number, (pair, theirs) in enumerate(zip(jobs, answers["requests"], strict=True)):
        ours = request.render(*pair, run=f"digits-{number}", bundle=HASH)
        fields += leaves(ours)
        if ours != theirs:
            different[number] = list(differences(ours, theirs))
    record_property("jobs", len(jobs))
    record_property("fields", fields)
    said = f"{len(jobs)} jobs, {fields} fields compared, {len(different)} requests differ"
    print(said)  # noqa: T201 - for the note; shown with -s
    assert different == {}
    assert len({json.dumps(request, sort_keys=True) for request in answers["requests"]}) == COUNT


def test_all_of_them_are_right(jobs):
    for job, options in jobs:
        assert [p for p in sagemaker.check(job, options) if p.severity == "error"] == []


def test_every_choice_was_taken(drawings):
    taken = {choice for _, choices in drawings for choice in choices}
    wanted = {json.dumps(choice, default=str) for choices in CHOICES for choice in choices}
    assert wanted - taken == set()


def test_every_key_of_the_section_was_varied(jobs):
    """But for what the SDK has no part in, or what every job has."""
    alike = {
        name
        for name in vars(jobs[0][1])
        if len({repr(getattr(options, name)) for _, options in jobs}) == 1
    }
    assert alike == {"role", "bucket", "bucket_owner", "py_version", "sender"}


def test_images_are_the_sdks(every_image, answers):
    assert [images.uri(*one) for one in every_image] == answers["images"]
