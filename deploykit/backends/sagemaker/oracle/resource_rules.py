"""Images (PyTorch version, Python, region, contents) and instances (type, groups, disks)."""

from __future__ import annotations

from deploykit.backends.sagemaker import catalog
from deploykit.backends.sagemaker.oracle.oracle_rule import Case, OracleRule, Verdict
from deploykit.backends.sagemaker.oracle.sources import API, GUIDE, LAUNCHER, SDK
from deploykit.decode import did_you_mean

_POLICY = "https://aws.github.io/deep-learning-containers/reference/support_policy"
_BUILD = "https://github.com/aws/deep-learning-containers/tree/main/docker/pytorch"
_NEURON = "https://awsdocs-neuron.readthedocs-hosted.com/en/latest/containers/locate-neuron-dlc-image.html"
_URIS = f"{SDK}/image_uri_config/pytorch.json"
_HETERO = f"{GUIDE}/train-heterogeneous-cluster.html"
_TYPES = "https://aws.amazon.com/sagemaker/ai/pricing/"
_RESOURCES = f"{API}/API_ResourceConfig.html"
_DEFAULT_VOLUME = 30


def _no_image_account(case: Case) -> bool:
    if not case.version or case.region is None:
        return False
    if case.model_parallel:
        return not catalog.has_smp(case.region)
    return catalog.account(case.region) is None


def _other_python(case: Case) -> list[str]:
    """The only Python of the chosen image, if `py_version` names another."""
    python = catalog.VERSIONS.get(case.version)
    if case.model_parallel:
        python = catalog.SMP_IMAGES.get(case.version, (None, None))[0]
    return [python] if python and case.options.py_version not in {None, python} else []


def _unpatched(case: Case) -> list[str]:
    """The key that chooses an image whose patches have ended."""
    if case.patched_until is None or case.patched_until >= case.today:
        return []
    return [f"sagemaker.{'framework_version' if case.version else 'image_uri'}"]


def _other_groups(case: Case) -> list[str]:
    """The groups that do not train."""
    if not case.mpirun or case.group is None:
        return []
    return [group.name for group in case.options.instance_groups if group != case.group]


def _bad_group_name(case: Case) -> list[str]:
    """What is wrong with `distribution_group`, in words."""
    names = [group.name for group in case.options.instance_groups]
    wanted = case.options.distribution_group
    if not names or wanted in names:
        return []
    if wanted is None:
        return ["is required with instance_groups: it names the group that trains"]
    hint = did_you_mean(wanted, names)
    return [f"is {wanted}, which is not in instance_groups{f' ({hint})' if hint else ''}"]


def _duplicate_groups(case: Case) -> list[str]:
    names = [group.name for group in case.options.instance_groups]
    return sorted({name for name in names if names.count(name) > 1})


def _with_nvme(case: Case) -> list[str]:
    return [kind for kind in dict.fromkeys(case.types) if catalog.has_nvme(kind)]


