"""A CreateTrainingJob request, run by the real launcher that AWS's PyTorch images start.

Each host is a folder in the place of /opt/ml (the toolkit reads ``SAGEMAKER_BASE_DIR``) and an
address of this machine, 127.0.0.1, 127.0.0.2 and so on. What the service does before it starts a
container is done here: write the configuration files, download the channels, set the request's
environment. The source is fetched by the toolkit itself, from the S3 at `endpoint`.

Not done: checkpoints and results are not copied to S3.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import boto3

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / ".venv-sagemaker" / "bin"
_BASE = "/opt/ml"
_TAIL = 4000


class LauncherFailedError(AssertionError):
    """A host ended with an error, or not at all; the message holds its log."""


def run_on_hosts(request, endpoint, hosts, folder, *, timeout=240, image=None):
    """Run `request` unmodified on `hosts` hosts; the folders ``output/data`` of each, in order.

    `endpoint` is the URL of a server that holds the source, `folder` an existing empty folder,
    `image` are variables that the container's image sets. Hosts' logs are
    ``folder/host-N/log.txt``. Raises LauncherFailedError.
    """
    assert hosts == request["ResourceConfig"]["InstanceCount"]
    assert (PROGRAMS / "train").exists(), "run tests/sagemaker/launcher/environment.sh first"
    names = [f"127.0.0.{number + 1}" for number in range(hosts)]
    bases = [folder / f"host-{number}" for number in range(hosts)]
    for base, name in zip(bases, names, strict=True):
        _prepare(base, name, names, request, endpoint)
    with _alone(), contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                _container(base, {**(image or {}), **_environment(base, request, endpoint)})
            )
            for base in bases
        ]
        _wait(running, bases, timeout)
    return [base / "output" / "data" for base in bases]


def _prepare(base, name, names, request, endpoint):
    """What the service leaves in /opt/ml before a container starts."""
    for part in ("input/config", "input/data", "output/data", "model", "code", "checkpoints"):
        (base / part).mkdir(parents=True)
    channels = request.get("InputDataConfig", [])
    group = {
        "instance_group_name": "homogeneousCluster",
        "instance_type": request["ResourceConfig"]["InstanceType"],
        "hosts": names,
    }
    configuration = {
        "hyperparameters": request["HyperParameters"],
        "inputdataconfig": {
            channel["ChannelName"]: {
                "TrainingInputMode": "File",
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
            for channel in channels
        },
        "resourceconfig": {
            "current_host": name,
            "hosts": names,
            "current_instance_type": group["instance_type"],
            "current_group_name": group["instance_group_name"],
            "instance_groups": [group],
            "network_interface_name": "lo",
        },
    }
    for file, content in configuration.items():
        (base / "input" / "config" / f"{file}.json").write_text(json.dumps(content))
    for channel in channels:
        place = channel["DataSource"]["S3DataSource"]["S3Uri"]
        _download(place, base / "input" / "data" / channel["ChannelName"], endpoint)


def _download(place, folder, endpoint):
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", "us-east-1", endpoint_url=endpoint, **_keys("aws_access_key_id"))
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            file = folder / item["Key"].removeprefix(prefix).lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(file))


def _keys(first):
    return {first: "testing", "aws_secret_access_key": "testing"}


def _environment(base, request, endpoint):
    """The container's environment. A bind mount of /opt/ml is played by changing its name."""
    chosen = {
        name: value.replace(_BASE, str(base), 1) if value.startswith(f"{_BASE}/") else value
        for name, value in request["Environment"].items()
    }
    return {
        **chosen,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": json.loads(request["HyperParameters"]["sagemaker_region"]),
        "AWS_SECRET_ACCESS_KEY": "testing",
        "HOME": str(base),
        "PATH": f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin",
        "S3_ENDPOINT_URL": endpoint,
        "SAGEMAKER_BASE_DIR": str(base),
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "TRAINING_JOB_NAME": request["TrainingJobName"],
    }


@contextlib.contextmanager
def _container(base, environment):
    """The launcher in a session of its own, which ends with the block at the latest."""
    with (base / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [PROGRAMS / "train"],
            cwd=base,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(running, bases, timeout):
    """Return when every host has ended well. Raises LauncherFailedError with the logs."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in running]
        if all(code == 0 for code in codes):
            return
        if any(codes) or time.monotonic() > end:
            time.sleep(1)  # the other hosts' last words
            logs = [f"--- {base.name}\n{(base / 'log.txt').read_text()[-_TAIL:]}" for base in bases]
            raise LauncherFailedError(f"the hosts' exit codes are {codes}\n" + "\n".join(logs))
        time.sleep(0.2)


@contextlib.contextmanager
def _alone():
    """The toolkit's port 7777 is a constant: one job at a time on this machine."""
    with (Path(tempfile.gettempdir()) / "deploykit-test-port-7777.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
