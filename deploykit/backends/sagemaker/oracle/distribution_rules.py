"""What starts the ranks: distribution, instance type, number of nodes, and AWS's two libraries."""

from __future__ import annotations

import re

from deploykit.backends.sagemaker import catalog
from deploykit.backends.sagemaker.oracle.oracle_rule import Case, OracleRule, Verdict
from deploykit.backends.sagemaker.oracle.sources import GUIDE, LAUNCHER, SDK, TOOLKIT

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/usage/communicators.html"
_SMDDP = f"{GUIDE}/distributed-data-parallel-support.html"
_SMP = f"{GUIDE}/distributed-model-parallel-v2-reference.html"
_SMP_SUPPORT = f"{GUIDE}/distributed-model-parallel-support-v2.html"
_OVERWRITTEN = re.compile(r"(NCCL|FI|RDMAV)_\w+")
_P5 = "ml.p5.48xlarge"
_WITHOUT_SMDDP = (2, 4)
"""AWS's images from this PyTorch on do not include SMDDP; 2.3 is the last that does."""
_CUDA_121 = "2.0.1-gpu-py310-cu121"


def _uneven_degrees(case: Case) -> list[str]:
    """Degrees that do not divide the world size."""
    chosen = case.options.model_parallel
    if not case.model_parallel or chosen is None:
        return []
    degrees = {k: v for k, v in chosen.parameters().items() if k.endswith("_degree")}
    return [name for name, degree in degrees.items() if degree and case.world_size % degree]


LAUNCHERS = (
    OracleRule(
        id="torchrun",
        path="sagemaker.distribution",
        verdict=Verdict.ASKED,
        when=lambda case: case.distribution == "torch_distributed",
        reason="torchrun starts {case.ranks}",
        source=LAUNCHER,
        quiet=True,
    ),
    OracleRule(
        id="mpi",
        path="sagemaker.distribution",
        verdict=Verdict.ASKED,
        when=lambda case: case.distribution == "mpi",
        reason="mpirun starts {case.ranks}, and deploykit's launcher sets torchrun's variables",
        source=TOOLKIT,
        quiet=True,
    ),
    OracleRule(
        id="one-process",
        path="sagemaker.distribution",
        verdict=Verdict.ASKED,
        when=lambda case: case.distribution == "none" and case.world_size == 1,
        reason="one process starts, without a launcher",
        source=LAUNCHER,
        quiet=True,
    ),
    OracleRule(
        id="unknown-distribution",
        path="sagemaker.distribution",
        verdict=Verdict.REFUSED,
        when=None,
        reason="unknown distribution; the SDK accepts it and requests no launcher, so each node "
        "runs one process that trains alone",
        nearest="distribution: torch_distributed",
        source=f"{SDK}/estimator.py",
    ),
    OracleRule(
        id="no-launcher",
        path="sagemaker.distribution",
        verdict=Verdict.REFUSED,
        when=lambda case: case.distribution == "none" and case.world_size > 1,
        reason="the job needs {case.world_size} ranks, and `none` starts one independent process "
        "on each node",
        nearest="distribution: torch_distributed",
        source=LAUNCHER,
    ),
    OracleRule(
        id="torchrun-without-gpus",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            bool(case.version)
            and case.torchrun
            and bool(case.instance_type)
            and not case.has_gpu
            and not case.has_neuron
        ),
        reason="{case.instance_type} has no GPU; without image_uri, the SDK allows "
        "{case.distribution} only with GPUs",
        nearest="a type such as ml.g5.12xlarge, or a CPU image: {case.later_image}",
        source=f"{SDK}/fw_utils.py",
    ),
    OracleRule(
        id="trainium-launcher",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.has_neuron
            and case.options.image_uri is not None
            and case.distribution not in ("torch_distributed", "none")
        ),
        reason="on Trainium, the SDK allows only torch_distributed",
        nearest="distribution: torch_distributed",
        source=f"{SDK}/fw_utils.py",
    ),
    OracleRule(
        id="mpi-options-without-mpirun",
        path="sagemaker.mpi_options",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.mpi_options is not None and not case.mpirun,
        reason="applies to mpirun only, and {case.distribution} does not use mpirun",
        nearest="remove it, or distribution: mpi",
        source=LAUNCHER,
    ),
    OracleRule(
        id="more-ranks-than-gpus",
        path="resources.processes_per_node",
        verdict=Verdict.OTHER,
        when=lambda case: bool(case.gpus) and case.ranks_per_node > (case.gpus or 0),
        reason="{case.ranks_per_node} ranks on each node would share the {case.gpus} GPU(s) of "
        "{case.instance_type}, and NCCL refuses two ranks on one GPU",
        nearest="processes_per_node: {case.gpus}",
        source=_NCCL,
    ),
    OracleRule(
        id="overwritten-variables",
        path="env.{item}",
        verdict=Verdict.ASKED,
        when=lambda case: list(filter(_OVERWRITTEN.fullmatch, case.job.env)),
        reason="AWS's launchers overwrite some of these variables in the container; deploykit's "
        "launcher restores your values",
        source=TOOLKIT,
        quiet=True,
    ),
)

