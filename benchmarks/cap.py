"""Runs that are stopped at their cost cap, on each backend: by how much they exceed it.

    python benchmarks/cap.py [local | slurm | sagemaker]...

Two runs at once, with a cap that pays for 130 s: the reference trainer, which saves when it is told
to, and a program that ignores SIGTERM. Then the first one goes on from its checkpoint, by the words
of its status. Slurm is a real cluster on this machine; SageMaker's launcher is AWS's own, whose
request went to moto. Prints JSON, and returns 1 when a target is missed: at most 60 s are billed
over the cap, and the run went on after its last step. SageMaker's part requires root. `make
bench-cap`; eight minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TOP = HERE.parent
sys.path[:0] = [str(TOP), str(HERE)]

from slurm import cluster  # noqa: E402

SECONDS, OVERRUN = 130, 60
"""What the cap pays for, and what may be billed over it."""
MORE = 50
"""Steps of the run that goes on."""
DEAF = "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(3600)\n"
PRICES: dict[str, dict[str, object]] = {
    "local": {"price": "36 USD"},
    "slurm": {"price": "36 USD/node-hour"},
    "sagemaker": {
        "role": "arn:aws:iam::123456789012:role/training",
        "bucket": "my-bucket",
        "region": "us-east-1",
        "instance_type": "ml.p5.48xlarge",
        "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/training:latest",
        "sender": "boto3",
    },
}
HOURLY = {"local": 36, "slurm": 36, "sagemaker": 63.296}
"""USD of an hour; that of SageMaker is in the list that ships."""
WARM = ("unshare", "--time", "--boottime=86400", "--")
"""An instance that started a day ago: a fresh one is billed from its start, this machine's."""


