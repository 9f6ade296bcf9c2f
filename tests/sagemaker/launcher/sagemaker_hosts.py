"""A CreateTrainingJob request, run by the real launcher that AWS's PyTorch images start.

What the service does before it starts a container is done here: write the configuration files,
download the channels, set the request's environment. The source is fetched by the toolkit itself,
from the S3 at `endpoint`. Not done: checkpoints and results are not copied to S3.

By default each host is a folder in the place of /opt/ml (the toolkit reads
``SAGEMAKER_BASE_DIR``) and an address of this machine, 127.0.0.1, 127.0.0.2 and so on. mpirun needs
hosts that are more than that: see `sagemaker_machines.py`.
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
from dataclasses import dataclass
from pathlib import Path

import boto3

ROOT = Path(__file__).resolve().parents[3]
PROGRAMS = ROOT / ".venv-sagemaker" / "bin"
BASE = "/opt/ml"
_TAIL = 4000


class LauncherFailedError(AssertionError):
    """A host ended with an error, or not at all; the message holds its log."""


@dataclass(frozen=True)
class Host:
    """Where a container runs. `folder` is what the container sees as `base`."""

    name: str
    folder: Path
    base: str
    interface: str = "lo"
    enter: tuple[str, ...] = ()
    """What makes a program run inside."""


def on_loopback(folder, count):
    """Hosts that are addresses of this machine, with folders in `folder`."""
    places = [folder / f"host-{number}" for number in range(count)]
    return [Host(f"127.0.0.{at}", place, str(place)) for at, place in enumerate(places, start=1)]


def run_on_hosts(request, endpoint, hosts, *, timeout=600, image=None):
    """Run `request` unmodified on `hosts`; the folders ``output/data`` of each, in order.

    `endpoint` is the URL of a server that holds the source, `image` are variables that the
    container's image sets. Hosts' logs are ``log.txt`` in their folders. Raises
    LauncherFailedError.
    """
    groups = _groups(request)
    assert len(hosts) == len(groups)
    assert (PROGRAMS / "train").exists(), "run tests/sagemaker/launcher/environment.sh first"
    for host in hosts:
        _prepare(host, hosts, groups, request, endpoint)
    with _alone(), contextlib.ExitStack() as stack:
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
    """What the service leaves in /opt/ml before a container starts."""
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
        place = channel["DataSource"]["S3DataSource"]["S3Uri"]
        _download(place, host.folder / "input" / "data" / channel["ChannelName"], endpoint)


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


def _download(place, folder, endpoint):
    bucket, _, prefix = place.removeprefix("s3://").partition("/")
    s3 = boto3.client("s3", "us-east-1", endpoint_url=endpoint, **_keys("aws_access_key_id"))
    for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix):
        for item in page.get("Contents", []):
            below = item["Key"].removeprefix(prefix).lstrip("/")
            file = folder / (below or Path(prefix).name)  # one object keeps its own name
            file.parent.mkdir(parents=True, exist_ok=True)
            s3.download_file(bucket, item["Key"], str(file))


def _keys(first):
    return {first: "testing", "aws_secret_access_key": "testing"}


def _environment(host, request, endpoint):
    """The container's environment. Where /opt/ml has another name, values have it too."""
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
        "PATH": f"{PROGRAMS}:/usr/sbin:/usr/bin:/sbin:/bin",
        "S3_ENDPOINT_URL": endpoint,
        "SAGEMAKER_BASE_DIR": host.base,
        "SAGEMAKER_TRAINING_MODULE": "sagemaker_pytorch_container.training:main",
        "TRAINING_JOB_NAME": request["TrainingJobName"],
    }


def _command(host, request):
    """The request's own entrypoint, else what the image has."""
    how = request["AlgorithmSpecification"]
    words = how.get("ContainerEntrypoint", []) + how.get("ContainerArguments", ["train"])
    return [_moved(word, host) for word in words]


def _moved(text, host):
    """Where /opt/ml has another name, a text has it too."""
    return text.replace(f"{BASE}/", f"{host.base}/")


@contextlib.contextmanager
def _container(host, request, environment):
    """The launcher in a session of its own, which ends with the block at the latest."""
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
    """Return when every host has ended well. Raises LauncherFailedError with the logs."""
    end = time.monotonic() + timeout
    while True:
        codes = [process.poll() for process in running]
        if all(code == 0 for code in codes):
            return
        if any(codes) or time.monotonic() > end:
            time.sleep(1)  # the other hosts' last words
            logs = [
                f"--- {one.name}\n{(one.folder / 'log.txt').read_text()[-_TAIL:]}" for one in hosts
            ]
            raise LauncherFailedError(f"the hosts' exit codes are {codes}\n" + "\n".join(logs))
        time.sleep(0.2)


@contextlib.contextmanager
def _alone():
    """The toolkit's port 7777 is a constant: one job at a time on this machine."""
    with (Path(tempfile.gettempdir()) / "deploykit-test-port-7777.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
