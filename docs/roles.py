"""Play four people's first minutes, each in an empty home, and write what they see.

    python docs/roles.py --python /usr/bin/python3      # writes benchmarks/roles.md

An environment is made with that Python and this checkout is installed into it, as the README says;
then each person's commands run one after the other. A real Slurm cluster and a moto server are
started for those who need one. What changes from run to run becomes ``...``; the tests play the
page again. A command that ends otherwise than planned is a dead end: nothing is written then.
"""

# ruff: noqa: INP001

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent
PAGE = CHECKOUT / "benchmarks/roles.md"
SECTION = (
    "sagemaker: {role: arn:aws:iam::123456789012:role/training, bucket: my-bucket, "
    "region: us-east-1, instance_type: ml.g5.12xlarge, image_uri: "
    "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker}"
)
HEAD = """\
# Four users' first minutes

A student with a laptop, a researcher on a Slurm cluster, an engineer on SageMaker and an operator
each start with an empty folder and home folder. `docs/roles.py` runs their commands and writes
this page; the tests run them again. Dots replace further log lines, and text that changes.

| | first success after | commands | dead ends |
|---|---:|---:|---:|
{rows}

Times are from the first command to the first successful job, on two cores without a GPU, with
Python {python}. Before that, it took {install} seconds to install deploykit and PyTorch's CPU build
from cached wheels. For SageMaker, a moto server accepts each job and ends it at once; the
model in its bucket takes the place of the one that the container would have saved.
"""


@dataclass(frozen=True)
class Role:
    """A person: what they want, and each command with its exit code."""

    name: str
    text: str
    commands: tuple[tuple[str, int], ...]
    needs: str = ""
    """A server: ``slurm`` or ``aws``."""


STUDENT = Role(
    "A student with a laptop",
    "The student runs a first job, changes an option, mistypes another, trains on data in a folder "
    "and takes the model.",
    (
        ("deploykit init", 0),
        ("deploykit submit --wait --run first", 0),
        ("deploykit submit --wait --run second -- --epochs 2", 0),
        ("deploykit submit --wait --run third -- --epoch-count 2", 2),
        ("mkdir digits && echo 1,2,3 > digits/train.csv    # the data are in a folder", 0),
        ("deploykit submit --wait --run with-data --set data.train=digits", 0),
        ("deploykit fetch with-data --checkpoints --to model && ls model/checkpoints", 0),
        ("deploykit list", 0),
    ),
)
TWO_NODES = "deploykit submit train.py -b slurm --nodes 2 --processes-per-node 1"
STAGED = "'data.train={path: ../digits, stage: node, stage_folder: $HOME}'"
RESEARCHER = Role(
    "A researcher on a Slurm cluster",
    "The researcher has a script and wants to run it on two nodes, with data in a folder that each "
    "node copies to its own disk first.",
    (
        ("deploykit init", 0),
        ("rm job.yaml                     # from here on, train.py is the researcher's own", 0),
        ("deploykit backends slurm", 0),
        (TWO_NODES, 65),
        (f"{TWO_NODES} --time-limit 10m --save job.yaml --run two-nodes --wait", 0),
        ("deploykit rerun two-nodes --run again --wait", 0),
        ("mkdir ../digits && cp job.yaml ../digits/   # the researcher's data, in a folder", 0),
        (f"deploykit submit -b slurm --set {STAGED} --run copied --wait", 0),
        ("deploykit fetch copied --checkpoints --to model && ls model/checkpoints", 0),
    ),
    "slurm",
)
MODEL = "s3://my-bucket/digits"
WITH_DATA = "deploykit submit -b sagemaker --set data.train=digits --run with-data"
ENGINEER = Role(
    "An engineer on SageMaker",
    "The engineer has a role and a bucket, and checks everything before paying. The data are in a\n"
    "folder on the engineer's machine, and the model comes back there.",
    (
        ("deploykit init", 0),
        ("deploykit check -b sagemaker", 65),
        (f"echo '{SECTION}' >> job.yaml", 0),
        ("deploykit check -b sagemaker", 0),
        ("deploykit submit -b sagemaker --run cloud --dry-run | head -n 4", 0),
        ("deploykit submit -b sagemaker --run cloud --wait", 0),
        ("mkdir digits && echo 1,2,3 > digits/train.csv    # the data are in a folder", 0),
        (f"echo 'checkpoints: {MODEL}' >> job.yaml", 0),
        (f"{WITH_DATA} --dry-run | head -n 4", 0),
        (f"{WITH_DATA} --wait", 0),
        ("deploykit fetch with-data --checkpoints --to model && ls model/checkpoints", 0),
    ),
    "aws",
)
OPERATOR = Role(
    "An operator",
    "The operator finds failed runs, their causes and their disk usage, and cleans up.",
    (
        ("deploykit init", 0),
        ("deploykit submit --wait --run good", 0),
        ("deploykit submit --run bad -- --lr fast", 0),
        ("deploykit wait bad", 2),
        ("deploykit list --state failed", 0),
        ("deploykit diagnose bad", 79),
        ("deploykit doctor -b local", 0),
        ("deploykit disk", 0),
        ("deploykit prune --state failed --yes", 0),
        ("deploykit list", 0),
    ),
)
ROLES = (STUDENT, RESEARCHER, ENGINEER, OPERATOR)

