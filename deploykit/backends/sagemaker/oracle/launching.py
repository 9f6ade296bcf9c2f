"""What starts the ranks: distribution x instance type x count x options."""

from __future__ import annotations

import re

from deploykit.backends.sagemaker import images
from deploykit.backends.sagemaker.oracle.rule import (
    LAUNCHER,
    SDK,
    TOOLKIT,
    Case,
    Row,
    Rule,
    Sdk,
    Verdict,
    sm,
    version,
)

_TORCHRUN = "sagemaker_torch_distributed_enabled"
_DATA_PARALLEL = "sagemaker_distributed_dataparallel_enabled"
_BACK_TO_TORCHRUN = sm(distribution="torch_distributed")
_OVERWRITTEN = re.compile(r"(NCCL|FI|RDMAV)_\w+")


def _too_many(case: Case) -> bool:
    return bool(case.gpus) and case.job.resources.processes > (case.gpus or 0)


RULES = (
    Rule(
        "sagemaker.distribution",
        Verdict.ASKED,
        lambda case: case.kind == "torch_distributed",
        "torchrun starts {case.world_text}",
        None,
        LAUNCHER,
        (Row({}, sends={_TORCHRUN: "true", _DATA_PARALLEL: None}),),
        quiet=True,
    ),
    Rule(
        "sagemaker.distribution",
        Verdict.ASKED,
        lambda case: case.kind == "mpi",
        "mpirun starts {case.world_text}, and our launcher gives them torchrun's variables",
        None,
        TOOLKIT,
        (
            Row(
                sm(distribution="mpi", mpi_options="-x NCCL_ALGO=Ring"),
                sends={
                    "sagemaker_mpi_enabled": "true",
                    "sagemaker_mpi_num_of_processes_per_host": "4",
                    "sagemaker_mpi_custom_mpi_options": '"-x NCCL_ALGO=Ring"',
                },
            ),
        ),
        quiet=True,
    ),
    Rule(
        "sagemaker.distribution",
        Verdict.ASKED,
        lambda case: case.kind == "none" and case.world == 1,
        "one process starts, without a launcher",
        None,
        LAUNCHER,
        (
            Row(
                {"resources.nodes": 1, "resources.processes_per_node": 1} | sm(distribution="none"),
                sends={_TORCHRUN: None},
            ),
        ),
        quiet=True,
    ),
    Rule(
        "sagemaker.distribution",
        Verdict.REFUSED,
        None,
        "there is no such distribution; the SDK takes it and sends no launcher, so that one plain "
        "process starts on each machine and trains alone",
        "distribution: torch_distributed",
        f"{SDK}/estimator.py",
        (
            Row(
                sm(distribution="torchdistributed"),
                raw={"distribution": {"torchdistributed": {"enabled": True}}},
                sends={_TORCHRUN: None, _DATA_PARALLEL: None, "sagemaker_mpi_enabled": None},
                cure=_BACK_TO_TORCHRUN,
            ),
            Row(
                sm(distribution={"torch_distributed": {"enabled": False}}),
                raw={"distribution": {"torch_distributed": {"enabled": False}}},
                sends={_TORCHRUN: None, _DATA_PARALLEL: None},
                cure=sm(distribution="torch_distributed"),
            ),
        ),
    ),
    Rule(
        "sagemaker.distribution",
        Verdict.REFUSED,
        lambda case: case.kind == "none" and case.world > 1,
        "the job asks for {case.world} processes, and `none` starts one on each machine that knows "
        "nothing of the others",
        "distribution: torch_distributed",
        LAUNCHER,
        (Row(sm(distribution="none"), sends={_TORCHRUN: None}, cure=_BACK_TO_TORCHRUN),),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: (
            bool(case.version)
            and case.torchrun
            and bool(case.type)
            and not images.has_gpu(case.type)
            and not images.has_neuron(case.type)
        ),
        "{case.type} has no GPU, and without image_uri the SDK allows {case.kind} only with GPUs",
        "a type such as ml.g5.12xlarge, or a CPU image: {case.later}",
        f"{SDK}/fw_utils.py",
        (
            Row(
                version("2.8.0", instance_type="ml.m5.xlarge"),
                Sdk.REFUSES,
                says="only for GPU and Trainium",
                cure=sm(
                    framework_version=None,
                    image_uri="763104351884.dkr.ecr.us-east-1.amazonaws.com/"
                    "pytorch:2.14-cpu-amzn2023-sagemaker",
                ),
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: (
            images.has_neuron(case.type)
            and case.options.image_uri is not None
            and case.kind not in ("torch_distributed", "none")
        ),
        "on Trainium the SDK allows torch_distributed alone",
        "distribution: torch_distributed",
        f"{SDK}/fw_utils.py",
        (
            Row(
                sm(
                    distribution="mpi",
                    instance_type="ml.trn1.32xlarge",
                    image_uri="123456789012.dkr.ecr.us-east-1.amazonaws.com/neuron:1",
                ),
                Sdk.REFUSES,
                says="not supported for Trainium",
                cure=_BACK_TO_TORCHRUN,
            ),
        ),
    ),
    Rule(
        "sagemaker.mpi_options",
        Verdict.REFUSED,
        lambda case: case.options.mpi_options is not None and not case.mpirun,
        "are options of mpirun, and {case.kind} does not start it",
        "remove them, or distribution: mpi",
        LAUNCHER,
        (Row(sm(mpi_options="--verbose"), Sdk.UNASKED, cure=sm(mpi_options=None)),),
    ),
    Rule(
        "resources.processes_per_node",
        Verdict.OTHER,
        _too_many,
        "{job.resources.processes} ranks on each machine will share the {case.gpus} GPU(s) of "
        "{case.type}, and NCCL refuses two ranks on one GPU",
        "processes_per_node: {case.gpus}",
        "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html",
        (
            Row(
                {"resources.processes_per_node": 8},
                cure={"resources.processes_per_node": 4},
            ),
        ),
    ),
    Rule(
        "env.{item}",
        Verdict.ASKED,
        lambda case: [name for name in case.job.env if _OVERWRITTEN.fullmatch(name)],
        "AWS's launchers overwrite some of these in the container; our launcher puts yours back",
        None,
        TOOLKIT,
        (Row({"env": {"NCCL_DEBUG": "INFO", "FI_PROVIDER": "efa"}}),),
        quiet=True,
    ),
)
