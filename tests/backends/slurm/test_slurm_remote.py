"""`remote.fetch_logs` with odd names of logs, which the job chooses."""

from __future__ import annotations

import json
import os

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import remote
from deploykit.backends.slurm.remote import RemoteFolder
from deploykit.job.model import Handle
from deploykit.lib import paths
from deploykit.lib.errors import BackendUnavailable
from deploykit.observe import logfiles

SSH = '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n'
"""A stand-in for ssh that runs the command on this machine."""


@pytest.fixture
def run_folder(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "remote/logs").mkdir(parents=True)
    return tmp_path / "remote"


@pytest.mark.parametrize("name", ["x\ny.log", "x\n9 logs/node-0.log", "\n.log", "a 1\nb 2.log"])
def test_a_line_break_in_a_name_leaves_the_other_logs_complete(run_folder, tmp_path, name):
    (run_folder / "logs/node-0.log").write_text("one\n")
    (run_folder / "logs/node-1.log").write_text("two\n")
    path = run_folder / "logs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("evil\n")
    local = tmp_path / "local"
    for _ in range(2):
        remote.fetch_logs(RemoteFolder("host", str(run_folder)), local)
    lines = [line.text for line in logfiles.read(local / "logs", follow=False, ended=bool)]
    assert lines == ["one", "two"]


def test_what_ranks_used_comes_with_the_logs(run_folder, tmp_path):
    (run_folder / "exit_records").mkdir()
    (run_folder / "exit_records/history-evil.jsonl").write_text("{}\n")
    history = run_folder / "exit_records/history-0.jsonl"
    for line in ('{"time": 1}\n', '{"time": 2}\n'):
        with history.open("a") as file:
            file.write(line)
        remote.fetch_logs(RemoteFolder("host", str(run_folder)), tmp_path / "local")
        assert (tmp_path / "local/exit_records/history-0.jsonl").read_text() == history.read_text()
    assert len(list((tmp_path / "local/exit_records").iterdir())) == 1


def test_an_answer_that_is_not_understood_is_reported(run_folder, tmp_path):
    (run_folder.parent / "bin/ssh").write_text("#!/bin/sh\necho deploykit begins; echo nonsense\n")
    with pytest.raises(BackendUnavailable, match=r"host sent .* instead of a log"):
        remote.fetch_logs(RemoteFolder("host", str(run_folder)), tmp_path / "local")


def test_logs_of_a_login_node_are_elsewhere(run_folder, tmp_path):
    """So `metrics` and `watch` fetch what is new, instead of reading the old copy."""
    local = tmp_path / "local"
    paths.make_folder(local / "logs")
    (local / "logs/node-0.log").write_text("step 1 loss 1\n")
    handle = Handle("slurm", "", "1", "one", str(local))
    assert not slurm.logs_elsewhere(handle)
    (local / "remote.json").write_text(json.dumps({"host": "login", "folder": str(run_folder)}))
    assert slurm.logs_elsewhere(handle)
