"""Names of logs on a login node, which the job chooses."""

from __future__ import annotations

import os

import pytest

from deploykit import logfiles
from deploykit.backends.slurm import remote
from deploykit.backends.slurm.sent import Place
from deploykit.errors import BackendUnavailable

SSH = '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n'
"""Runs the command here, as ssh would there."""


@pytest.fixture
def there(tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/ssh").write_text(SSH)
    (tmp_path / "bin/ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    (tmp_path / "there/logs").mkdir(parents=True)
    return tmp_path / "there"


@pytest.mark.parametrize("name", ["x\ny.log", "x\n9 logs/node-0.log", "\n.log", "a 1\nb 2.log"])
def test_a_line_end_in_a_name_leaves_the_other_logs_whole(there, tmp_path, name):
    (there / "logs/node-0.log").write_text("one\n")
    (there / "logs/node-1.log").write_text("two\n")
    path = there / "logs" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("evil\n")
    here = tmp_path / "here"
    for _ in range(2):
        remote.fetch_logs(Place("host", str(there)), here)
    lines = [line.text for line in logfiles.read(here / "logs", follow=False, ended=bool)]
    assert lines == ["one", "two"]


def test_an_answer_that_is_none_is_said(there, tmp_path):
    (there.parent / "bin/ssh").write_text("#!/bin/sh\necho deploykit begins; echo nonsense\n")
    with pytest.raises(BackendUnavailable, match="host does not send logs, but"):
        remote.fetch_logs(Place("host", str(there)), tmp_path / "here")
