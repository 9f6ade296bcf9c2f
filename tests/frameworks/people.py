"""The scripts of people.toml: where they are, and the job of each.

python -m tests.frameworks.people fetch    # those that no package on PyPI has, into build/people
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".venv-frameworks/bin/python"
FETCHED = ROOT / "build/people"
BACKENDS = ("local", "slurm", "sagemaker")
WITHOUT_GPU = HERE / "without_gpu"


@dataclass(frozen=True)
class Person:
    """A script that somebody else wrote."""

    name: str
    package: str
    what: str
    prints: tuple[str, ...]
    """Patterns of what it prints with two ranks, the last of them at its end."""
    module: str = ""
    script: str = ""
    url: str = ""
    files: dict[str, str] = field(default_factory=dict)
    """Name of each file at `url`, or of some in an archive, to its SHA-256."""
    args: tuple[str, ...] = ()
    two_nodes: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    data: str = ""
    ranks: int = 2
    without_gpu: bool = False

    @property
    def fetched(self):
        return FETCHED / self.name

    def is_here(self):
        """Whether nothing is left to fetch. Raises AssertionError for a file that was changed."""
        if not all((self.fetched / file).exists() for file in self.files):
            return False
        for file, digest in self.files.items():
            found = hashlib.sha256((self.fetched / file).read_bytes()).hexdigest()
            assert found == digest, self.fetched / file
        return True

    def words(self, nodes):
        """The script's arguments with one rank on each of two nodes, or with all on one."""
        return [*self.args, *(self.two_nodes if nodes > 1 else ())]

    def write_job(self, folder, nodes=1):
        """Make `folder` what its owner would have: the files, some data, and a job file."""
        if self.url:
            shutil.copytree(self.fetched, folder)
        else:
            folder.mkdir()
        if self.data:
            data = [PYTHON, "-W", "ignore", HERE / "people_data.py", self.data, folder]
            subprocess.run(data, check=True, capture_output=True)
        entry = {"module": self.module} if self.module else {"script": self.script}
        env = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.env}
        job = {
            "name": self.name.replace("_", "-"),
            "entrypoint": {**entry, "args": self.words(nodes)},
            "resources": {
                "nodes": nodes,
                "processes_per_node": self.ranks // nodes,
                "time_limit": "1h",
            },
            "env": env,
            "local": {"python": str(PYTHON)},
            "slurm": {"python": str(PYTHON)},
            "sagemaker": {
                "role": "arn:aws:iam::123456789012:role/training",
                "bucket": "my-bucket",
                "region": "us-east-1",
                "instance_type": "ml.m5.xlarge",
                "image_uri": "123456789012.dkr.ecr.us-east-1.amazonaws.com/training:latest",
            },
        }
        (folder / "job.yaml").write_text(json.dumps(job, indent=1))  # JSON is YAML
        return folder / "job.yaml"


def people():
    """Those of people.toml, in its order."""
    table = tomllib.loads((HERE / "people.toml").read_text())
    return [
        Person(
            name,
            **{
                key: tuple(value) if isinstance(value, list) else value
                for key, value in row.items()
            },
        )
        for name, row in table.items()
    ]


def fetch(person):
    """Download the files of `person`, each compared with its hash."""
    person.fetched.mkdir(parents=True, exist_ok=True)
    if person.url.endswith(".tar.gz"):
        archive = person.fetched / "archive.tar.gz"
        urllib.request.urlretrieve(person.url, archive)
        unpack = ["tar", "xzf", archive, "--strip-components=1", "-C", person.fetched]
        subprocess.run(unpack, check=True)
        archive.unlink()
    else:
        for file in person.files:
            urllib.request.urlretrieve(f"{person.url}/{file}", person.fetched / file)
    assert person.is_here(), person.name


def _recorded(person, backend):
    return FETCHED / f"{person.name}.{backend}.seconds"


def record(person, backend, seconds):
    """Keep the time of a run that succeeded, for `table`."""
    FETCHED.mkdir(parents=True, exist_ok=True)
    _recorded(person, backend).write_text(f"{seconds:.0f}")


def _version(package):
    pins = (HERE / "requirements.txt").read_text() + (ROOT / "constraints.txt").read_text()
    return re.search(rf"^{package}==(.*)$", pins, re.MULTILINE)[1]


def description(person):
    """The first cells of a person's row: what, from where, and what is started."""
    source = f"{person.package} {_version(person.package)}"
    if person.url:
        raw, page = "raw.githubusercontent.com/([^/]*/[^/]*)", r"github.com/\1/tree"
        source = f"[{source}]({re.sub(raw, page, person.url)})"
    start = ["-m", person.module] if person.module else [person.script]
    return f"| {person.what} | {source} | `{shlex.join([*start, *person.args])}` |"


def row(person):
    """A person's row of the table in docs/how-to/scripts-of-others.md."""
    times = [_recorded(person, backend) for backend in BACKENDS]
    cells = [f"{time.read_text()} s" if time.exists() else "not run" for time in times]
    return f"{description(person)} {' | '.join(cells)} |"


if __name__ == "__main__":
    for one in people():
        if sys.argv[1:] == ["table"]:
            print(row(one))
        elif not one.is_here():
            fetch(one)
