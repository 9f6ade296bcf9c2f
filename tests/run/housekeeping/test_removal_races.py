"""What is removed while another process uses it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deploykit.bundle import archive as bundle
from deploykit.cli import main as cli
from deploykit.job.model import State
from deploykit.lib import paths
from deploykit.run import registry, storage
from deploykit.run import state as run_state
from tests.run.housekeeping.conftest import LIMIT
from tests.run.housekeeping.state import names, run


def test_a_bundle_is_kept_for_a_submit_that_has_just_found_it(add, source, capsys, monkeypatch):
    """The other run goes between the submit's look at the archive and its unpacking."""
    add("first")
    holds = bundle.holds

    def look(*args):
        found = holds(*args)
        assert cli.main(["rm", "first"]) == 0
        return found

    registry.add(registry.get("first")._replace(run="second", id=None))
    monkeypatch.setattr(bundle, "holds", look)
    monkeypatch.setattr(bundle, "_checked", {})  # as in a process of its own
    archive = bundle.store(bundle.scan(source, LIMIT))
    assert archive.is_file()
    assert names() == {"second"}


def test_a_submit_waits_while_a_bundle_is_removed(add, source):
    """Between the look at the registry and the removal no run can begin to refer to it."""
    add("first")
    row = registry.get("first")
    registry.remove("first")
    order = []

    def submit():
        registry.add(row._replace(run="second"))
        order.append("added")

    def removing():
        other.start()
        time.sleep(0.3)
        order.append("removed")

    other = threading.Thread(target=submit)
    registry.release(row.bundle, removing)
    other.join()
    assert order == ["removed", "added"]


@pytest.mark.parametrize("verb", [["rm", "exp-alpha"], ["prune", "--older", "0s", "--yes"]])
def test_two_removals_at_once_remove_everything_and_fail_at_nothing(add, verb):
    folder = add("exp-alpha", days=1)
    for number in range(2000):
        (folder / f"output/{number}").touch()
    argv = [sys.executable, "-m", "deploykit", *verb]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    both = [
        subprocess.Popen(argv, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        for _ in range(2)
    ]
    ended = [(child.communicate()[1].decode(), child.returncode) for child in both]
    # `rm` may find the run gone (66), or being removed (75)
    assert {code for _, code in ended} <= ({0} if verb[0] == "prune" else {0, 66, 75}), ended
    assert 0 in {code for _, code in ended}
    assert "unexpected" not in "".join(err for err, _ in ended)
    assert not folder.exists()
    assert names() == set()


def test_a_run_whose_folder_another_process_has_just_removed_is_removed(add, monkeypatch):
    folder = add("exp-alpha", days=1)
    submitting = paths.submitting

    def lost(*args):
        shutil.rmtree(folder)
        return submitting(*args)

    monkeypatch.setattr(paths, "submitting", lost)
    storage.remove_run(registry.known("exp-alpha"))
    assert names() == set()


def test_a_file_written_into_a_folder_while_it_is_removed_goes_too(add, monkeypatch):
    """As another process that removes the same run does, with its lock."""
    folder = add("exp-alpha", days=1)
    remove_folder = os.rmdir

    def write_first(path, **at):
        if path == folder:
            monkeypatch.setattr(os, "rmdir", remove_folder)
            (folder / "submitting").touch()
        remove_folder(path, **at)

    monkeypatch.setattr(os, "rmdir", write_first)
    storage.remove_run(registry.known("exp-alpha"))
    assert not folder.exists()


def test_a_run_that_is_being_submitted_is_not_removed(add, capsys):
    """An unsent one: the same id is being sent again just now."""
    folder = add("exp-alpha", State.UNSENT, days=1)
    with paths.submitting(folder, "exp-alpha"):
        assert run(capsys, "rm", "exp-alpha")[0] == 75
    assert folder.is_dir()
    assert names() == {"exp-alpha"}


def test_a_run_that_another_process_removed_is_no_error_for_a_list(add, monkeypatch):
    add("exp-alpha")
    row = registry.get("exp-alpha")
    registry.remove("exp-alpha")
    assert [one.run for one in run_state.refresh([row])] == ["exp-alpha"]