DATA_PARALLEL = (
    OracleRule(
        id="smddp",
        path="sagemaker.distribution",
        verdict=Verdict.ASKED,
        when=lambda case: (
            case.distribution == "smdistributed.dataparallel"
            and case.version in catalog.SMDDP_VERSIONS
        ),
        reason="mpirun starts {case.ranks} with SageMaker's data parallel library (SMDDP)",
        source=_SMDDP,
        quiet=True,
    ),
    OracleRule(
        id="pytorchddp-is-smddp",
        path="sagemaker.distribution",
        verdict=Verdict.OTHER,
        when=lambda case: case.distribution == "pytorchddp",
        reason="pytorchddp runs as SMDDP, SageMaker's data parallel library under mpirun, and not "
        "as PyTorch's DDP: the SDK has replaced it since 2.221.1",
        nearest="distribution: torch_distributed, which is PyTorch's DDP under torchrun",
        source="https://github.com/aws/sagemaker-python-sdk/pull/4698",
    ),
    OracleRule(
        id="smddp-version",
        path="sagemaker.framework_version",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.data_parallel and bool(case.version) and case.version not in catalog.SMDDP_VERSIONS
        ),
        reason="{case.distribution} supports PyTorch up to 2.2.0, not {case.version}",
        nearest="framework_version: 2.2.0, or distribution: torch_distributed",
        source=f"{SDK}/fw_utils.py",
    ),
    OracleRule(
        id="smddp-without-gpus",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: case.data_parallel and bool(case.instance_type) and not case.has_gpu,
        reason="{case.distribution} requires GPUs, and {case.instance_type} has none",
        nearest="a type such as ml.p4d.24xlarge, or distribution: mpi",
        source=_SMDDP,
    ),
    OracleRule(
        id="smddp-on-p5",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: case.data_parallel and case.instance_type == _P5,
        reason="{case.distribution} does not support ml.p5.48xlarge",
        nearest="distribution: torch_distributed",
        source=f"{SDK}/estimator.py",
    ),
    OracleRule(
        id="smddp-on-other-types",
        path="sagemaker.instance_type",
        verdict=Verdict.UNKNOWN,
        when=lambda case: (
            case.data_parallel
            and case.has_gpu
            and case.instance_type not in (*catalog.SMDDP_TYPES, _P5)
        ),
        reason="{case.distribution} is documented for ml.p3dn, ml.p4d and ml.p4de; whether and how "
        "it runs on {case.instance_type} is not documented",
        nearest="one of these types, or distribution: torch_distributed",
        source=_SMDDP,
    ),
    OracleRule(
        id="image-without-smddp",
        path="sagemaker.image_uri",
        verdict=Verdict.OTHER,
        when=lambda case: (
            case.data_parallel
            and case.image is not None
            and not case.image.smp
            and case.release >= _WITHOUT_SMDDP
        ),
        reason="the image does not include SMDDP: {case.distribution} will run as plain mpirun "
        "with NCCL. The SDK does not check the image",
        nearest="distribution: torch_distributed, or mpi, which is what would run",
        source=_SMDDP,
    ),
    OracleRule(
        id="unknown-image-smddp",
        path="sagemaker.image_uri",
        verdict=Verdict.UNKNOWN,
        when=lambda case: case.data_parallel and case.unknown_image,
        reason="it is not known whether this image includes SMDDP; without it, "
        "{case.distribution} runs as plain mpirun",
        nearest="framework_version: 2.2.0, which includes it, or distribution: torch_distributed",
        source=f"{GUIDE}/data-parallel-bring-your-own-container.html",
    ),
    OracleRule(
        id="image-that-the-sdk-refuses",
        path="sagemaker.image_uri",
        verdict=Verdict.REFUSED,
        when=lambda case: case.data_parallel and _CUDA_121 in (case.options.image_uri or ""),
        reason="the image does not include SMDDP, and the SDK refuses it",
        nearest="framework_version: 2.0.1",
        source=f"{SDK}/estimator.py",
    ),
)

