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

from deploykit.cli import main as cli
from tests.aws_server import SECTION, sent_requests

pytestmark = pytest.mark.slow

PLAIN = ("--set", "entrypoint.launcher=python")
"""Without torchrun, which would import torch."""

BEFORE_THE_ROW = [
    ("before", "deploykit.bundle.archive:store"),
    ("after", "deploykit.bundle.archive:store"),
    ("before", "deploykit.run.registry:add"),
]
AROUND_THE_ROW = [
    *BEFORE_THE_ROW,
    ("after", "deploykit.run.registry:add"),
    ("before", "deploykit.run.lifecycle:record"),
    ("after", "deploykit.run.lifecycle:record"),
]
AT_THE_END = [
    ("before", "deploykit.run.registry:confirm"),
    ("after", "deploykit.run.registry:confirm"),
]


def points(*around_the_send, early=pytest.mark.nightly):
    """Points of the kill, and whether the job has been sent by then. The first know no backend."""
    before = [pytest.param(*point, False, marks=early) for point in AROUND_THE_ROW]
    return [*before, *around_the_send, *((*point, True) for point in AT_THE_END)]


LOCAL = points(
    ("after", "deploykit.bundle.archive:unpack", False),
    ("before", "subprocess:run", False),
    ("after", "subprocess:run", True),
    early=(),
)
SLURM = points(
    ("after", "deploykit.bundle.archive:unpack", False),
    ("before", "submitit.core.utils:CommandFunction.__call__", False),
    ("after", "submitit.core.utils:CommandFunction.__call__", True),
)
SAGEMAKER = points(
    ("before", "deploykit.backends.sagemaker.uploads:upload", False),
    ("after", "deploykit.backends.sagemaker.uploads:upload", False),
    ("after", "deploykit.backends.sagemaker:submit", True),
)


def killed(when, where, *argv):
    script = Path(__file__).parents[1] / "kill_at.py"
    full = [sys.executable, str(script), when, where, "--", *argv]
    return subprocess.run(full, capture_output=True, check=False).returncode


def state(run, capsys):
    """What `status` says; None where there is no such run."""
    capsys.readouterr()
    code = cli.main(["status", run, "--json"])
    shown = json.loads(capsys.readouterr().out)
    return shown[0]["state"] if code == 0 else None


def check_state(where, seen, *, sent):
    if where in BEFORE_THE_ROW:
        assert seen is None
    else:
        assert (seen != "unsent") == sent


@pytest.mark.parametrize(("when", "where", "sent"), LOCAL)
def test_local(project, capsys, tmp_path, when, where, sent):
    counter = tmp_path / "starts"
    (project / "train.py").write_text(f"open({str(counter)!r}, 'a').write('x')")
    submit = ["submit", "--backend", "local", "--run", "one", *PLAIN]
    assert killed(when, where, *submit) == -signal.SIGKILL
    check_state((when, where), state("one", capsys), sent=sent)
    assert cli.main(submit) == 0
    assert cli.main(["wait", "one"]) == 0
    assert counter.read_text() == "x"
    assert len(list((tmp_path / "state folder/bundles").glob("*.tar.gz"))) == 1


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize(("when", "where", "sent"), SLURM)
def test_slurm(project, cluster, capsys, tmp_path, when, where, sent):
    counter = tmp_path / "starts"
    (project / "train.py").write_text(f"open({str(counter)!r}, 'a').write('x')")
    submit = ["submit", "--backend", "slurm", "--run", "one", *PLAIN]
    assert killed(when, where, *submit) == -signal.SIGKILL
    check_state((when, where), state("one", capsys), sent=sent)
    assert cli.main(submit) == 0
    assert cli.main(["wait", "one"]) == 0
    assert counter.read_text() == "x"


@pytest.mark.aws
@pytest.mark.parametrize(("when", "where", "sent"), SAGEMAKER)
def test_sagemaker(project, aws, capsys, when, where, sent):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    submit = ["submit", "--backend", "sagemaker", "--run", "one"]
    assert killed(when, where, *submit) == -signal.SIGKILL
    check_state((when, where), state("one", capsys), sent=sent)
    assert cli.main(submit) == 0
    assert cli.main(["wait", "one"]) == 0
    assert len(sent_requests(aws)) == 1
    uploads = [one for one in aws.requests if one.method == "PUT" and one.action == "gz"]
    assert len(uploads) == 1
