"""The node plane as it travels: copied into a bundle and started with a plain environment."""

from __future__ import annotations

import compileall
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from deploykit.bundle import node_plane
from deploykit.lib import paths

ENTRYPOINTS = paths.shipped("entrypoints")

HOSTILE = [
    *("--flag", "positional", "--twice=1", "--twice=2", "a b", "", "it's", '"quoted"', "-x", "--"),
    *("--n", "--nnodes=7", "été ✓ 日本", "new\nline", "$(id) `id` \\ * {{ }} #SBATCH", "-m"),
]
"""Arguments that must arrive unchanged."""
_LINE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z \[(\w+ \d+)\] (.*)")


@dataclass(frozen=True)
class Done:
    """How a launcher ended, and its log by author: ``said["rank 0"]``."""

    code: int
    log: str

    @property
    def said(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in self.log.split("\n"):
            if match := _LINE.fullmatch(line):
                found.setdefault(match[1], []).append(match[2])
        return found


@dataclass(frozen=True)
class Launcher:
    """A launch.py that has been started."""

    process: subprocess.Popen
    logfile: Path

    @property
    def log(self) -> str:
        return self.logfile.read_text(errors="surrogateescape")

    def wait_for(self, text: str, count: int = 1, patience: float = 250) -> None:
        deadline = time.monotonic() + patience
        while self.log.count(text) < count:
            assert self.process.poll() is None, f"ended without {text!r}:\n{self.log}"
            assert time.monotonic() < deadline, f"no {text!r} yet:\n{self.log}"
            time.sleep(0.05)

    def finish(self, patience: float = 250) -> Done:
        return Done(self.process.wait(patience), self.log)


def _hear_all():
    """A background process ignores these signals, and so would its children."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Bundle:
    """A source tree with the node plane inside, and the folder of one run."""

    def __init__(self, root: Path, compiled: Path) -> None:
        self.source = root / 'a "bundle" it\'s'
        self.run_dir = root / "run folder"
        self.run_dir.mkdir()
        shutil.copytree(compiled, self.source)
        self._started: list[subprocess.Popen] = []

    def write(self, name: str, text: str) -> None:
        (self.source / name).write_text(textwrap.dedent(text))

    def start(self, *words: str, node: int = 0, python: str = sys.executable, **env) -> Launcher:
        logfile = self.run_dir / f"node-{node}.log"
        with logfile.open("wb") as log:
            process = subprocess.Popen(
                [python, ".deploykit/launch.py", *words],
                cwd=self.source,
                env={
                    "PATH": os.environ["PATH"],
                    "DEPLOYKIT_RUN_DIR": str(self.run_dir),
                    "DEPLOYKIT_RUN": "tried",
                    **{name: str(value) for name, value in env.items()},
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_hear_all,  # noqa: PLW1509 - no thread here
            )
        self._started.append(process)
        return Launcher(process, logfile)

    def run(self, *words: str, **env) -> Done:
        return self.start(*words, **env).finish()

    def end(self, name: str) -> dict:
        """What was left in ``exit_records/``, for example by ``node-0``."""
        return json.loads((self.run_dir / "exit_records" / f"{name}.json").read_text())

    def stop(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """The node plane with its compiled files, for which each launcher would take a second."""
    folder = tmp_path_factory.mktemp("compiled")
    for name, content in node_plane.node_plane().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert compileall.compile_dir(folder, quiet=1)
    return folder


@pytest.fixture
def bundle(tmp_path, compiled):
    made = Bundle(tmp_path, compiled)
    yield made
    made.stop()


@pytest.fixture
def as_rank():
    """The environment of rank 3 of 4, as a launcher above sets it."""
    return {
        "RANK": 3,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": 1,
    }


@pytest.fixture(scope="session")
def old_python():
    """A Python 3.10, the oldest on which the node plane must run."""
    pyenv = Path(shutil.which("pyenv") or "/").resolve().parent.parent / "versions"
    for candidate in (*sorted(pyenv.glob("3.10.*/bin/python3.10")), shutil.which("python3.10")):
        if candidate and subprocess.run([candidate, "-c", ""], check=False).returncode == 0:
            return str(candidate)
    pytest.skip("optional: no working python3.10 on this machine")
