"""`slurm.setup` on a real cluster: a line that fails, and an environment that is activated."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.job.model import State
from tests.backends.slurm.slurm_helpers import ended

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

HELLO = "print('here', flush=True)"
TORCH = Path(importlib.util.find_spec("torch").origin).parents[1]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (". nowhere/bin/activate", "exit code 1: . nowhere/bin/activate"),
        ("test -d /nope", "exit code 1: test -d /nope"),
        ("x=$(exit 7)", "exit code 7: x=$(exit 7)"),
    ],
)
def test_a_line_of_setup_that_fails_ends_the_job(line, said, cluster, make_plan, send):
    handle = send(make_plan(HELLO, options=Options(setup=("true", line, "echo never"))))
    status = ended(handle)
    assert (status.state, status.exit_code) == (State.FAILED, 78)
    (reason,) = [
        line.text for line in slurm.logs(handle, follow=False) if "cannot start" in line.text
    ]
    assert reason == f"deploykit: the job cannot start: slurm.setup failed with {said}"


def test_a_file_that_setup_reads_may_have_lines_that_fail(cluster, make_plan, send, tmp_path):
    profile = tmp_path / "profile.sh"
    profile.write_text("grep -q nothing /dev/null\ntest -d /nope\ntrue\n")
    quoted = shlex.quote(str(profile))
    lines = (f". {quoted}", "if test -d /nope; then exit 3; fi", "false || true")
    assert ended(send(make_plan(HELLO, options=Options(setup=lines)))).state is State.SUCCEEDED


def test_an_environment_that_setup_activates_brings_its_python(cluster, make_plan, send, tmp_path):
    environment = tmp_path / "my env"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", environment],
        check=True,
    )
    site = next(environment.glob("lib/python*/site-packages"))
    (site / "packages.pth").write_text(f"{TORCH}\n")
    show = "import sys; print('prefix', sys.prefix, flush=True)"
    setup = (f". {shlex.quote(str(environment))}/bin/activate",)
    handle = send(make_plan(show, options=Options(setup=setup)))
    assert ended(handle).state is State.SUCCEEDED
    assert f"prefix {environment}" in [line.text for line in slurm.logs(handle, follow=False)]
