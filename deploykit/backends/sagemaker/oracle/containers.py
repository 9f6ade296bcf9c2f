"""Images: framework version x Python x region x what is in them."""

from __future__ import annotations

from deploykit.backends.sagemaker import images
from deploykit.backends.sagemaker.oracle.rule import (
    CPU_IMAGE,
    GUIDE,
    IMAGE,
    SDK,
    Case,
    Row,
    Rule,
    Sdk,
    Verdict,
    sm,
    version,
)

_POLICY = "https://aws.github.io/deep-learning-containers/reference/support_policy"
_BUILD = "https://github.com/aws/deep-learning-containers/tree/main/docker/pytorch"
_URIS = f"{SDK}/image_uri_config/pytorch.json"
_LATER = sm(framework_version=None, image_uri=IMAGE)
_ECR = "763104351884.dkr.ecr.us-east-1.amazonaws.com"
_P4D = {"instance_type": "ml.p4d.24xlarge"}
_OWN = "123456789012.dkr.ecr.us-east-1.amazonaws.com/ours:1"
_PY312 = {"py_version": "py312"}


def _unknown_version(case: Case) -> bool:
    known = images.SMP if case.model_parallel else images.VERSIONS
    return bool(case.version) and not case.model_parallel and case.version not in known


def _no_place(case: Case) -> bool:
    place = case.region
    if not case.version or place is None:
        return False
    return not images.has_smp(place) if case.model_parallel else images.account(place) is None


def _python(case: Case) -> str | None:
    """The only Python of the chosen image."""
    if case.model_parallel:
        return images.SMP.get(case.version, (None,))[0]
    return images.VERSIONS.get(case.version)


def _wrong_python(case: Case) -> list[str]:
    has = _python(case)
    return [has] if has and case.options.py_version not in {None, has} else []


