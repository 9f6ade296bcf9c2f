"""`log_limit`: what a program prints beyond it is left out of a file, except for its end."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deploykit.backends import base as backend
from deploykit.cli import main as cli
from deploykit.job.model import JobSpec
from deploykit.lib import paths
from deploykit_node import relay

_LIMIT = 200_000
_LINES = 40_000
_PROGRAM = (
    f"import sys\nfor number in range({_LINES}): print('line', number, '.' * 40)\n"
    "sys.stdout.flush(); raise ValueError('the reason')"
)


def relayed(sink, **env):
    """The exit code of a program whose output is relayed into a file or a pipe."""
    start = (
        "import os, sys; from deploykit_node import relay;"
        f"end = relay.run([sys.executable, '-c', {_PROGRAM!r}], dict(os.environ), '[rank 0]');"
        "sys.exit(end[0])"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    argv = [sys.executable, "-c", start]
    return subprocess.run(argv, check=False, env=env, stdout=sink, stderr=sink)


def test_a_log_takes_no_more_than_its_limit_and_the_end(tmp_path):
    path = tmp_path / "node-0.log"
    path.write_bytes(b"of an earlier attempt\n" * 1000)
    with path.open("ab") as log:
        assert relayed(log, DEPLOYKIT_LOG_LIMIT=str(_LIMIT)).returncode == 1
    lines = path.read_text().splitlines()
    assert path.stat().st_size < _LIMIT + 2 * relay.END + 1000
    said = [line for line in lines if "[rank 0] log_limit reached (200000 bytes" in line]
    assert len(said) in {1, 2}  # each of stdout and stderr may have something to leave out
    (left_out,) = (line for line in lines if "bytes of output were left out here" in line)
    shown = [int(line.split()[4]) for line in lines if "[rank 0] line " in line]
    assert shown[0] == 0
    assert shown[-1] == _LINES - 1
    assert len(shown) < _LINES / 10
    length = len(next(line for line in lines if f" line {_LINES - 1} " in line)) + 1
    assert int(left_out.split()[3]) == pytest.approx((_LINES - len(shown)) * length, rel=0.01)
    assert any("ValueError: the reason" in line for line in lines)
    assert all(line.startswith("20") for line in lines[1000:])


def test_a_log_of_another_attempt_stays_below_the_limit_as_well(tmp_path):
    path = tmp_path / "node-0.log"
    for _ in range(3):
        with path.open("ab") as log:
            relayed(log, DEPLOYKIT_LOG_LIMIT=str(_LIMIT))
    assert path.stat().st_size < _LIMIT + 3 * (2 * relay.END + 1000)


def test_a_pipe_gets_everything():
    """As on SageMaker, whose CloudWatch keeps the log."""
    done = relayed(subprocess.PIPE, DEPLOYKIT_LOG_LIMIT=str(_LIMIT))
    assert done.stdout.count(b"\n") == _LINES
    assert b"log_limit" not in done.stderr


def test_the_default_is_the_same_on_both_sides():
    default = JobSpec.__dataclass_fields__["log_limit"].default
    assert default == backend.LOG_LIMIT == relay.LOG_LIMIT


def test_the_limit_of_the_job_file_reaches_the_nodes(project, capsys):
    argv = ["submit", "--dry-run", "--backend", "local", "--set"]
    assert cli.main([*argv, "log_limit=8MiB"]) == 0
    assert "export DEPLOYKIT_LOG_LIMIT=8388608" in capsys.readouterr().out
    assert cli.main([*argv, "log_limit=1GiB"]) == 0
    assert "LOG_LIMIT" not in capsys.readouterr().out


def test_sagemaker_says_that_it_has_no_limit(project, capsys):
    role = "sagemaker.role=arn:aws:iam::123456789012:role/training"
    words = ["--set", role, "--set", "sagemaker.bucket=my-bucket", "--set", "log_limit=8MiB"]
    cli.main(["check", "--backend", "sagemaker", *words])
    assert "log_limit: is not enforced on SageMaker" in capsys.readouterr().err


@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
@pytest.mark.parametrize("name", ["slurm", "local"])
def test_the_log_of_a_real_job(name, cluster, project):
    (project / "train.py").write_text(_PROGRAM)
    argv = ["submit", "--backend", name, "--run", "long", "--set", "log_limit=200kB"]
    assert cli.main(argv) == 0
    assert cli.main(["wait", "long"]) == 1
    log = paths.run_folder("long") / "logs/node-0.log"
    text = log.read_text()
    assert log.stat().st_size < _LIMIT + 2 * relay.END + 20_000  # the launcher's own lines
    assert "[rank 0] log_limit reached (200000 bytes on this node)" in text
    assert "ValueError: the reason" in text