def main() -> int:
    """Measure what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *BACKENDS], default=[])
    figures = {}
    for name in parser.parse_args().what or BACKENDS:
        with tempfile.TemporaryDirectory(prefix="cap-") as folder, BACKENDS[name]() as measured:
            os.environ["DEPLOYKIT_HOME"] = f"{folder}/state"
            figures[name] = figure(name, measured, Path(folder))
    print(json.dumps(figures, indent=1))
    return 0 if all(one["met"] for one in figures.values()) else 1


Run = Callable[[Path, str], float]
"""Runs the job of a folder under a run id until its end; the seconds that are billed."""


def figure(name: str, run: Run, folder: Path) -> dict[str, Any]:
    """Both runs at once, and the one that goes on."""
    cases = {"saves": trainer(folder, name), "deaf": deaf(folder, name)}
    with ThreadPoolExecutor(1 if name == "sagemaker" else 2) as pool:  # its launcher has one port
        seconds = pool.map(lambda case: run(cases[case], case), cases)
        billed = dict(zip(cases, seconds, strict=True))
    paid = int(round(SECONDS * HOURLY[name] / 3600, 2) * 3600 / HOURLY[name])
    last = steps(folder, "saves")[-1]
    write(cases["saves"], name, "train.py", ["--steps", str(last + MORE)], going_on(name))
    run(cases["saves"], "goes-on")
    after = steps(folder, "goes-on")
    over = {case: round(time - paid, 1) for case, time in billed.items()}
    met = max(over.values()) <= OVERRUN and after == list(range(last + 1, last + MORE + 1))
    return {
        "paid_s": paid,
        "billed_s": billed,
        "over_s": over,
        "stopped_at_step": last,
        "went_on_at_step": after[0],
        "met": met,
    }


def trainer(folder: Path, backend: str) -> Path:
    """The job of the reference trainer, without an end, and without a checkpoint of its own."""
    own = folder / "trainer"
    own.mkdir()
    write(own, backend, "train.py", ["--checkpoint-every", "100000000"], {})
    return own


def deaf(folder: Path, backend: str) -> Path:
    """The job of a program that ignores SIGTERM."""
    own = folder / "deaf"
    own.mkdir()
    (own / "deaf.py").write_text(DEAF)
    write(own, backend, "deaf.py", [], {})
    return own


def write(
    folder: Path, backend: str, script: str, args: list[str], keys: Mapping[str, object]
) -> None:
    """The job file, with a cap unless it goes on."""
    more = ["--epochs", "100000000", "--batch-size", "512", "--log-every", "1"]
    job: dict[str, object] = {
        "name": "capped",
        "backend": backend,
        "entrypoint": {"script": script, "args": [*more, *args] if args else []},
        "resources": {"time_limit": "1h", "processes_per_node": 1},
        "env": {"OMP_NUM_THREADS": "1"},
        backend: PRICES[backend],
        **keys,
    }
    if "--steps" not in args:
        cap = f"{SECONDS * HOURLY[backend] / 3600:.2f} USD"
        job |= {"max_cost": cap, "stop_at_cap": True}
    if script == "train.py":
        job["source"] = str(TOP / "entrypoints")
    if backend == "sagemaker":
        job["checkpoints"] = "s3://my-bucket/checkpoints"
    (folder / "job.yaml").write_text(json.dumps(job))


def going_on(backend: str) -> dict[str, object]:
    """What the status of the stopped run says, so that another goes on from its checkpoint."""
    if backend == "sagemaker":  # its checkpoints are at the same place in S3
        return {}
    data = deploykit("status", "saves", "--json")
    (row,) = json.loads(data)
    found = re.search(r"--set checkpoints=(\S+)", row["reason"])
    if found is None:
        sys.exit(f"the status does not say how to go on: {row['reason']}")
    return {"checkpoints": found[1]}


def deploykit(*words: str, folder: Path | None = None) -> str:
    """What a command prints, whatever its exit code."""
    argv = [sys.executable, "-m", "deploykit", *words]
    env = {**os.environ, "PYTHONPATH": str(TOP)}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode in {1, 2}:
        sys.exit(done.stderr)
    return done.stdout


def steps(folder: Path, run: str) -> list[int]:
    """The steps that a run has trained."""
    (path,) = (folder / "state" / "runs" / run).rglob("metrics.jsonl")
    lines = path.read_text().splitlines()
    return [line["step"] for line in map(json.loads, lines) if "loss" in line]


@contextlib.contextmanager
def local() -> Iterator[Run]:
    """Here: billed is the time of the whole command."""

    def run(folder: Path, name: str) -> float:
        began = time.monotonic()
        deploykit("submit", "--run", name, "--wait", folder=folder)
        return time.monotonic() - began

    yield run


@contextlib.contextmanager
def slurm() -> Iterator[Run]:
    """A cluster of four nodes: billed is what it says that the job has run."""

    def run(folder: Path, name: str) -> float:
        deploykit("submit", "--run", name, "--wait", folder=folder)
        claim = Path(os.environ["DEPLOYKIT_HOME"]) / "runs" / name / "claim"
        argv = ["scontrol", "show", "job", str(claim.readlink())]
        text = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        times = [re.search(rf"\b{key}=(\S+)", text) for key in ("StartTime", "EndTime")]
        start, end = (datetime.fromisoformat(time[1]) for time in times if time)
        return (end - start).total_seconds()

    with cluster(accounting=False):
        yield run


@contextlib.contextmanager
def sagemaker() -> Iterator[Run]:
    """AWS's launcher in its environment: billed is the time from its start to its end."""
    import boto3

    from tests.aws_server import moto_server, recorder, sent_requests
    from tests.backends.sagemaker.launcher.sagemaker_hosts import (
        Host,
        LauncherFailedError,
        run_on_hosts,
    )

    os.environ |= {
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    hosts: dict[str, Host] = {}

    with moto_server() as port, recorder(port) as aws:
        os.environ["AWS_ENDPOINT_URL"] = aws.endpoint
        boto3.client("s3", "us-east-1").create_bucket(Bucket="my-bucket")

        def run(folder: Path, name: str) -> float:
            deploykit("submit", "--run", name, folder=folder)
            (request,) = [one for one in sent_requests(aws) if one["TrainingJobName"] == name]
            base = Path(os.environ["DEPLOYKIT_HOME"]) / "runs" / name / "host"
            hosts[name] = Host("127.0.0.1", base, str(base), enter=WARM)
            earlier = [hosts["saves"]] if name == "goes-on" else []
            began = time.monotonic()
            with contextlib.suppress(LauncherFailedError):  # a run that is stopped has failed
                run_on_hosts(request, aws.endpoint, [hosts[name]], earlier=earlier)
            return time.monotonic() - began

        yield run


BACKENDS = {"local": local, "slurm": slurm, "sagemaker": sagemaker}

if __name__ == "__main__":
    sys.exit(main())
