"""The trip of a submit: which functions of deploykit it goes through, file by file, in order.

    python benchmarks/trip.py slurm
    python benchmarks/trip.py sagemaker

Sends a real job, to a Slurm cluster started for it on this machine or to a moto server. A switch
is a step from one file into another, by a call or a return. A loop that takes the same step again
and again is read once, so each step, from one function into another, counts once; the figure with
all repeats is printed beside it. `--hide` leaves functions out of what is printed only.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Self

_TOP = Path(__file__).resolve().parent.parent
_TARGETS = {"slurm": (27, 248), "sagemaker": (32, 420)}
"""Files and switches at most (CONTRIBUTING.md, "Structure")."""
_PRICE = ("cost/", "backends/sagemaker/offers.py")
"""Files that compute the line about the price; they are counted apart."""
_SAGEMAKER = {
    "role": "arn:aws:iam::123456789012:role/training",
    "bucket": "my-bucket",
    "region": "us-east-1",
    "instance_type": "ml.g5.xlarge",
    "framework_version": "2.8.0",
}
_PATIENCE = 60
"""Seconds for a server to answer."""


class Trip:
    """Calls of deploykit's functions while the object is entered, in every thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """(file below the package, function), in the order of their calls."""
        self.steps: list[tuple[str, str]] = []
        """The same, with the function that each call returned to."""
        self._stacks: dict[int, list[tuple[str, str]]] = {}
        self._imports: dict[int, int] = {}
        """Modules that each thread is importing; calls made during an import are not steps."""
        self._package = str(_TOP / "deploykit") + os.sep

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event not in {"call", "return"} or not code.co_filename.startswith(self._package):
            return
        thread = threading.get_ident()
        if code.co_name == "<module>":
            change = 1 if event == "call" else -1
            self._imports[thread] = self._imports.get(thread, 0) + change
        if self._imports.get(thread) or not code.co_flags & inspect.CO_OPTIMIZED:  # a class
            return
        if code.co_qualname == "__getattr__":  # of the package: `from deploykit import` asks it
            return
        stack = self._stacks.setdefault(thread, [])
        if event == "call":
            stack.append((code.co_filename.removeprefix(self._package), code.co_qualname))
            self.calls.append(stack[-1])
        else:
            stack.pop()
        self.steps += stack[-1:]

    @property
    def files(self) -> list[str]:
        """The files, in the order of their first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def switches(self) -> int:
        """Steps from one file into another, each counted once."""
        return len({(a, b) for a, b in itertools.pairwise(self.steps) if a[0] != b[0]})

    @property
    def raw_switches(self) -> int:
        """Steps from one file into another, each as often as it is taken."""
        return sum(a[0] != b[0] for a, b in itertools.pairwise(self.steps))


@contextlib.contextmanager
def slurm() -> Iterator[list[str]]:
    """A cluster on this machine, and what `submit` needs for it."""
    with tempfile.TemporaryDirectory(prefix="trip-") as folder:
        control = [sys.executable, str(_TOP / "infra/slurm/cluster.py")]
        subprocess.run([*control, "start", folder], check=True, stdout=subprocess.DEVNULL)
        try:
            line = subprocess.check_output([*control, "env", folder], text=True)
            name, _, value = line.removeprefix("export ").strip().partition("=")
            os.environ[name] = shlex.split(value)[0]
            yield []
        finally:
            subprocess.run([*control, "stop", folder], check=True, stdout=subprocess.DEVNULL)


@contextlib.contextmanager
def sagemaker() -> Iterator[list[str]]:
    """A moto server with an empty bucket, and what `submit` needs for it."""
    import boto3

    with socket.socket() as chosen:
        chosen.bind(("127.0.0.1", 0))
        port = str(chosen.getsockname()[1])
    argv = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", port]
    with subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        try:
            _await(int(port))
            os.environ |= {
                "AWS_ACCESS_KEY_ID": "testing",
                "AWS_SECRET_ACCESS_KEY": "testing",
                "AWS_EC2_METADATA_DISABLED": "true",
                "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            }
            boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="my-bucket")
            yield [f"--set=sagemaker={json.dumps(_SAGEMAKER)}"]
        finally:
            server.kill()


def _await(port: int) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"no server on port {port} within {_PATIENCE} s")


def submit(backend: str) -> Trip:
    """The trip of one submit of the reference job. Raises RuntimeError where it fails."""
    from deploykit.cli import main as cli

    servers: dict[str, Any] = {"slurm": slurm, "sagemaker": sagemaker}
    with tempfile.TemporaryDirectory() as state, servers[backend]() as more:
        os.environ["DEPLOYKIT_HOME"] = state
        job = str(_TOP / "job.yaml")
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), Trip() as trip:
            code = cli.main(["submit", job, "--backend", backend, *more])
        if code:
            raise RuntimeError(said.getvalue())
        subprocess.run(
            [sys.executable, "-m", "deploykit", "cancel"], check=False, capture_output=True
        )
    return trip


def told(trip: Trip, hidden: frozenset[str]) -> Iterator[str]:
    """A line for each switch: the file, and the functions called there, in order."""
    file, names = "", list[str]()
    for next_file, name in [*trip.calls, ("", "")]:
        if name in hidden:
            continue
        if next_file != file:
            if names:
                yield f"{file:<34}{' '.join(dict.fromkeys(names))}"
            file, names = next_file, []
        names.append(name)


def main(argv: list[str] | None = None) -> int:
    """Print the trip; return 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("backend", choices=_TARGETS)
    parser.add_argument("--hide", nargs="*", default=[], metavar="FUNCTION")
    parser.add_argument("--count", action="store_true", help="print only the two figures")
    args = parser.parse_args(argv)
    trip = submit(args.backend)
    if not args.count:
        print("\n".join(told(trip, frozenset(args.hide))), end="\n\n")
    files, switches = _TARGETS[args.backend]
    priced = sum(file.startswith(_PRICE) for file in trip.files)
    count = len(trip.files) - priced
    print(f"{args.backend}: {count} files (target {files}), {priced} more for its price, ", end="")
    print(f"{trip.switches} switches (target {switches}), {trip.raw_switches} with every repeat")
    return int(count > files or trip.switches > switches)


if __name__ == "__main__":
    sys.exit(main())
