"""SageMaker's model parallel library (SMP, version 2): versions, images and machines."""

from __future__ import annotations

from deploykit.backends.sagemaker import images, machines
from deploykit.backends.sagemaker.oracle.rule import (
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

_SMP = f"{GUIDE}/distributed-model-parallel-v2-reference.html"
_TORCHRUN = "sagemaker_torch_distributed_enabled"
_P4D = {"instance_type": "ml.p4d.24xlarge"}
_SMP_JOB = version("2.5.1", distribution="smdistributed.modelparallel", **_P4D)
_SMP_URIS = f"{SDK}/image_uri_config/pytorch-smp.json"
_OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/ours:1"


def _uneven(case: Case) -> list[str]:
    """Degrees that do not divide the ranks."""
    chosen = case.options.model_parallel
    found = chosen.parameters() if case.model_parallel and chosen else {}
    degrees = {name: value for name, value in found.items() if name.endswith("_degree")}
    return [f"{name}" for name, value in degrees.items() if value and case.world % value]


RULES = (
    Rule(
        "sagemaker.distribution",
        Verdict.ASKED,
        lambda case: case.model_parallel and case.version in images.SMP,
        "torchrun starts {case.world_text}, in the image with SageMaker's model parallel library; "
        "deploykit always asks for torchrun with it: on its own, the SDK sends no launcher, and "
        "one plain process starts on each machine",
        None,
        LAUNCHER,
        (
            Row(
                _SMP_JOB | sm(model_parallel={"hybrid_shard_degree": 8}),
                sends={_TORCHRUN: "true", "mp_parameters": '{"hybrid_shard_degree": 8}'},
            ),
            Row(
                _SMP_JOB,
                raw={
                    "distribution": {
                        "smdistributed": {
                            "modelparallel": {"enabled": True, "parameters": {"ddp": True}}
                        }
                    },
                    "framework_version": "2.2.0",
                    "py_version": "py310",
                },
                sends={_TORCHRUN: None, "sagemaker_mpi_enabled": None},
            ),
        ),
        quiet=True,
    ),
    Rule(
        "sagemaker.model_parallel.hybrid_shard_degre",
        Verdict.REFUSED,
        None,
        "there is no such parameter; the SDK passes on whatever stands there",
        "hybrid_shard_degree: 8",
        _SMP,
        (
            Row(
                _SMP_JOB | sm(model_parallel={"hybrid_shard_degre": 8}),
                raw={
                    "distribution": {
                        "torch_distributed": {"enabled": True},
                        "smdistributed": {
                            "modelparallel": {
                                "enabled": True,
                                "parameters": {"hybrid_shard_degre": 8},
                            }
                        },
                    },
                    "framework_version": "2.5.1",
                    "py_version": "py311",
                    "image_uri": None,
                },
                sends={"mp_parameters": '{"hybrid_shard_degre": 8}'},
                cure=sm(model_parallel={"hybrid_shard_degree": 8}),
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: case.model_parallel and bool(case.type) and case.gpus == 0,
        "{case.kind} is made for GPUs, and {case.type} has none",
        "a type such as ml.p4d.24xlarge",
        _SMP,
        (
            Row(
                _SMP_JOB | sm(instance_type="ml.m5.xlarge"),
                Sdk.REFUSES,
                says="only for GPU and Trainium",
                cure=sm(**_P4D),
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.UNKNOWN,
        lambda case: (
            case.model_parallel and case.gpus != 0 and machines.SMP.fullmatch(case.type) is None
        ),
        "the model parallel library is made for ml.p4d, ml.p4de and ml.p5; whether it runs on "
        "{case.type} cannot be known from here",
        "one of these types",
        _SMP,
        (Row(_SMP_JOB | sm(instance_type="ml.g5.12xlarge"), cure=sm(**_P4D)),),
    ),
    Rule(
        "sagemaker.model_parallel.{item}",
        Verdict.REFUSED,
        _uneven,
        "does not divide the {case.world} ranks of the job",
        "a divisor of {case.world}",
        _SMP,
        (
            Row(
                _SMP_JOB | sm(model_parallel={"tensor_parallel_degree": 3}),
                cure=sm(model_parallel={"tensor_parallel_degree": 4}),
            ),
        ),
    ),
    Rule(
        "sagemaker.model_parallel",
        Verdict.REFUSED,
        lambda case: case.options.model_parallel is not None and not case.model_parallel,
        "is read by smdistributed.modelparallel only, not by {case.kind}",
        "remove it, or distribution: smdistributed.modelparallel",
        _SMP,
        (
            Row(
                sm(model_parallel={"hybrid_shard_degree": 8}),
                Sdk.UNASKED,
                cure=sm(model_parallel=None),
            ),
        ),
    ),
    Rule(
        "sagemaker.framework_version",
        Verdict.REFUSED,
        lambda case: case.model_parallel and bool(case.version) and case.version not in images.SMP,
        "there is no image of PyTorch {case.version} with the model parallel library; the SDK "
        "takes some version numbers of the library for those of PyTorch, and makes up a name",
        "framework_version: 2.5.1",
        _SMP_URIS,
        (
            Row(
                version(
                    "2.8.0",
                    py_version="py311",
                    distribution="smdistributed.modelparallel",
                    **_P4D,
                ),
                raw={"py_version": "py311"},
                cure=sm(framework_version="2.5.1"),
            ),
            Row(
                version("2.6.0", distribution="smdistributed.modelparallel", **_P4D),
                Sdk.REFUSES,
                says="Unsupported pytorch-smp version",
                raw={"py_version": "py312"},
                cure=sm(framework_version="2.5.1"),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.REFUSED,
        lambda case: case.model_parallel and case.image is not None and not case.image.smp,
        "holds no model parallel library, so that `import torch.sagemaker` fails",
        "framework_version: 2.5.1 instead",
        f"{GUIDE}/distributed-model-parallel-support-v2.html",
        (
            Row(
                sm(distribution="smdistributed.modelparallel", **_P4D),
                cure=sm(framework_version="2.5.1", image_uri=None),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.UNKNOWN,
        lambda case: case.model_parallel and case.foreign,
        "whether this image holds the model parallel library cannot be known from here",
        "framework_version: 2.5.1, which has it",
        f"{GUIDE}/distributed-model-parallel-support-v2.html",
        (
            Row(
                sm(distribution="smdistributed.modelparallel", image_uri=_OWN, **_P4D),
                cure=sm(framework_version="2.5.1", image_uri=None),
            ),
        ),
    ),
)
