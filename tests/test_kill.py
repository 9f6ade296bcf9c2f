"""SIGKILL in the middle of a submit: no job is lost, and none is started twice.

After the kill, `status` tells what is there; submitting again with the same run id brings the run
to its end, and the trainer has been started exactly once.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit import cli

POINTS = [
    ("before", "deploykit.runs:add"),
    ("after", "deploykit.runs:add"),
    ("before", "deploykit.lifecycle:_record_source"),
    ("after", "deploykit.lifecycle:_record_source"),
    ("before", "deploykit.bundle:Bundle.store"),
    ("after", "deploykit.bundle:Bundle.store"),
    ("after", "deploykit.bundle:unpack"),
    ("before", "subprocess:run"),
    ("after", "subprocess:run"),
    ("before", "deploykit.runs:confirm"),
    ("after", "deploykit.runs:confirm"),
]
"""The ten points and one more: around the row, the upload and the send."""


def killed(when, where, *argv):
    script = Path(__file__).parent / "kill_at.py"
    full = [sys.executable, str(script), when, where, "--", *argv]
    return subprocess.run(full, capture_output=True, check=False).returncode


@pytest.mark.torch
@pytest.mark.parametrize(("when", "where"), POINTS)
def test_local(project, capsys, tmp_path, when, where):
    counter = tmp_path / "starts"
    (project / "train.py").write_text(f"open({str(counter)!r}, 'a').write('x')")
    submit = ["submit", "--backend", "local", "--run", "one"]
    assert killed(when, where, *submit) == -signal.SIGKILL
    if (when, where) != POINTS[0]:
        assert cli.main(["status", "one", "--json"]) == 0
        (seen,) = json.loads(capsys.readouterr().out)
        sent = POINTS.index((when, where)) > POINTS.index(("before", "subprocess:run"))
        assert (seen["state"] != "unsent") == sent
    assert cli.main(submit) == 0
    assert cli.main(["wait", "one"]) == 0
    assert counter.read_text() == "x"
    assert len(list((tmp_path / "state folder/bundles").glob("*.tar.gz"))) == 1