RULES = (
    Rule(
        "sagemaker.framework_version",
        Verdict.REFUSED,
        lambda case: case.options.framework_version is None and case.options.image_uri is None,
        "no container is chosen",
        "image_uri: {case.later}",
        f"{SDK}/fw_utils.py",
        (Row(sm(image_uri=None), Sdk.REFUSES, says="image_uri was also None", cure=_LATER),),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.REFUSED,
        lambda case: (
            case.options.image_uri is not None
            and (case.options.framework_version or case.options.py_version) is not None
        ),
        "an image and a framework version contradict each other; the SDK takes the image and "
        "checks nothing",
        "image_uri alone, or framework_version with py_version",
        f"{SDK}/image_uris.py",
        (Row(sm(framework_version="2.8.0", image_uri=IMAGE), cure=_LATER),),
    ),
    Rule(
        "sagemaker.framework_version",
        Verdict.REFUSED,
        None,
        "AWS's images are named by full versions",
        "framework_version: 2.8.0",
        _URIS,
        (
            Row(
                version("2.8"),
                Sdk.REFUSES,
                says="2.8 is not supported",
                raw={"framework_version": "2.8", "py_version": "py312", "image_uri": None},
                cure=sm(framework_version="2.8.0"),
            ),
        ),
    ),
    Rule(
        "sagemaker.framework_version",
        Verdict.REFUSED,
        _unknown_version,
        "the SageMaker SDK knows no image of PyTorch {case.version} that our launcher runs in; "
        "the list goes from 2.0.0 to 2.8.0",
        "image_uri: {case.later}",
        _URIS,
        (
            Row(
                version("2.9.0"),
                Sdk.REFUSES,
                says="2.9.0 is not supported",
                raw=_PY312,
                cure=_LATER,
            ),
            Row(
                version("2.10.0"),
                Sdk.REFUSES,
                says="2.10.0 is not supported",
                raw=_PY312,
                cure=_LATER,
            ),
            Row(
                version("2.14.0"),
                Sdk.REFUSES,
                says="2.14.0 is not supported",
                raw=_PY312,
                cure=sm(
                    framework_version=None,
                    image_uri=f"{_ECR}/pytorch:2.14-cu133-amzn2023-sagemaker",
                ),
            ),
            Row(
                version("2.4.1"),
                Sdk.REFUSES,
                says="Unsupported pytorch version: 2.4.1",
                raw={"py_version": "py311"},
                cure=sm(framework_version="2.5.1"),
            ),
            Row(version("1.13.1"), Sdk.UNASKED, cure=sm(framework_version="2.8.0")),
        ),
    ),
    Rule(
        "sagemaker.framework_version",
        Verdict.REFUSED,
        lambda case: case.kind == "torch_distributed" and case.version in images.NOT_TORCHRUN,
        "there is an image of PyTorch {case.version}, but the SDK refuses torch_distributed with "
        "it, and 2.4.1, which it would take, has none",
        "framework_version: 2.5.1",
        f"{SDK}/fw_utils.py",
        (
            Row(
                version("2.4.0"),
                Sdk.REFUSES,
                says="2.4.0 is not supported",
                cure=sm(framework_version="2.5.1"),
            ),
        ),
    ),
    Rule(
        "sagemaker.py_version",
        Verdict.REFUSED,
        _wrong_python,
        "the image of PyTorch {case.version} has {item} only",
        "py_version: {item}, or leave it out",
        _URIS,
        (
            Row(
                version("2.8.0", py_version="py311"),
                Sdk.REFUSES,
                says="Unsupported Python version",
                cure=sm(py_version="py312"),
            ),
        ),
    ),
    Rule(
        "{item}",
        Verdict.ASKED,
        lambda case: (
            [f"sagemaker.{'framework_version' if case.version else 'image_uri'}"]
            if case.patched_until and case.patched_until < case.today
            else []
        ),
        "AWS's image of PyTorch {case.minor} has had no patches since {case.patched_until}",
        "image_uri: {case.later}",
        _POLICY,
        (
            Row(version("2.8.0"), cure=_LATER),
            Row(sm(image_uri=f"{_ECR}/pytorch-training:2.9.0-gpu-py312"), cure=_LATER),
        ),
    ),
    Rule(
        "sagemaker.region",
        Verdict.REFUSED,
        _no_place,
        "we do not know where AWS keeps its images in {case.region}",
        "the image in full, with image_uri",
        _URIS,
        (
            Row(
                version("2.8.0", region="eusc-de-east-1"),
                Sdk.REFUSES,
                says="Unsupported region",
                cure=sm(framework_version=None, image_uri=_OWN),
            ),
            Row(
                version(
                    "2.5.1",
                    distribution="smdistributed.modelparallel",
                    region="eu-south-1",
                    **_P4D,
                ),
                Sdk.REFUSES,
                says="Unsupported region",
                cure=sm(region="eu-west-1"),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.REFUSED,
        lambda case: (
            case.image is not None
            and case.image.region not in {None, case.region}
            and case.region is not None
        ),
        "lies in {case.image.region}, and the job runs in {case.region}; SageMaker takes images "
        "of its own region only",
        "the same image in {case.region}",
        f"{GUIDE}/docker-containers-troubleshooting.html",
        (
            Row(
                sm(image_uri=IMAGE.replace("us-east-1", "eu-west-1")),
                cure=sm(image_uri=IMAGE),
            ),
        ),
    ),
    Rule(
        "sagemaker.instance_type",
        Verdict.REFUSED,
        lambda case: images.has_neuron(case.type) and case.options.image_uri is None,
        "Trainium and Inferentia need a Neuron image",
        "its name as image_uri",
        "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/containers/locate-neuron-dlc-image.html",
        (
            Row(
                version("2.8.0", instance_type="ml.trn1.32xlarge"),
                Sdk.REFUSES,
                says="not supported by torch_distributed",
                cure=sm(
                    framework_version=None,
                    image_uri=f"{_ECR}/pytorch-training-neuronx:2.8.0-neuronx-py311",
                ),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.OTHER,
        lambda case: case.image is not None and case.image.cpu and images.has_gpu(case.type),
        "is an image for CPUs: it will not see the GPUs of {case.type}",
        "an image for GPUs: {case.later}",
        _BUILD,
        (Row(sm(image_uri=CPU_IMAGE), cure=_LATER),),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.UNKNOWN,
        lambda case: case.kind == "mpi" and case.foreign,
        "mpirun needs Open MPI, sshd and mpi4py in the image; whether this one has them cannot be "
        "known from here",
        "distribution: torch_distributed, which needs none of them",
        "https://github.com/aws/sagemaker-training-toolkit#readme",
        (
            Row(
                sm(distribution="mpi", image_uri=_OWN),
                cure=sm(distribution="torch_distributed"),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.UNKNOWN,
        lambda case: case.mpirun and case.image is not None and case.image.repository == "pytorch",
        "AWS's launcher needs mpi4py under mpirun, and the recipe of AWS's images since 2.11 does "
        "not name it; whether it is there cannot be known from here",
        "distribution: torch_distributed",
        _BUILD,
        (
            Row(
                sm(
                    distribution="mpi",
                    image_uri=f"{_ECR}/pytorch:2.14-cu133-amzn2023-sagemaker",
                ),
                cure=sm(distribution="torch_distributed"),
            ),
        ),
    ),
    Rule(
        "sagemaker.image_uri",
        Verdict.UNKNOWN,
        lambda case: case.foreign and case.kind == "torch_distributed",
        "nothing is known of this image: it needs sagemaker-training and sagemaker-pytorch-"
        "training, PyTorch, and Python 3.10 or later",
        None,
        "https://github.com/aws/sagemaker-pytorch-training-toolkit#readme",
        (Row(sm(image_uri=_OWN)),),
        quiet=True,
    ),
)
