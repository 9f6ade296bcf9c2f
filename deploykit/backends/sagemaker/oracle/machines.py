"""Machines: types, counts, groups of several types, disks."""

from __future__ import annotations

from deploykit.backends.sagemaker import images, machines
from deploykit.backends.sagemaker.oracle.rule import (
    API,
    GUIDE,
    LAUNCHER,
    SDK,
    Case,
    Row,
    Rule,
    Sdk,
    Verdict,
    sm,
    version,
)
from deploykit.backends.sagemaker.sections import InstanceGroup
from deploykit.decode import did_you_mean

_HETERO = f"{GUIDE}/train-heterogeneous-cluster.html"
_POOLS = f"{GUIDE}/train-warm-pools.html"
_DISK = f"{API}/API_ResourceConfig.html"
_GROUPS = (
    {"name": "gpu", "instance_type": "ml.g5.12xlarge", "instance_count": 2},
    {"name": "cpu", "instance_type": "ml.c5.4xlarge", "instance_count": 1},
)
_CLUSTER = sm(
    instance_type=None, instance_groups=_GROUPS, distribution_group="gpu", distribution="mpi"
)
_ONE_TYPE = sm(
    instance_type="ml.g5.12xlarge", instance_groups=(), distribution_group=None, keep_alive=None
)
_USUAL_VOLUME = 30


def _group(case: Case) -> InstanceGroup | None:
    wanted = case.options.distribution_group
    return next((one for one in case.options.instance_groups if one.name == wanted), None)


def _twice(case: Case) -> list[str]:
    names = [group.name for group in case.options.instance_groups]
    return sorted({name for name in names if names.count(name) > 1})


def _no_group(case: Case) -> list[str]:
    """What `distribution_group` is wrong with, in words."""
    names = [group.name for group in case.options.instance_groups]
    wanted = case.options.distribution_group
    if not names or wanted in names:
        return []
    if wanted is None:
        return ["says which of instance_groups trains, and is missing"]
    return [f"is {wanted}, which is none of instance_groups ({did_you_mean(wanted, names)})"]


def _wrong_count(case: Case) -> bool:
    group = _group(case)
    return group is not None and group.instance_count != case.job.resources.nodes


def _own_disk(case: Case) -> list[str]:
    return [kind for kind in dict.fromkeys(case.types) if machines.own_disk(kind)]


