"""The commands in fixes, as `diagnose` prints them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from deploykit.cli import main as cli
from deploykit.lib import paths

ROOT = Path(__file__).parents[2]


def code_of(step):
    """The command, setting or address at the end of a step; empty for a sentence."""
    _, colon, code = step.partition("   (")[0].rpartition(": ")
    return code if colon and not code.endswith(".") else ""


def commands(capsys, what, cause):
    """What a user can copy from the fix of the first cause, which must be `cause`."""
    capsys.readouterr()
    assert cli.main(["diagnose", str(what), "--json"]) == 79
    first = json.loads(capsys.readouterr().out)["causes"][0]
    assert first["cause"] == cause, first
    return [code for code in map(code_of, first["fix"].splitlines()) if code]


def starting(found, start):
    """The one command that begins with `start`."""
    (command,) = [one for one in found if one.startswith(start)]
    return command


def shell(command, **variables):
    """Run a command as a user pastes it, with this environment's programs first on PATH."""
    place = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": place, "PYTHONPATH": str(ROOT), **variables}
    argv = ["bash", "-c", command]
    return subprocess.run(argv, capture_output=True, text=True, check=False, env=env)


def ended(run, *words):
    """Submit the job of this folder on this machine and wait: the exit code, and the run's log."""
    cli.main(["submit", "--backend", "local", "--run", run, *words])
    return cli.main(["wait", run]), log_of(run)


def submitted(done):
    """The exit code and the id of the run that a printed `deploykit rerun` has started."""
    assert done.returncode == 0, done.stderr
    run = done.stdout.partition(":")[0]
    return cli.main(["wait", run]), run


def log_of(run):
    """What the ranks and launchers of a run wrote."""
    return "".join(path.read_text() for path in sorted(paths.run_folder(run).glob("logs/*.log")))
