"""Run a CreateTrainingJob request with the real launcher of AWS's PyTorch images.

Does what the service does before it starts a container: writes the configuration files, downloads
the channels, sets the request's environment. The toolkit itself downloads the source, from the S3
at `endpoint`. Does not copy checkpoints and results to S3.

A host is a folder instead of /opt/ml (the toolkit reads ``SAGEMAKER_BASE_DIR``) and a loopback
address, 127.0.0.1, 127.0.0.2 and so on. mpirun needs real hosts: see `sagemaker_namespaces.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import boto3

ROOT = Path(__file__).resolve().parents[4]
PROGRAMS = ROOT / ".venv-sagemaker" / "bin"
TRAIN = Path(__file__).with_name("bin")
BASE = "/opt/ml"
_TAIL = 4000


class LauncherFailedError(AssertionError):
    """A host failed or timed out; the message contains its log."""


@dataclass(frozen=True)
class Host:
    """Where a container runs. The container sees `folder` as `base`."""

    name: str
    folder: Path
    base: str
    interface: str = "lo"
    enter: tuple[str, ...] = ()
    """The command that runs a program on the host."""


def on_loopback(folder, count):
    """Hosts on loopback addresses, with folders in `folder`."""
    folders = [folder / f"host-{number}" for number in range(count)]
    return [Host(f"127.0.0.{at}", one, str(one)) for at, one in enumerate(folders, start=1)]


def run_on_hosts(request, endpoint, hosts, *, timeout=600, image=None, earlier=()):
    """Run `request` unmodified on `hosts`; returns the folder ``output/data`` of each, in order.

    `endpoint` is the URL of the S3 that holds the source; `image` holds the variables that the
    container's image sets. Each host gets the checkpoints of all `earlier` hosts. The log of a host
    is ``log.txt`` in its folder. Raises LauncherFailedError.
    """
    groups = _groups(request)
    assert len(hosts) == len(groups)
    assert (PROGRAMS / "train").exists(), (
        "run tests/backends/sagemaker/launcher/environment.sh first"
    )
    for host in hosts:
        _prepare(host, hosts, groups, request, endpoint)
        for old in earlier:
            _copy(old.folder / "checkpoints", host.folder / "checkpoints")
    with _exclusive_port(), contextlib.ExitStack() as stack:
        running = [
            stack.enter_context(
                _container(
                    host, request, {**(image or {}), **_environment(host, request, endpoint)}
                )
            )
            for host in hosts
        ]
        _wait(running, hosts, timeout)
    return [host.folder / "output" / "data" for host in hosts]


def _groups(request):
    """The instance group of each host, by name and type."""
    resources = request["ResourceConfig"]
    if "InstanceGroups" not in resources:
        one = ("homogeneousCluster", resources["InstanceType"])
        return [one] * resources["InstanceCount"]
    return [
        (group["InstanceGroupName"], group["InstanceType"])
        for group in resources["InstanceGroups"]
        for _ in range(group["InstanceCount"])
    ]


def _prepare(host, hosts, groups, request, endpoint):
    """Write what the service puts into /opt/ml before it starts a container."""
    for part in ("input/config", "input/data", "output/data", "model", "code", "checkpoints"):
        (host.folder / part).mkdir(parents=True)
    channels = request.get("InputDataConfig", [])
    configuration = {
        "hyperparameters": {
            name: _moved(value, host) if name == "sagemaker_submit_directory" else value
            for name, value in request["HyperParameters"].items()
        },
        "inputdataconfig": {
            channel["ChannelName"]: {
                "TrainingInputMode": "File",
                "S3DistributionType": "FullyReplicated",
                "RecordWrapperType": "None",
            }
            for channel in channels
        },
        "resourceconfig": _resources(host, hosts, groups),
    }
    for file, content in configuration.items():
        (host.folder / "input" / "config" / f"{file}.json").write_text(json.dumps(content))
    for channel in channels:
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        _download(uri, host.folder / "input" / "data" / channel["ChannelName"], endpoint)


def _resources(host, hosts, groups):
    group, kind = groups[hosts.index(host)]
    return {
        "current_host": host.name,
        "hosts": [one.name for one in hosts],
        "current_instance_type": kind,
        "current_group_name": group,
        "instance_groups": [
            {
                "instance_group_name": name,
                "instance_type": kind,
                "hosts": [
                    one.name for one, own in zip(hosts, groups, strict=True) if own[0] == name
                ],
            }
            for name, kind in dict.fromkeys(groups)
        ],
        "network_interface_name": host.interface,
    }


def _download(uri, folder, endpoint):
    bucket, _, prefix = uri.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", "us-east-1", endpoint_url=endpoint, **_keys("aws_access_key_id"))
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            below = item["Key"].removeprefix(prefix).lstrip("/")
            file = folder / (below or Path(prefix).name)  # one object keeps its own name
            file.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(file))


def _copy(source, target):
    """Copy a folder as the service does over S3: with the times of the download."""
    shutil.copytree(source, target, dirs_exist_ok=True, copy_function=shutil.copyfile)


def _keys(first):
    return {first: "testing", "aws_secret_access_key": "testing"}


def _environment(host, request, endpoint):
    """The container's environment. Paths below /opt/ml are those of the host."""
    chosen = {
        name: value.replace(BASE, host.base, 1) if value.startswith(f"{BASE}/") else value
        for name, value in request["Environment"].items()
    }
    return {
        **chosen,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_REGION": json.loads(request["HyperParameters"]["sagemaker_region"]),
        "AWS_SECRET_ACCESS_KEY": "testing",
        "HOME": host.base,
        "PATH": f"{TRAIN}:{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin",
        "S3_ENDPOINT_URL": endpoint,
        "SAGEMAKER_BASE_DIR": host.base,
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "TRAINING_JOB_NAME": request["TrainingJobName"],
    }


def _command(host, request):
    """The request's entrypoint, else the image's."""
    how = request["AlgorithmSpecification"]
    words = how.get("ContainerEntrypoint", []) + how.get("ContainerArguments", ["train"])
    return [_moved(word, host) for word in words]


def _moved(text, host):
    """Replace /opt/ml by the host's folder."""
    return text.replace(f"{BASE}/", f"{host.base}/")


@contextlib.contextmanager
def _container(host, request, environment):
    """The launcher in a new session, which is killed at the end of the block."""
    with (host.folder / "log.txt").open("wb") as log:
        process = subprocess.Popen(
            [*host.enter, *_command(host, request)],
            cwd=host.folder,
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


def _wait(running, hosts, timeout):
    """Return when every host has succeeded. Raises LauncherFailedError with the logs."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in running]
        if all(code == 0 for code in codes):
            return
        if any(codes) or time.monotonic() > end:
            time.sleep(1)  # for the last lines of the other hosts
            logs = [
                f"--- {one.name}\n{(one.folder / 'log.txt').read_text()[-_TAIL:]}" for one in hosts
            ]
            raise LauncherFailedError(f"the hosts' exit codes are {codes}\n" + "\n".join(logs))
        time.sleep(0.2)


@contextlib.contextmanager
def _exclusive_port():
    """Lock the toolkit's port 7777, which is fixed: one job at a time."""
    with (Path(tempfile.gettempdir()) / "deploykit-test-port-7777.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