_VOLATILE = (
    (r"\d{4}-\d\d-\d\d([T ]\d\d:\d\d(:\d\d)?(\.\d+)?Z?)?", "..."),  # a time
    (r"\b(\d+[dhm] ?)*\d+s\b", "..."),  # a duration
    (r"\b\d+(\.\d+)? [kMG]?B\b", "..."),  # a size
    (r"\b\d\.\d{4}\b", "..."),  # a loss
    (r"file://\S+", "file://..."),
    (r"(slurm|local)://\S+?/", r"\1://.../"),
    (r"slurm://[^\s;]+", "slurm://..."),
    (r"port \d+", "port ..."),
    (r"interfaces: .*", "interfaces: ..."),
    (r"^\[W\d+ [\d:.]+ ", "[W... "),
)
_LOOSE = (
    (r"^(\[(rank|node) |  (started|ended) |\w+: running$|...$).*\n", ""),
    (r": (queued|running)$", ": sent"),
    (r"\b(rank|log:|and) ?\d+", r"\1 N"),
    (r"^\d+ lines hidden .*\n", ""),  # a server that leaves first makes gloo print frames
    (r"^(  proof .*\n +.*\n)\1+", r"\1"),  # torchrun ends the other rank, perhaps before it fails
)
"""What depends on which rank or query came first, or on the machine's speed."""
_LOG = re.compile(r"(^\[(?:rank|node) .*\n)(?:^\[(?:rank|node) .*\n){3,}", re.MULTILINE)
"""Lines of a log, of which the page shows the first."""


