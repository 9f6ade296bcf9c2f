"""Options of the `slurm` section on a real cluster."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, jobs
from deploykit.backends.slurm.options import Container
from deploykit.job.model import State
from deploykit.lib.errors import SubmitRefused
from tests.backends.slurm.slurm_helpers import ended, folder_of, output, wait_for

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

TORCH = Path(importlib.util.find_spec("torch").origin).parents[1]
HELLO = "import os; print('hello', os.environ.get('FROM_MODULE', ''), flush=True)"
LOADER = '() { if [ "$1 $2" = "load tools/1" ]; then export FROM_MODULE=tools; else false; fi; }'
APPTAINER = """#!/bin/sh
echo "$@" > {record}
while [ "$1" != python3 ]; do shift; done
shift
exec {python} "$@"
"""


def final(handle):
    """The final state and reason."""
    status = ended(handle)
    return status.state, status.reason


def log(handle):
    return [line.text for line in slurm.logs(handle, follow=False)]


def test_a_run_waits_for_its_dependency(cluster, make_plan, send):
    first = send(make_plan(HELLO, run="first", options=Options(extra={"hold": ""})))
    options = Options(after={"first": "succeeded"})
    second = send(make_plan(HELLO, run="second", options=options))
    reason = wait_for(lambda: slurm.status([second])[second].reason)
    assert reason == "waiting for the job that it depends on"
    output("scontrol", "release", first.id)
    assert ended(second).state is State.SUCCEEDED
    assert slurm.status([first])[first].state is State.SUCCEEDED


def test_a_run_whose_dependency_failed_is_cancelled(cluster, make_plan, send):
    send(make_plan("raise SystemExit(3)", run="first"))
    options = Options(after={"first": "succeeded"})
    second = send(make_plan(HELLO, run="second", options=options))
    third = send(make_plan(HELLO, run="third", options=Options(after={"first": "failed"})))
    never = "the job that it depends on did not end as required, so it can never start"
    assert final(second) == (State.CANCELLED, never)
    assert final(third) == (State.SUCCEEDED, "")


def test_the_position_in_the_queue(cluster, make_plan, send):
    """The first job takes all nodes; the others are pending in the order of their ids."""
    alone = Options(exclusive=True)
    send(make_plan("import time; time.sleep(900)", run="all", nodes=4, options=alone))
    waiting = [send(make_plan(HELLO, run=f"n{n}", nodes=n, options=alone)) for n in (1, 2)]

    def reasons_with_start_times():
        jobs._pending.cache_clear()
        status_by_handle = slurm.status(waiting)
        reasons = [status_by_handle[handle].reason for handle in waiting]
        return reasons if all("expected" in reason for reason in reasons) else None

    first, second = wait_for(reasons_with_start_times)
    assert first.startswith("waiting for 1 node in partition main; no jobs ahead; expected to")
    assert second.startswith("waiting for 2 nodes in partition main; 1 job ahead; expected to")


def test_modules(cluster, make_plan, send, monkeypatch):
    """`module` is a shell function, which the job inherits through the environment."""
    monkeypatch.setenv("BASH_FUNC_module%%", LOADER)
    handle = send(make_plan(HELLO, options=Options(modules=("tools/1",))))
    assert final(handle) == (State.SUCCEEDED, "")
    assert "hello tools" in log(handle)


def test_apptainer_gets_its_arguments(cluster, make_plan, send, tmp_path, monkeypatch):
    """A stand-in for apptainer records its arguments and runs the program without a container."""
    programs, record = tmp_path / "bin", tmp_path / "record"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER.format(record=record, python=sys.executable))
    (programs / "apptainer").chmod(0o755)
    container = Container("image.sif", "apptainer", ("/tmp:/scratch",))
    handle = send(
        make_plan(HELLO, options=Options(container=container, setup=(f"PATH='{programs}':$PATH",)))
    )
    assert final(handle) == (State.SUCCEEDED, "")
    folder = folder_of("one-1", tmp_path)
    assert record.read_text().startswith(
        f"exec --bind={folder}:{folder},/tmp:/scratch --pwd={folder}/source image.sif python3 "
    )


def test_without_pyxis_the_job_fails_with_the_error_of_srun(cluster, make_plan, send):
    handle = send(make_plan(HELLO, options=Options(container=Container("ubuntu"))))
    assert ended(handle).state is State.FAILED
    assert "unrecognized option '--container-image" in " ".join(log(handle))


def test_mail_and_licenses_reach_the_controller(cluster, make_plan, send):
    options = Options(mail_type="END,FAIL", mail_user="ada", extra={"hold": ""})
    handle = send(make_plan(HELLO, options=options))
    record = output("scontrol", "--oneliner", "show", "job", handle.id)
    assert "MailUser=ada MailType=END,FAIL" in record
    with pytest.raises(SubmitRefused) as caught:
        send(make_plan(HELLO, run="two", options=Options(licenses="matlab:2")))
    assert "slurm.licenses" in caught.value.hint


# --- slurm.setup


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
