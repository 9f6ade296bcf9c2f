"""`benchmarks/kills.py`: after twenty kills of each verb, nothing is doubled or left."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.nightly import few

pytestmark = [pytest.mark.slow, pytest.mark.aws, pytest.mark.timeout(3600)]

PROGRAM = Path(__file__).resolve().parent.parent / "benchmarks/kills.py"
VERBS = ("deploy", "scale", "rollback", "rm", "register", "export", "evaluate", "serve")


@pytest.mark.parametrize(
    ("verb", "kills"),
    few([("export", 2), *((verb, 20) for verb in VERBS)], ("export", 2)),
)
def test_a_killed_verb_is_completed_by_the_same_command(verb, kills):
    argv = [sys.executable, str(PROGRAM), verb, "--kills", str(kills)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"| {verb} | {kills} | 0 | 0 |" in done.stdout