def main() -> None:
    """Play all roles, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="for the environment")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        binaries = install(options.python, Path(folder, "env"))
        install_seconds = time.monotonic() - started
        rows, parts = [], []
        for role in ROLES:
            shown, seconds = play(role, binaries, Path(folder, role.name.replace(" ", "-")))
            rows.append(f"| {role.name} | {seconds:.0f} s | {len(role.commands)} | 0 |")
            parts.append(f"\n## {role.name}\n\n{role.text}\n\n```console\n{brief(shown)}```\n")
        version = output([str(binaries / "python"), "-V"]).split()[1]
    head = HEAD.format(rows="\n".join(rows), python=version, install=f"{install_seconds:.0f}")
    PAGE.write_text(head + "".join(parts), encoding="utf-8")


def install(python: str, folder: Path) -> Path:
    """Make an environment with this checkout; the folder of its programs."""
    pip = [str(folder / "bin/python"), "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    pip += ["-c", str(CHECKOUT / "constraints.txt")]
    for argv in (
        [python, "-m", "venv", str(folder)],
        [*pip, "torch"],
        [*pip, f"{CHECKOUT}[train,sagemaker]"],
    ):
        subprocess.run(argv, check=True)  # noqa: S603 - as the README says
    return folder / "bin"


def play(role: Role, binaries: Path, home: Path) -> tuple[str, float]:
    """The transcript of a role, and the seconds to the first run that succeeded.

    Raises SystemExit at a dead end: a command that ends with another exit code.
    """
    project = home / "first-project"
    project.mkdir(parents=True)
    clean = {"HOME": str(home), "PATH": f"{binaries}:{os.environ['PATH']}", "LANG": "C.UTF-8"}
    with server(role.needs, binaries) as variables:
        shown, first, started = [], 0.0, time.monotonic()
        for command, wanted in role.commands:
            text, code = bash(command, project, clean | variables)
            if code != wanted:
                sys.exit(f"{role.name}: `{command}` ended with {code}, not {wanted}:\n{text}")
            if not first and ": succeeded" in text:
                first = time.monotonic() - started
            mark = f"[exit code {code}]\n" if code else ""
            text = text.replace(str(binaries), "~/.venv/bin").replace(str(home), "~")
            shown.append(f"$ {command}\n{mark}{stable(text)}")
    return "".join(shown), first


def bash(command: str, folder: Path, variables: dict[str, str]) -> tuple[str, int]:
    """What a command prints to either stream, and its exit code."""
    done = subprocess.run(  # noqa: S603 - the commands above
        ["bash", "-c", f"exec 2>&1\n{command}"],  # noqa: S607 - the person's own bash
        cwd=folder,
        env=variables,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout, done.returncode


def stable(text: str) -> str:
    """The text, with dots for what changes from run to run."""
    text = text.replace(socket.gethostname(), "...")
    for pattern, dots in _VOLATILE:
        text = re.sub(pattern, dots, text, flags=re.MULTILINE)
    return text if text.endswith("\n") or not text else f"{text}\n"


def brief(text: str) -> str:
    """The text with the first line of each log of several lines."""
    return _LOG.sub(r"\1...\n", text)


def loose(text: str) -> str:
    """The text without what depends on the order of ranks and on the machine's speed."""
    for pattern, plain in _LOOSE:
        text = re.sub(pattern, plain, text, flags=re.MULTILINE)
    return text


@contextlib.contextmanager
def server(name: str, binaries: Path) -> Iterator[dict[str, str]]:
    """The variables that lead to a server of this name, which runs meanwhile."""
    if name == "slurm":
        with tempfile.TemporaryDirectory(prefix="box-") as box:
            cluster = [sys.executable, str(CHECKOUT / "infra/slurm/cluster.py")]
            output([*cluster, "start", box])
            line = output([*cluster, "env", box]).removeprefix("export ").strip()
            try:
                yield {"SLURM_CONF": line.partition("=")[2].strip("'")}
            finally:
                output([*cluster, "stop", box])
    elif name == "aws":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        moto = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(moto, **quiet)  # noqa: S603 - the server of the tests
        try:
            yield aws(port, binaries)
        finally:
            process.kill()
            process.wait()
    else:
        yield {}


def aws(port: int, binaries: Path) -> dict[str, str]:
    """Wait for the server and make the bucket, with a model; the variables of an account."""
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    make = (
        "import boto3; s3 = boto3.client('s3', 'us-east-1'); s3.create_bucket(Bucket='my-bucket'); "
        "s3.put_object(Bucket='my-bucket', Key='digits/last.pt', Body=bytes(10_000))"
    )
    for _ in range(120):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            break
        time.sleep(0.5)
    output([str(binaries / "python"), "-c", make], variables)
    return variables


def output(argv: list[str], more: dict[str, str] | None = None) -> str:
    """What a program prints; raises CalledProcessError where it fails."""
    env = {**os.environ, **(more or {})}
    done = subprocess.run(argv, env=env, check=True, capture_output=True, text=True)  # noqa: S603 - ours
    return done.stdout


if __name__ == "__main__":
    main()
