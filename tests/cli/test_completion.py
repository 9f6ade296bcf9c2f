"""Completion in the real shells: what a user sees after the tab key."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.run import registry
from deploykit.run.registry import Run
from tests.programs import need

BIN = Path(sys.executable).parent
SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source _deploykit"),
    "zsh": (["zsh", "-f", "-i"], "fpath=($PWD $fpath); autoload -Uz compinit; compinit -u -D"),
}
"""How to start a shell, and how to load the script there."""
TYPED = {
    "deploykit stat": "us",
    "deploykit wait exp-a": "lpha",
    "deploykit wait exp-alpha other-b": "eta",
    "deploykit logs --rank 0 exp-a": "lpha",
    "deploykit submit -b sage": "maker",
    "deploykit submit --backend slu": "rm",
    "deploykit list --state succ": "eeded",
    "deploykit guide rendez": "vous",
    "deploykit guide nccl exp-a": "lpha",
    "deploykit cancel exp-a": "lpha",
    "deploykit check other-j": "ob.yaml",
}
"""What is typed, and what the tab key adds to it."""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a job file; two runs in the registry; this deploykit on PATH."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{BIN}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("other-job.yaml").touch()
    for name in ("exp-alpha", "other-beta"):
        registry.add(Run(name, name, "local", "h", str(tmp_path), "", "", None, 1.0, ""))
    return tmp_path


def script(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    Path("_deploykit").write_text(capsys.readouterr().out)


class Shell:
    """An interactive shell on a terminal."""

    def __init__(self, argv):
        self._ours, its = pty.openpty()
        command = ["setsid", "--ctty", "--wait", *argv]
        self._child = subprocess.Popen(command, stdin=its, stdout=its, stderr=its)
        os.close(its)

    def type(self, keys, until):
        """What the terminal shows after `keys`, up to the text `until`."""
        os.write(self._ours, keys.encode())
        seen = ""
        while until not in seen:
            seen += os.read(self._ours, 1 << 12).decode(errors="replace")
        return seen

    def end(self):
        os.close(self._ours)  # the shell gets SIGHUP
        self._child.wait()


@pytest.mark.slow
@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", SHELLS)
def test_the_tab_key_completes(name, capsys):
    argv, load = SHELLS[name]
    need(name)
    script(name, capsys)
    shell = Shell(argv)
    try:
        shell.type(f"{load} && echo load''ed\n", "loaded")
        for typed, added in TYPED.items():
            shell.type(f"{typed}\t", f"{typed}{added}")
            shell.type("\x15\x0becho ne''xt\n", "next")  # an empty line again
    finally:
        shell.end()


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_fish_completes(capsys):
    need("fish")
    script("fish", capsys)
    for typed, added in TYPED.items():
        done = subprocess.run(
            ["fish", "--no-config", "-c", f"source _deploykit; complete -C '{typed}'"],
            capture_output=True,
            text=True,
            check=True,
        )
        offered = {line.split("\t")[0] for line in done.stdout.splitlines()}
        assert typed.split()[-1] + added in offered, typed


@pytest.mark.usefixtures("here")
def test_lists_hold_no_word_that_a_shell_would_run(capsys):
    registry.add(Run("$(touch evil)", "x", "local", "h", "/", "", "", None, 2.0, ""))
    assert cli.main(["completion", "--list", "runs"]) == 0
    assert capsys.readouterr().out == "other-beta\nexp-alpha\n"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("unfinished", {"exp-alpha", "other-beta"}),
        ("backends", {"local", "slurm", "sagemaker"}),
        ("states", {"failed", "running"}),
        ("guides", {"nccl", "efa"}),
    ],
)
def test_what_shells_ask_for(name, words, capsys):
    assert cli.main(["completion", "--list", name]) == 0
    assert set(capsys.readouterr().out.split()) >= words


def test_without_a_shell_the_shells_are_named(capsys):
    assert cli.main(["completion"]) == 64
    assert re.search(r"bash, zsh or fish", capsys.readouterr().err)
