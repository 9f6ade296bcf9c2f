"""Options of the `slurm` section on a real cluster: what the controller makes of them."""

from __future__ import annotations

import sys

import pytest
from slurm_helpers import ended, folder_of, output, wait_for

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, watching
from deploykit.backends.slurm.options import Container
from deploykit.errors import SubmitRefused
from deploykit.model import State

pytestmark = [pytest.mark.slurm, pytest.mark.torch, pytest.mark.xdist_group("slurm")]

HELLO = "import os; print('hello', os.environ.get('FROM_MODULE', ''), flush=True)"
LOADER = '() { if [ "$1 $2" = "load tools/1" ]; then export FROM_MODULE=tools; else false; fi; }'
APPTAINER = """#!/bin/sh
echo "$@" > {seen}
while [ "$1" != python3 ]; do shift; done
shift
exec {python} "$@"
"""


def last(handle):
    """What `status` says at the end."""
    status = ended(handle)
    return status.state, status.reason


def said(handle):
    return [line.text for line in slurm.logs(handle, follow=False)]


def test_a_run_waits_for_another(cluster, make_plan, send):
    first = send(make_plan(HELLO, run="first", options=Options(extra={"hold": ""})))
    options = Options(after={"first": "succeeded"})
    second = send(make_plan(HELLO, run="second", options=options))
    waits = wait_for(lambda: slurm.status([second])[second].reason)
    assert waits == "waits for the job that it depends on"
    output("scontrol", "release", first.id)
    assert ended(second).state is State.SUCCEEDED
    assert slurm.status([first])[first].state is State.SUCCEEDED


def test_a_run_that_waits_for_one_that_failed_ends(cluster, make_plan, send):
    send(make_plan("raise SystemExit(3)", run="first"))
    options = Options(after={"first": "succeeded"})
    second = send(make_plan(HELLO, run="second", options=options))
    third = send(make_plan(HELLO, run="third", options=Options(after={"first": "failed"})))
    never = "the job that it depends on ended otherwise; this one never starts"
    assert last(second) == (State.CANCELLED, never)
    assert last(third) == (State.SUCCEEDED, "")


def test_the_place_in_the_queue(cluster, make_plan, send):
    """The first takes all nodes; the others wait in the order in which they came."""
    alone = Options(exclusive=True)
    send(make_plan("import time; time.sleep(900)", run="all", nodes=4, options=alone))
    waiting = [send(make_plan(HELLO, run=f"n{n}", nodes=n, options=alone)) for n in (1, 2)]

    def told():
        watching._queue.cache_clear()
        found = slurm.status(waiting)
        reasons = [found[handle].reason for handle in waiting]
        return reasons if all("expects" in reason for reason in reasons) else None

    first, second = wait_for(told)
    assert first.startswith("waits for 1 node of partition main; no jobs ahead; Slurm expects to")
    assert second.startswith("waits for 2 nodes of partition main; 1 job ahead; Slurm expects to")


@pytest.mark.parametrize(("name", "code"), [("tools/1", 0), ("tools/2", 78)])
def test_modules(cluster, make_plan, send, monkeypatch, name, code):
    """A site's `module` is a shell function, which the environment carries to the job."""
    monkeypatch.setenv("BASH_FUNC_module%%", LOADER)
    handle = send(make_plan(HELLO, options=Options(modules=(name,))))
    assert ended(handle).exit_code == code
    told = "hello tools" if code == 0 else "slurm.modules cannot be loaded"
    assert told in " ".join(said(handle))


def test_apptainer_gets_its_words(cluster, make_plan, send, tmp_path, monkeypatch):
    """No image can be had here: what stands for apptainer runs the program as it is."""
    programs, seen = tmp_path / "bin", tmp_path / "seen"
    programs.mkdir()
    (programs / "apptainer").write_text(APPTAINER.format(seen=seen, python=sys.executable))
    (programs / "apptainer").chmod(0o755)
    container = Container("image.sif", "apptainer", ("/tmp:/scratch",))
    handle = send(
        make_plan(HELLO, options=Options(container=container, setup=(f"PATH='{programs}':$PATH",)))
    )
    assert last(handle) == (State.SUCCEEDED, "")
    folder = folder_of("one-1", tmp_path)
    assert seen.read_text().startswith(
        f"exec --bind={folder}:{folder},/tmp:/scratch --pwd={folder}/source image.sif python3 "
    )


def test_pyxis_where_there_is_none_fails_with_sruns_words(cluster, make_plan, send):
    handle = send(make_plan(HELLO, options=Options(container=Container("ubuntu"))))
    assert ended(handle).state is State.FAILED
    assert "unrecognized option '--container-image" in " ".join(said(handle))


def test_mail_and_licences_reach_the_controller(cluster, make_plan, send):
    options = Options(mail_type="END,FAIL", mail_user="ada", extra={"hold": ""})
    handle = send(make_plan(HELLO, options=options))
    shown = output("scontrol", "--oneliner", "show", "job", handle.id)
    assert "MailUser=ada MailType=END,FAIL" in shown
    with pytest.raises(SubmitRefused) as caught:
        send(make_plan(HELLO, run="two", options=Options(licenses="matlab:2")))
    assert "slurm.licenses" in caught.value.hint
