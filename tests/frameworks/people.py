"""The scripts of people.toml: where they are, and what one types to run each.

python -m tests.frameworks.people fetch    # those that no package on PyPI has, into build/people
python -m tests.frameworks.people page     # what docs/how-to/scripts-of-others.md says of them
"""

from __future__ import annotations

import hashlib
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
CONFIG = """\
[sagemaker]
role = "arn:aws:iam::123456789012:role/training"
bucket = "my-bucket"
region = "us-east-1"
"""
"""The config file of a SageMaker user."""
IMAGE = "123456789012.dkr.ecr.us-east-1.amazonaws.com/training:latest"
"""$IMAGE in the commands."""
_MACHINE = '--set sagemaker.instance_type=ml.m5.xlarge --set sagemaker.image_uri="$IMAGE"'
_WIDTH = 96


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
    one_node: tuple[str, ...] = ()
    two_nodes: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    data: str = ""
    ranks: int = 2
    without_gpu: bool = False
    ignore: tuple[str, ...] = ()
    """What its `.deploykitignore` has."""

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

    def command(self, backend, *settings):
        """What a shell gets, in the folder of the script; `settings` are for `--set`."""
        start = ["-m", self.module] if self.module else [self.script]
        environment = (f"env.{name}={value}" for name, value in self.env.items())
        settings = [word for value in (*environment, *settings) for word in ("--set", value)]
        args = [*self.args, *(self.two_nodes if backend == "slurm" else self.one_node)]
        before = ["deploykit submit", shlex.join(start), self._options(backend)]
        after = [f"-- {shlex.join(args)}"] if args else []
        return " ".join(filter(None, [*before, shlex.join(settings), *after]))

    def _options(self, backend):
        """Two ranks: on Slurm one on each node, else both on one."""
        two = self.ranks > 1
        return {
            "local": "--processes-per-node 2 --wait" if two else "--wait",
            "slurm": f"--backend slurm{' --nodes 2' * two} --time-limit 1h --wait",
            "sagemaker": f"--backend sagemaker{' --processes-per-node 2' * two} --time-limit 1h "
            + _MACHINE,
        }[backend]

    def make(self, folder):
        """Make `folder` what its owner would have: the files, and some data."""
        if self.url:
            shutil.copytree(self.fetched, folder)
        else:
            folder.mkdir()
        if self.ignore:
            (folder / ".deploykitignore").write_text("\n".join(self.ignore))
        if self.data:
            data = [PYTHON, "-W", "ignore", HERE / "people_data.py", self.data, folder]
            subprocess.run(data, check=True, capture_output=True)
        return folder


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
    """The first cells of a person's row: what it is, and from where."""
    source = f"{person.package} {_version(person.package)}"
    if person.url:
        raw, page = "raw.githubusercontent.com/([^/]*/[^/]*)", r"github.com/\1/tree"
        source = f"[{source}]({re.sub(raw, page, person.url)})"
    return f"| {person.what} | {source} |"


def row(person):
    """A person's row of the table in docs/how-to/scripts-of-others.md."""
    times = [_recorded(person, backend) for backend in BACKENDS]
    cells = [f"{time.read_text()} s" if time.exists() else "not run" for time in times]
    return f"{description(person)} {' | '.join(cells)} |"


def section(person):
    """A person's lines in the commands of that page, which are those for this machine."""
    ignore = [f"echo {name} > .deploykitignore" for name in person.ignore]
    return "\n".join([f"# {person.what}", *ignore, _folded(person.command("local")), ""])


def _folded(command):
    """A command on as many lines as it needs, an option and its value on the same."""
    lines = [""]
    for words in re.findall(r"--?\w\S*(?: [^-\s]\S*)?|\S+", command):
        if len(lines[-1]) + len(words) > _WIDTH:
            lines.append("   ")
        lines[-1] += f" {words}" if lines[-1] else words
    return " \\\n".join(lines)


if __name__ == "__main__":
    if sys.argv[1:] == ["fetch"]:
        for missing in people():
            if not missing.is_here():
                fetch(missing)
    else:
        print("\n".join([*map(row, people()), "", *map(section, people())]))
