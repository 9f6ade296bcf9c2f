"""The only file that knows the SageMaker SDK (2.x): it asks what an estimator would send.

The question is put to a process of its own. Importing the SDK probes the machine's metadata
service, reads configuration files, prints and takes seconds, and its `fit` reports to AWS. The
child has homes without configuration, no credentials, and sockets that refuse to connect.

As a program: ``python -P sdk.py arguments.json request.json``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploykit.backends.sagemaker.options import Options
    from deploykit.model import JobSpec

_DISTRIBUTIONS: dict[str, dict[str, Any] | None] = {
    "torch_distributed": {"torch_distributed": {"enabled": True}},
    "pytorchddp": {"pytorchddp": {"enabled": True}},
    "smdistributed": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "none": None,
}
_TALK = ("socket.connect", "socket.getaddrinfo", "socket.gethostbyname", "socket.sendto")


def available() -> bool:
    """Whether the SDK is installed, in a version that still has estimators. Imports nothing."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("sagemaker").split(".")[0] == "2"
    except PackageNotFoundError:
        return False


def arguments(job: JobSpec, options: Options, *, run: str, bundle: str) -> dict[str, Any]:
    """What a person would write for this job in terms of the SDK, as plain data."""
    from deploykit.backends.sagemaker import images, request
    from deploykit.backends.sagemaker.options import region
    from deploykit.contract import LAUNCH

    version = options.framework_version
    python = options.py_version or (images.VERSIONS[version] if version else None)
    estimator = {
        "entry_point": LAUNCH,
        "source_dir": request.code(options, bundle),
        "role": options.role,
        "instance_count": job.resources.nodes,
        "instance_type": options.instance_type,
        "framework_version": version,
        "py_version": python,
        "image_uri": options.image_uri,
        "distribution": _DISTRIBUTIONS[options.distribution],
        "hyperparameters": request.user_hyperparameters(job),
        "environment": request.environment(job, run),
        "volume_size": options.volume_size,
        "max_run": job.resources.time_limit,
        "use_spot_instances": options.spot,
        "max_wait": options.max_wait,
        "max_retry_attempts": job.retries or None,
        "output_path": request.output(job, options),
        "checkpoint_s3_uri": job.checkpoints,
        "checkpoint_local_path": request.CHECKPOINTS if job.checkpoints else None,
        "subnets": list(options.subnets) or None,
        "security_group_ids": list(options.security_group_ids) or None,
        "encrypt_inter_container_traffic": options.encrypt_inter_container_traffic,
        "keep_alive_period_in_seconds": options.keep_alive,
        "tags": dict(options.tags) or None,
        "debugger_hook_config": False,
        "disable_profiler": True,
    }
    return {
        "region": region(options),
        "bucket": options.bucket,
        "estimator": estimator,
        "inputs": dict(job.data) or None,
        "run": run,
    }


def command(asked: Path, answer: Path) -> list[str]:
    """The program that reads `asked` and writes `answer`."""
    return [sys.executable, "-P", __file__, str(asked), str(answer)]


def surroundings(folder: Path) -> dict[str, str]:
    """The child's environment: nothing of AWS or the SDK, and `folder` for every home."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("AWS_", "SAGEMAKER_", "SM_", "XDG_", "MLFLOW_"))
    }
    return {
        **kept,
        "AWS_EC2_METADATA_DISABLED": "true",
        "HOME": str(folder),
        "SAGEMAKER_SUPPRESS_V2_WARNING": "1",
        "XDG_CONFIG_DIRS": str(folder),
        "XDG_CONFIG_HOME": str(folder),
    }


def intercepted(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The request that `PyTorch(...).fit()` would send. Raises ValueError where the SDK refuses."""
    import boto3
    from sagemaker.fw_utils import UploadedCode
    from sagemaker.inputs import TrainingInput
    from sagemaker.pytorch.estimator import PyTorch
    from sagemaker.session import Session

    caught: list[dict[str, Any]] = []
    session: Any = Session(
        boto3.Session("none", "none", region_name=asked["region"]),
        default_bucket=asked["bucket"],
    )
    session._intercept_create_request = lambda request, *_: caught.append(request)  # noqa: SLF001
    estimator: Any = PyTorch(sagemaker_session=session, **asked["estimator"])
    # the bundle is uploaded by us; the SDK would drop the folder of the entry point
    estimator._stage_user_code_in_s3 = lambda: UploadedCode(  # noqa: SLF001
        s3_prefix=estimator.source_dir, script_name=estimator.entry_point
    )
    inputs = {name: TrainingInput(place) for name, place in (asked["inputs"] or {}).items()}
    estimator.fit(inputs or None, wait=False, job_name=asked["run"])
    return caught[0]


def cut_off() -> None:
    """Let this process reach nobody from here on. Cannot be undone."""

    def refuse(event: str, _: Any) -> None:
        if event in _TALK:
            raise OSError("the SageMaker SDK is only asked, and may not talk to anybody")

    sys.addaudithook(refuse)


def main(asked: Path, answer: Path) -> None:
    cut_off()
    result: dict[str, Any]
    try:
        result = {"request": intercepted(json.loads(asked.read_text()))}
    except ValueError as error:
        result = {"refused": str(error)}
    answer.write_text(json.dumps(result))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