IMAGES = (
    OracleRule(
        id="no-image",
        path="sagemaker.framework_version",
        verdict=Verdict.REFUSED,
        when=lambda case: case.options.framework_version is None and case.options.image_uri is None,
        reason="no image is chosen",
        nearest="image_uri: {case.later_image}",
        source=f"{SDK}/fw_utils.py",
    ),
    OracleRule(
        id="image-and-version",
        path="sagemaker.image_uri",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.options.image_uri is not None
            and (case.options.framework_version or case.options.py_version) is not None
        ),
        reason="conflicts with framework_version and py_version; the SDK uses the image and "
        "checks nothing",
        nearest="image_uri alone, or framework_version with py_version",
        source=f"{SDK}/image_uris.py",
    ),
    OracleRule(
        id="short-version",
        path="sagemaker.framework_version",
        verdict=Verdict.REFUSED,
        when=None,
        reason="AWS names its images by full versions",
        nearest="framework_version: 2.8.0",
        source=_URIS,
    ),
    OracleRule(
        id="unknown-version",
        path="sagemaker.framework_version",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            bool(case.version) and not case.model_parallel and case.version not in catalog.VERSIONS
        ),
        reason="the SageMaker SDK knows no image of PyTorch {case.version} that supports "
        "deploykit's launcher; supported are 2.0.0 to 2.8.0",
        nearest="image_uri: {case.later_image}",
        source=_URIS,
    ),
    OracleRule(
        id="version-without-torchrun",
        path="sagemaker.framework_version",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.distribution == "torch_distributed" and case.version in catalog.NOT_TORCHRUN
        ),
        reason="an image of PyTorch {case.version} exists, but the SDK refuses torch_distributed "
        "with it; it accepts 2.4.1, which has no image",
        nearest="framework_version: 2.5.1",
        source=f"{SDK}/fw_utils.py",
    ),
    OracleRule(
        id="other-python",
        path="sagemaker.py_version",
        verdict=Verdict.REFUSED,
        when=_other_python,
        reason="the image of PyTorch {case.version} has {item} only",
        nearest="py_version: {item}, or remove it",
        source=_URIS,
    ),
    OracleRule(
        id="unpatched-image",
        path="{item}",
        verdict=Verdict.ASKED,
        when=_unpatched,
        reason="AWS's image of PyTorch {case.minor} has received no patches since "
        "{case.patched_until}",
        nearest="image_uri: {case.later_image}",
        source=_POLICY,
    ),
    OracleRule(
        id="region-without-images",
        path="sagemaker.region",
        verdict=Verdict.REFUSED,
        when=_no_image_account,
        reason="the account of AWS's images in {case.region} is not known",
        nearest="the full image name, as image_uri",
        source=_URIS,
    ),
    OracleRule(
        id="image-in-other-region",
        path="sagemaker.image_uri",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.image is not None
            and case.image.region not in {None, case.region}
            and case.region is not None
        ),
        reason="the image is in {case.image.region} and the job in {case.region}; SageMaker pulls "
        "images from the job's region only",
        nearest="the same image in {case.region}",
        source=f"{GUIDE}/docker-containers-troubleshooting.html",
    ),
    OracleRule(
        id="neuron-image",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: case.has_neuron and case.options.image_uri is None,
        reason="Trainium and Inferentia require a Neuron image",
        nearest="its name, as image_uri",
        source=_NEURON,
    ),
    OracleRule(
        id="cpu-image-on-gpus",
        path="sagemaker.image_uri",
        verdict=Verdict.OTHER,
        when=lambda case: case.image is not None and case.image.cpu and case.has_gpu,
        reason="the image is built for CPUs and cannot use the GPUs of {case.instance_type}",
        nearest="an image for GPUs: {case.later_image}",
        source=_BUILD,
    ),
    OracleRule(
        id="unknown-image-mpi",
        path="sagemaker.image_uri",
        verdict=Verdict.UNKNOWN,
        when=lambda case: case.distribution == "mpi" and case.unknown_image,
        reason="mpirun requires Open MPI, sshd and mpi4py in the image; it is not known whether "
        "this image has them",
        nearest="distribution: torch_distributed, which requires none of them",
        source="https://github.com/aws/sagemaker-training-toolkit#readme",
    ),
    OracleRule(
        id="image-without-mpi4py",
        path="sagemaker.image_uri",
        verdict=Verdict.UNKNOWN,
        when=lambda case: (
            case.mpirun and case.image is not None and case.image.repository == "pytorch"
        ),
        reason="AWS's launcher requires mpi4py with mpirun. The build recipe of AWS's images from "
        "2.11 on does not list it, so it is not known whether it is installed",
        nearest="distribution: torch_distributed",
        source=_BUILD,
    ),
    OracleRule(
        id="unknown-image",
        path="sagemaker.image_uri",
        verdict=Verdict.UNKNOWN,
        when=lambda case: case.unknown_image and case.distribution == "torch_distributed",
        reason="the contents of this image are not known: it must have sagemaker-training, "
        "sagemaker-pytorch-training, PyTorch, and Python 3.10 or later",
        source="https://github.com/aws/sagemaker-pytorch-training-toolkit#readme",
        quiet=True,
    ),
)