RULES = (
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: not case.types,
        "no machine is chosen",
        "instance_type: ml.g5.12xlarge",
        _DISK,
        (
            Row(
                sm(instance_type=None),
                Sdk.UNASKED,
                cure=sm(instance_type="ml.g5.12xlarge"),
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: bool(case.options.instance_type and case.options.instance_groups),
        "contradicts instance_groups",
        "one of the two",
        f"{SDK}/job.py",
        (
            Row(
                _CLUSTER | sm(instance_type="ml.g5.12xlarge"),
                Sdk.REFUSES,
                says="cannot be set when instance_groups is set",
                cure=sm(instance_type=None),
            ),
        ),
    ),
    Rule(
        "resources.nodes",
        Verdict.REFUSED,
        None,
        "a job needs a machine; the SDK passes 0 on",
        "nodes: 1",
        f"{API}/API_ResourceConfig.html",
        (
            Row(
                {"resources.nodes": 0},
                raw={"instance_count": 0},
                cure={"resources.nodes": 1},
            ),
        ),
    ),
    Rule(
        "sagemaker.distribution",
        Verdict.REFUSED,
        lambda case: (
            len(case.options.instance_groups) > 1 and (case.torchrun or case.kind == "none")
        ),
        "with {case.kind} each group of machines starts a world of its own and trains alone: the "
        "SDK drops the name of the group that trains",
        "distribution: mpi",
        f"{SDK}/pytorch/estimator.py",
        (
            Row(
                _CLUSTER | sm(distribution="torch_distributed"),
                sends={"sagemaker_distribution_instance_groups": None},
                cure=sm(distribution="mpi"),
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_groups",
        Verdict.OTHER,
        lambda case: (
            [group.name for group in case.options.instance_groups if group != _group(case)]
            if case.mpirun and _group(case)
            else []
        ),
        "the machines of group {item} are no part of the world: the program runs there once, "
        "without a rank, and must look at SM_CURRENT_INSTANCE_GROUP",
        "instance_type, for machines that all train",
        LAUNCHER,
        (
            Row(
                _CLUSTER,
                sends={"sagemaker_distribution_instance_groups": '["gpu"]'},
                cure=_ONE_TYPE,
            ),
        ),
    ),
    Rule(
        "sagemaker.distribution_group",
        Verdict.REFUSED,
        _no_group,
        "{item}",
        "the name of the group that trains",
        _HETERO,
        (
            Row(
                _CLUSTER | sm(distribution_group=None),
                Sdk.REFUSES,
                says="one instance group name",
                cure=sm(distribution_group="gpu"),
            ),
            Row(
                _CLUSTER | sm(distribution_group="gpus"),
                Sdk.UNASKED,
                cure=sm(distribution_group="gpu"),
            ),
        ),
    ),
    Rule(
        "sagemaker.distribution_group",
        Verdict.REFUSED,
        lambda case: (
            case.options.distribution_group is not None and not case.options.instance_groups
        ),
        "names a group, and there are no instance_groups",
        "remove it",
        _HETERO,
        (
            Row(
                sm(distribution_group="gpu", distribution="mpi"),
                Sdk.UNASKED,
                cure=sm(distribution_group=None),
            ),
        ),
    ),
    Rule(
        "resources.nodes",
        Verdict.REFUSED,
        _wrong_count,
        "is {job.resources.nodes}, and the group that trains has another number of machines: the "
        "ranks are counted by this one",
        "the instance_count of group {options.distribution_group}",
        _HETERO,
        (Row(_CLUSTER | {"resources.nodes": 3}, cure={"resources.nodes": 2}),),
    ),
    Rule(
        "sagemaker.instance_groups",
        Verdict.REFUSED,
        _twice,
        "two groups are called {item}",
        "a name of its own for each",
        _HETERO,
        (
            Row(
                _CLUSTER | sm(instance_groups=(_GROUPS[0], {**_GROUPS[1], "name": "gpu"})),
                cure=sm(instance_groups=_GROUPS),
            ),
        ),
    ),
    Rule(
        "sagemaker.keep_alive",
        Verdict.REFUSED,
        lambda case: case.options.keep_alive is not None and bool(case.options.instance_groups),
        "a heterogeneous cluster cannot be kept as a warm pool",
        "drop one of the two",
        _POOLS,
        (Row(_CLUSTER | sm(keep_alive="10m"), cure=_ONE_TYPE),),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: (
            bool(case.type)
            and not images.has_gpu(case.type)
            and case.job.resources.gpus_per_node > 0
        ),
        "{case.type} has no GPU, and the job asks for {job.resources.gpus_per_node} a machine",
        "a type with GPUs, such as ml.g5.12xlarge",
        "https://aws.amazon.com/sagemaker/ai/pricing/",
        (
            Row(
                {"resources.gpus_per_node": 4} | sm(instance_type="ml.m5.xlarge"),
                cure=sm(instance_type="ml.g5.12xlarge"),
            ),
        ),
    ),
    Rule(
        "resources.{item}",
        Verdict.OTHER,
        lambda case: [
            name
            for name in ("cpus_per_node", "memory")
            if getattr(case.job.resources, name) is not None
        ],
        "SageMaker gives what the instance type has, whatever stands here",
        "remove it",
        "https://aws.amazon.com/sagemaker/ai/pricing/",
        (Row({"resources.memory": "4GiB"}, cure={"resources.memory": None}),),
    ),
    Rule(
        "sagemaker.volume_size",
        Verdict.OTHER,
        lambda case: _own_disk(case) if case.options.volume_size != _USUAL_VOLUME else [],
        "{item} has NVMe disks of a fixed size, and gets no volume",
        "leave it out, or a type without such disks",
        _DISK,
        (Row(sm(volume_size=500), cure=sm(volume_size=30)),),
    ),
    Rule(
        "sagemaker.volume_kms_key",
        Verdict.REFUSED,
        lambda case: _own_disk(case) if case.options.volume_kms_key is not None else [],
        "{item} has NVMe disks, which are encrypted by the machine's own key; the service refuses "
        "another",
        "remove it",
        _DISK,
        (
            Row(sm(volume_kms_key="alias/training"), cure=sm(volume_kms_key=None)),
            Row(
                version("2.8.0", volume_kms_key="alias/training", instance_type="ml.p4d.24xlarge"),
                cure=sm(instance_type="ml.p3.8xlarge"),
            ),
        ),
    ),
)