MODEL_PARALLEL = (
    OracleRule(
        id="smp",
        path="sagemaker.distribution",
        verdict=Verdict.ASKED,
        when=lambda case: case.model_parallel and case.version in catalog.SMP_IMAGES,
        reason="torchrun starts {case.ranks}, in the image with SageMaker's model parallel "
        "library. deploykit always requests torchrun with it: by default the SDK requests no "
        "launcher, and each node runs one process",
        source=LAUNCHER,
        quiet=True,
    ),
    OracleRule(
        id="unknown-smp-parameter",
        path="sagemaker.model_parallel.hybrid_shard_degre",
        verdict=Verdict.REFUSED,
        when=None,
        reason="unknown parameter; the SDK passes on any name",
        nearest="hybrid_shard_degree: 8",
        source=_SMP,
    ),
    OracleRule(
        id="smp-without-gpus",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: case.model_parallel and bool(case.instance_type) and case.gpus == 0,
        reason="{case.distribution} requires GPUs, and {case.instance_type} has none",
        nearest="a type such as ml.p4d.24xlarge",
        source=_SMP,
    ),
    OracleRule(
        id="smp-on-other-types",
        path="sagemaker.instance_type",
        verdict=Verdict.UNKNOWN,
        when=lambda case: (
            case.model_parallel
            and case.gpus != 0
            and catalog.SMP_TYPES.fullmatch(case.instance_type) is None
        ),
        reason="the model parallel library is documented for ml.p4d, ml.p4de and ml.p5; whether "
        "it runs on {case.instance_type} is not documented",
        nearest="one of these types",
        source=_SMP,
    ),
    OracleRule(
        id="uneven-degree",
        path="sagemaker.model_parallel.{item}",
        verdict=Verdict.REFUSED,
        when=_uneven_degrees,
        reason="does not divide the world size of {case.world_size}",
        nearest="a divisor of {case.world_size}",
        source=_SMP,
    ),
    OracleRule(
        id="smp-parameters-elsewhere",
        path="sagemaker.model_parallel",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.model_parallel is not None and not case.model_parallel,
        reason="applies to smdistributed.modelparallel only, not to {case.distribution}",
        nearest="remove it, or distribution: smdistributed.modelparallel",
        source=_SMP,
    ),
    OracleRule(
        id="smp-version",
        path="sagemaker.framework_version",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.model_parallel and bool(case.version) and case.version not in catalog.SMP_IMAGES
        ),
        reason="no image of PyTorch {case.version} includes the model parallel library; the SDK "
        "confuses some versions of the library with those of PyTorch and makes up an image name",
        nearest="framework_version: 2.5.1",
        source=f"{SDK}/image_uri_config/pytorch-smp.json",
    ),
    OracleRule(
        id="image-without-smp",
        path="sagemaker.image_uri",
        verdict=Verdict.REFUSED,
        when=lambda case: case.model_parallel and case.image is not None and not case.image.smp,
        reason="the image does not include the model parallel library: `import torch.sagemaker` "
        "would fail",
        nearest="framework_version: 2.5.1 instead",
        source=_SMP_SUPPORT,
    ),
    OracleRule(
        id="unknown-image-smp",
        path="sagemaker.image_uri",
        verdict=Verdict.UNKNOWN,
        when=lambda case: case.model_parallel and case.unknown_image,
        reason="it is not known whether this image includes the model parallel library",
        nearest="framework_version: 2.5.1, which includes it",
        source=_SMP_SUPPORT,
    ),
)
