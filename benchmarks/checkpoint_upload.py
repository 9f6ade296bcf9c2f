"""A step of the trainer while a checkpoint is copied to a bucket, beside its other steps.

    python benchmarks/checkpoint_upload.py [--size 1000000000] [--seconds 40] [--turns 5]

The script saves one checkpoint and trains on; the launcher copies it once it is complete. The rank
has a core to itself; the launcher and the moto server in the place of S3 share the others. An idle
loop keeps these busy for the whole run, since any work on another core slows a step by 2% or so.
What counts is the median step during the copy by the median of the others, and of that the median
turn. Returns 1 if it is above the target.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import boto3

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.aws_server import moto_server, recorder

CHECKOUT = Path(__file__).resolve().parent.parent
TARGET = 1.01
_SCRIPT = """\
import json, os, pathlib, sys, time
os.sched_setaffinity(0, {0})
import torch
torch.set_num_threads(1)
folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"], "step-1")
folder.mkdir()
with (folder / "weights.bin").open("wb") as file:
    for _ in range(int(sys.argv[1]) // 10**7):
        file.write(os.urandom(10**7))
steps, values, end = [], torch.randn(400, 400), time.time() + float(sys.argv[2])
while (begun := time.time()) < end:
    values = torch.tanh(values @ values)
    steps.append((begun, time.time() - begun))
pathlib.Path(sys.argv[3]).write_text(json.dumps(steps))
"""
_JOB = """\
name: step
entrypoint: {{script: train.py, args: ["{size}", "{seconds}", {steps}]}}
resources: {{processes_per_node: 1, time_limit: 10m}}
checkpoints: s3://my-bucket/step
"""


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 1 if a step is slower than the target allows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", type=int, default=1_000_000_000, metavar="BYTES")
    parser.add_argument("--seconds", type=int, default=40, metavar="N")
    parser.add_argument("--turns", type=int, default=5, metavar="N")
    options = parser.parse_args(argv)
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {0})
    os.environ |= {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}
    os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "PYTHONPATH": str(CHECKOUT)}
    busy = subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
    try:
        ratios = [_turn(options) for _ in range(options.turns)]
    finally:
        busy.kill()
    print(f"ratio: {statistics.median(ratios):.4f} (target: {TARGET})")
    return 0 if statistics.median(ratios) <= TARGET else 1


def _turn(options: argparse.Namespace) -> float:
    """The median step during the copy by the median of the others."""
    copies: list[float] = []
    with tempfile.TemporaryDirectory() as name, moto_server() as port, recorder(port) as server:
        here = Path(name)
        os.environ |= {"AWS_ENDPOINT_URL": server.endpoint, "DEPLOYKIT_HOME": str(here / "home")}
        boto3.client("s3").create_bucket(Bucket="my-bucket")

        def noted(request: Any, forward: Callable[[], Any]) -> Any:
            if len(request.body) > 1 << 20:
                copies.append(time.time())
            return forward()

        server.respond = noted
        (here / "train.py").write_text(_SCRIPT)
        job = _JOB.format(
            size=options.size, seconds=options.seconds, steps=json.dumps(str(here / "steps.json"))
        )
        (here / "job.yaml").write_text(job)
        words = [sys.executable, "-m", "deploykit", "submit", "-b", "local", "--wait"]
        done = subprocess.run(words, cwd=here, capture_output=True, text=True, check=False)
        if done.returncode or not copies:
            sys.exit(done.stdout + done.stderr)
        steps = json.loads((here / "steps.json").read_text())
    during = [seconds for begun, seconds in steps if copies[0] <= begun <= copies[-1]]
    others = [seconds for begun, seconds in steps if not copies[0] <= begun <= copies[-1]]
    ratio = statistics.median(during) / statistics.median(others)
    print(
        f"{len(during)} steps in the {copies[-1] - copies[0]:.1f} s of the copy: median "
        f"{statistics.median(during) * 1e3:.3f} ms; {len(others)} others: "
        f"{statistics.median(others) * 1e3:.3f} ms; ratio {ratio:.4f}"
    )
    return ratio


if __name__ == "__main__":
    sys.exit(main())