INSTANCES = (
    OracleRule(
        id="no-instance-type",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: not case.types,
        reason="no instance type is chosen",
        nearest="instance_type: ml.g5.12xlarge",
        source=_RESOURCES,
    ),
    OracleRule(
        id="type-and-groups",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: bool(case.options.instance_type and case.options.instance_groups),
        reason="conflicts with instance_groups",
        nearest="one of the two",
        source=f"{SDK}/job.py",
    ),
    OracleRule(
        id="no-nodes",
        path="resources.nodes",
        verdict=Verdict.REFUSED,
        when=None,
        reason="a job needs at least one node; the SDK passes on 0",
        nearest="nodes: 1",
        source=_RESOURCES,
    ),
    OracleRule(
        id="groups-train-alone",
        path="sagemaker.distribution",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            len(case.options.instance_groups) > 1 and (case.torchrun or case.distribution == "none")
        ),
        reason="with {case.distribution}, each instance group forms a separate process group and "
        "trains alone: the SDK drops the name of the group that trains",
        nearest="distribution: mpi",
        source=f"{SDK}/pytorch/estimator.py",
    ),
    OracleRule(
        id="group-without-ranks",
        path="sagemaker.instance_groups",
        verdict=Verdict.OTHER,
        when=_other_groups,
        reason="the nodes of group {item} get no ranks: each runs the program once, without RANK; "
        "the program must check SM_CURRENT_INSTANCE_GROUP",
        nearest="instance_type, so that all nodes train",
        source=LAUNCHER,
    ),
    OracleRule(
        id="bad-group-name",
        path="sagemaker.distribution_group",
        verdict=Verdict.REFUSED,
        when=_bad_group_name,
        reason="{item}",
        nearest="the name of the group that trains",
        source=_HETERO,
    ),
    OracleRule(
        id="group-name-without-groups",
        path="sagemaker.distribution_group",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.options.distribution_group is not None and not case.options.instance_groups
        ),
        reason="requires instance_groups",
        nearest="remove it",
        source=_HETERO,
    ),
    OracleRule(
        id="group-size",
        path="resources.nodes",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.group is not None and case.group.instance_count != case.job.resources.nodes
        ),
        reason="is {job.resources.nodes}, but the group that trains has "
        "{case.group.instance_count} instances; the world size is computed from nodes",
        nearest="the instance_count of group {options.distribution_group}",
        source=_HETERO,
    ),
    OracleRule(
        id="duplicate-group",
        path="sagemaker.instance_groups",
        verdict=Verdict.REFUSED,
        when=_duplicate_groups,
        reason="duplicate group name {item}",
        nearest="a unique name for each group",
        source=_HETERO,
    ),
    OracleRule(
        id="groups-in-warm-pool",
        path="sagemaker.keep_alive",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            case.options.keep_alive is not None and bool(case.options.instance_groups)
        ),
        reason="a heterogeneous cluster cannot be kept in a warm pool",
        nearest="remove keep_alive or instance_groups",
        source=f"{GUIDE}/train-warm-pools.html",
    ),
    OracleRule(
        id="no-gpus",
        path="sagemaker.instance_type",
        verdict=Verdict.REFUSED,
        when=lambda case: (
            bool(case.instance_type) and not case.has_gpu and case.job.resources.gpus_per_node > 0
        ),
        reason="{case.instance_type} has no GPU, and the job requests "
        "{job.resources.gpus_per_node} per node",
        nearest="a type with GPUs, such as ml.g5.12xlarge",
        source=_TYPES,
    ),
    OracleRule(
        id="fixed-cpus-and-memory",
        path="resources.{item}",
        verdict=Verdict.OTHER,
        when=lambda case: [
            name
            for name in ("cpus_per_node", "memory")
            if getattr(case.job.resources, name) is not None
        ],
        reason="ignored: CPUs and memory are determined by the instance type",
        nearest="remove it",
        source=_TYPES,
    ),
    OracleRule(
        id="volume-with-nvme",
        path="sagemaker.volume_size",
        verdict=Verdict.OTHER,
        when=lambda case: _with_nvme(case) if case.options.volume_size != _DEFAULT_VOLUME else [],
        reason="ignored: {item} has NVMe disks of a fixed size and gets no volume",
        nearest="remove it, or choose a type without NVMe disks",
        source=_RESOURCES,
    ),
    OracleRule(
        id="volume-key-with-nvme",
        path="sagemaker.volume_kms_key",
        verdict=Verdict.REFUSED,
        when=lambda case: _with_nvme(case) if case.options.volume_kms_key is not None else [],
        reason="{item} has NVMe disks, which are encrypted with a key of the hardware; the service "
        "refuses another key",
        nearest="remove it",
        source=_RESOURCES,
    ),
)
