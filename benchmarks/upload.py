"""The upload of a folder of data, beside a hand-written call of boto3's transfer manager.

    python benchmarks/upload.py [--files 10000] [--size 100000] [--turns 2]

A moto server on this machine takes the place of S3. Each turn uploads the same files once by
`deploykit submit`, with all that it does besides (hashes, checksums, a listing, the manifest, the
job), and once by the transfer manager with as many requests at once. What counts is the CPU time of
the client, the cheapest turn of each; the server takes most of the wall time. Returns 1 if the
ratio is above the target.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import boto3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.aws_server import moto_server

TARGET = 1.2
_JOB = """\
name: digits
entrypoint: {script: train.py}
resources: {time_limit: 5m}
data: {train: FOLDER}
sagemaker:
  role: arn:aws:iam::123456789012:role/training
  bucket: my-bucket
  region: us-east-1
  instance_type: ml.g5.xlarge
  framework_version: 2.8.0
"""
_BY_HAND = """\
import sys
from pathlib import Path
import boto3
from boto3.s3 import transfer
from botocore.config import Config

folder = Path(sys.argv[1])
client = boto3.client("s3", "us-east-1", config=Config(max_pool_connections=20))
config = transfer.TransferConfig(max_concurrency=20)
with transfer.create_transfer_manager(client, config) as manager:
    paths = [path for path in folder.rglob("*") if path.is_file()]
    futures = [
        manager.upload(str(path), "my-bucket", str(path.relative_to(folder))) for path in paths
    ]
    for future in futures:
        future.result()
"""


class Time(NamedTuple):
    cpu: float
    wall: float


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 1 if the ratio is above the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=10_000, metavar="N")
    parser.add_argument("--size", type=int, default=100_000, metavar="BYTES")
    parser.add_argument("--turns", type=int, default=2, metavar="N")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        data = _write(Path(folder), options.files, options.size)
        turns = [_turn(Path(folder), data) for _ in range(options.turns)]
    ours, by_hand = (min(times, key=lambda one: one.cpu) for times in zip(*turns, strict=True))
    for name, one in (("deploykit submit", ours), ("transfer manager", by_hand)):
        print(f"{name:<18} {one.cpu:6.1f} s of CPU, {one.wall:6.1f} s")
    ratio = ours.cpu / by_hand.cpu
    print(f"{options.files} files of {options.size} bytes: ratio {ratio:.2f} (target: {TARGET})")
    return 0 if ratio <= TARGET else 1


def _write(folder: Path, files: int, size: int) -> Path:
    data = folder / "data"
    for number in range(files):
        path = data / f"{number % 100:02}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    (folder / "train.py").write_text("print('hello')\n")
    (folder / "job.yaml").write_text(_JOB.replace("FOLDER", json.dumps(str(data))))
    (folder / ".deploykitignore").write_text("/data\n/state-*\n")
    return data


def _turn(folder: Path, data: Path) -> tuple[Time, Time]:
    """Upload the data in both ways, each to a new server."""
    submit = [sys.executable, "-m", "deploykit", "submit", "-b", "sagemaker"]
    return _time(folder, submit), _time(folder, [sys.executable, "-c", _BY_HAND, str(data)])


def _time(folder: Path, argv: list[str]) -> Time:
    with moto_server() as port, tempfile.TemporaryDirectory(prefix="state-", dir=folder) as state:
        endpoint = f"http://127.0.0.1:{port}"
        key = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        env = {**os.environ, **key, "AWS_ENDPOINT_URL": endpoint, "DEPLOYKIT_HOME": state}
        env |= {"PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        login = {name.lower(): value for name, value in key.items()}
        s3 = boto3.client("s3", "us-east-1", endpoint_url=endpoint, **login)
        s3.create_bucket(Bucket="my-bucket")
        started, before = time.monotonic(), _cpu()
        subprocess.run(argv, cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        return Time(_cpu() - before, time.monotonic() - started)


def _cpu() -> float:
    """Seconds of CPU of the clients so far; servers are waited for after each turn."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
