"""Data in and results out, beside hand-written calls of boto3's transfer manager.

    python benchmarks/transfers.py [--files 10000] [--size 100000] [--turns 2] [--tls]

A moto server on this machine takes the place of S3. Each turn uploads the same files once by
`deploykit submit` and once by the transfer manager with as many requests at once, each to a new
server; then it downloads them by `deploykit fetch` and by the transfer manager. What counts is the
CPU time of the client, the cheapest turn of each, with all that deploykit does besides: start,
hashes, checksums, a listing, the manifest, the job, the record. The server takes most of the wall
time. With `--tls` the connections are encrypted, as those to AWS are. Returns 1 if a ratio is above
the target.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import boto3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.aws_server import moto_server

CHECKOUT = Path(__file__).resolve().parent.parent
TARGET = 1.2
_JOB = """\
name: digits
entrypoint: {script: train.py}
resources: {time_limit: 5m}
sagemaker:
  role: arn:aws:iam::123456789012:role/training
  bucket: my-bucket
  region: us-east-1
  instance_type: ml.g5.xlarge
  framework_version: 2.8.0
"""
_SUBMIT = [sys.executable, "-m", "deploykit", "submit", "-b", "sagemaker", "--run", "digits"]
_RESULTS = "deploykit/runs/digits/output/"
_MANAGER = """\
import os, sys
from pathlib import Path
import boto3
from boto3.s3 import transfer
from botocore.config import Config

folder, prefix = Path(sys.argv[1]), sys.argv[2]
client = boto3.client("s3", "us-east-1", config=Config(max_pool_connections=20))
config = transfer.TransferConfig(max_concurrency=20)
with transfer.create_transfer_manager(client, config) as manager:
"""
_UPLOAD = f"""{_MANAGER}
    paths = [path for path in folder.rglob("*") if path.is_file()]
    futures = [
        manager.upload(str(path), "my-bucket", f"{{prefix}}{{path.relative_to(folder)}}")
        for path in paths
    ]
    for future in futures:
        future.result()
"""
_DOWNLOAD = f"""{_MANAGER}
    futures = []
    for page in client.get_paginator("list_objects_v2").paginate(Bucket="my-bucket", Prefix=prefix):
        for entry in page["Contents"]:
            path = folder / entry["Key"].removeprefix(prefix)
            path.parent.mkdir(parents=True, exist_ok=True)
            futures.append(manager.download("my-bucket", entry["Key"], str(path)))
    for future in futures:
        future.result()
"""


class Time(NamedTuple):
    cpu: float
    wall: float


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 1 if a ratio is above the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=10_000, metavar="N")
    parser.add_argument("--size", type=int, default=100_000, metavar="BYTES")
    parser.add_argument("--turns", type=int, default=2, metavar="N")
    parser.add_argument("--tls", action="store_true")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder, within = Path(name), True
        _write(folder, options.files, options.size)
        turns = [_turn(folder, tls=options.tls) for _ in range(options.turns)]
    print(f"{options.files} files of {options.size} bytes{' over TLS' if options.tls else ''}:")
    for action in ("upload", "download"):
        times = [[turn[f"{who} {action}"] for turn in turns] for who in ("deploykit", "boto3")]
        ours, by_hand = (min(some, key=lambda one: one.cpu) for some in times)
        ratio = ours.cpu / by_hand.cpu
        within = within and ratio <= TARGET
        print(
            f"{action:<9} deploykit {ours.cpu:6.1f} s of CPU, {ours.wall:6.1f} s; "
            f"transfer manager {by_hand.cpu:6.1f} s of CPU, {by_hand.wall:6.1f} s; "
            f"ratio {ratio:.2f} (target: {TARGET})"
        )
    return 0 if within else 1


def _write(folder: Path, files: int, size: int) -> None:
    for number in range(files):
        path = folder / "data" / f"{number % 100:02}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, size, 1 << 20):
                file.write(os.urandom(min(1 << 20, size - start)))
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "job.yaml").write_text(_JOB)
    (folder / ".deploykitignore").write_text("/data\n/state-*\n/fetched-*\n")


def _turn(folder: Path, *, tls: bool) -> dict[str, Time]:
    """The times of each transfer, by its name."""
    times, data = {}, str(folder / "data")
    with_data = [*_SUBMIT, "--set", f"data.train={json.dumps(data)}"]
    with _server(folder, tls=tls) as env:
        times["deploykit upload"] = _time(with_data, folder, env)
    by_hand = [sys.executable, "-c"]
    with _server(folder, tls=tls) as env:
        times["boto3 upload"] = _time([*by_hand, _UPLOAD, data, _RESULTS], folder, env)
        subprocess.run(_SUBMIT, cwd=folder, env=env, check=True, capture_output=True)
        with tempfile.TemporaryDirectory(prefix="fetched-", dir=folder) as to:
            fetch = [sys.executable, "-m", "deploykit", "fetch", "digits", "--to", to]
            times["deploykit download"] = _time(fetch, folder, env)
            _compare(folder / "data", Path(to, "output"))
        with tempfile.TemporaryDirectory(prefix="fetched-", dir=folder) as to:
            times["boto3 download"] = _time([*by_hand, _DOWNLOAD, to, _RESULTS], folder, env)
            _compare(folder / "data", Path(to))
    return times


def _compare(data: Path, copy: Path) -> None:
    """Raise CalledProcessError unless both folders have the same files."""
    argv = ["diff", "-rq", "--exclude=.deploykit-*", str(data), str(copy)]
    subprocess.run(argv, check=True)


@contextlib.contextmanager
def _server(folder: Path, *, tls: bool) -> Iterator[dict[str, str]]:
    """A new server with a bucket; the variables of its clients, with an empty state folder."""
    certificate, key = str(folder / "tls.crt"), str(folder / "tls.key")
    words = ["-c", certificate, "-k", key] if tls else []
    if tls and not Path(key).exists():
        argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=moto"]
        argv += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate]
        subprocess.run(argv, check=True, capture_output=True)
    with (
        tempfile.TemporaryDirectory(prefix="state-", dir=folder) as state,
        moto_server(*words) as port,
    ):
        env = {
            **os.environ,
            "AWS_ACCESS_KEY_ID": "x",
            "AWS_SECRET_ACCESS_KEY": "x",
            "AWS_ENDPOINT_URL": f"http{'s' if tls else ''}://127.0.0.1:{port}",
            **({"AWS_CA_BUNDLE": certificate} if tls else {}),
            "DEPLOYKIT_HOME": state,
            "PYTHONPATH": str(CHECKOUT),
        }
        login = {"aws_access_key_id": "x", "aws_secret_access_key": "x"}
        where = {"endpoint_url": env["AWS_ENDPOINT_URL"], "verify": certificate if tls else None}
        boto3.client("s3", "us-east-1", **where, **login).create_bucket(Bucket="my-bucket")
        yield env


def _time(argv: list[str], folder: Path, env: Mapping[str, str]) -> Time:
    """Run a program. Its CPU time is that of all ended children, to which no server belongs yet."""
    started, before = time.monotonic(), _cpu()
    subprocess.run(argv, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
    return Time(_cpu() - before, time.monotonic() - started)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
