"""SageMaker's data parallel library (SMDDP): versions, images and machines."""

from __future__ import annotations

from deploykit.backends.sagemaker import images, machines
from deploykit.backends.sagemaker.oracle.rule import (
    GUIDE,
    SDK,
    Row,
    Rule,
    Sdk,
    Verdict,
    sm,
    version,
)

_PULL = "https://github.com/aws/sagemaker-python-sdk/pull/4698"
_SMDDP = f"{GUIDE}/distributed-data-parallel-support.html"
_TORCHRUN = "sagemaker_torch_distributed_enabled"
_DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"
_P4D = {"instance_type": "ml.p4d.24xlarge"}
_SMDDP_JOB = version("2.2.0", distribution="smdistributed.dataparallel", **_P4D)
_BACK_TO_TORCHRUN = sm(distribution="torch_distributed")
_ECR = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
_NO_SMDDP = (2, 4)
"""From here on AWS's images are without it; 2.3 is the last with it."""
_OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/ours:1"
_CUDA_121 = "2.0.1-gpu-py310-cu121"


RULES = (
    Rule(
        "sagemaker.distribution",
        Verdict.ASKED,
        lambda case: case.kind == "smdistributed.dataparallel" and case.version in images.SMDDP,
        "mpirun starts {case.world_text} with SageMaker's data parallel library (SMDDP)",
        None,
        _SMDDP,
        (Row(_SMDDP_JOB, sends={_DATA_PARALLEL: "true", _TORCHRUN: None}),),
        quiet=True,
    ),
    Rule(
        "sagemaker.distribution",
        Verdict.OTHER,
        lambda case: case.kind == "pytorchddp",
        "pytorchddp will run as SMDDP, SageMaker's data parallel library under mpirun, not as "
        "PyTorch's own DDP: the SDK has rewritten it since 2.221.1",
        "distribution: torch_distributed, which is PyTorch's DDP under torchrun",
        _PULL,
        (
            Row(
                version("2.2.0", distribution="pytorchddp", **_P4D),
                sends={"sagemaker_pytorch_ddp_enabled": None, _DATA_PARALLEL: "true"},
                cure=_BACK_TO_TORCHRUN,
            ),
        ),
    ),
    Rule(
        "sagemaker.framework_version",
        Verdict.REFUSED,
        lambda case: case.data_parallel and bool(case.version) and case.version not in images.SMDDP,
        "{case.kind} exists up to PyTorch 2.2.0, not for {case.version}",
        "framework_version: 2.2.0, or distribution: torch_distributed",
        f"{SDK}/fw_utils.py",
        (
            Row(
                version("2.8.0", distribution="smdistributed.dataparallel", **_P4D),
                Sdk.REFUSES,
                says="not supported by smdataparallel",
                cure=sm(framework_version="2.2.0"),
            ),
            Row(
                version("2.3.0", distribution="pytorchddp", **_P4D),
                Sdk.REFUSES,
                says="not supported by smdataparallel",
                cure=_BACK_TO_TORCHRUN,
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: case.data_parallel and bool(case.type) and not images.has_gpu(case.type),
        "{case.kind} is made for GPUs, and {case.type} has none",
        "a type such as ml.p4d.24xlarge, or distribution: mpi",
        _SMDDP,
        (Row(_SMDDP_JOB | sm(instance_type="ml.m5.xlarge"), cure=sm(**_P4D)),),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: case.data_parallel and case.type == "ml.p5.48xlarge",
        "{case.kind} does not run on ml.p5.48xlarge",
        "distribution: torch_distributed",
        f"{SDK}/estimator.py",
        (
            Row(
                _SMDDP_JOB | sm(instance_type="ml.p5.48xlarge"),
                Sdk.REFUSES,
                says="do not support p5",
                cure=_BACK_TO_TORCHRUN,
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.UNKNOWN,
        lambda case: (
            case.data_parallel
            and images.has_gpu(case.type)
            and case.type not in (*machines.SMDDP, "ml.p5.48xlarge")
        ),
        "{case.kind} is made for ml.p3dn, ml.p4d and ml.p4de; whether it runs on {case.type}, and "
        "as what, cannot be known from here",
        "one of these types, or distribution: torch_distributed",
        _SMDDP,
        (
            Row(_SMDDP_JOB | sm(instance_type="ml.g5.12xlarge"), cure=_BACK_TO_TORCHRUN),
            Row(_SMDDP_JOB | sm(instance_type="ml.p5e.48xlarge"), cure=sm(**_P4D)),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.OTHER,
        lambda case: (
            case.data_parallel
            and case.image is not None
            and not case.image.smp
            and case.release >= _NO_SMDDP
        ),
        "holds no SMDDP: {case.kind} will run as plain mpirun with NCCL. The SDK checks no image",
        "distribution: torch_distributed, or mpi, which says what happens",
        f"{GUIDE}/distributed-data-parallel-support.html",
        (
            Row(
                sm(distribution="pytorchddp", **_P4D),
                sends={"sagemaker_distributed_dataparallel_enabled": "true"},
                cure=sm(distribution="mpi"),
            ),
            Row(
                sm(
                    distribution="smdistributed.dataparallel",
                    image_uri=f"{_ECR}/pytorch:2.13-cu133-amzn2023-sagemaker",
                    **_P4D,
                ),
                cure=sm(distribution="torch_distributed"),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.UNKNOWN,
        lambda case: case.data_parallel and case.foreign,
        "whether this image holds SMDDP cannot be known from here; without it, {case.kind} will "
        "run as plain mpirun",
        "framework_version: 2.2.0, which has it, or distribution: torch_distributed",
        f"{GUIDE}/data-parallel-bring-your-own-container.html",
        (
            Row(
                sm(distribution="smdistributed.dataparallel", image_uri=_OWN, **_P4D),
                cure=sm(distribution="torch_distributed"),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.REFUSED,
        lambda case: case.data_parallel and _CUDA_121 in (case.options.image_uri or ""),
        "the SDK knows that this image holds no SMDDP, and refuses it",
        "framework_version: 2.0.1",
        f"{SDK}/estimator.py",
        (
            Row(
                sm(
                    distribution="smdistributed.dataparallel",
                    image_uri=f"{_ECR}/pytorch-training:{_CUDA_121}-ubuntu20.04-sagemaker",
                    **_P4D,
                ),
                Sdk.REFUSES,
                says="incompatible with DLC image",
                cure=sm(framework_version="2.0.1", image_uri=None),
            ),
        ),
    ),
)
