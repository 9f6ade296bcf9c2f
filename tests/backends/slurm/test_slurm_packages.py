"""Environments that the nodes of a real cluster make with uv, before their ranks start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.run import registry
from tests import package_index
from tests.package_index import ACCESS, PASSWORD, UV

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.xdist_group("slurm"),
    pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv"),
]
PROGRAM = """\
import sys, tiny, torch
print("tiny", tiny.version, sys.prefix)
"""


def submit(*words):
    sets = [*ACCESS, "environment={uv: ., node_local: true}", "entrypoint.launcher=python"]
    more = [word for setting in sets for word in ("--set", setting)]
    return cli.main(["submit", "-b", "slurm", "--nodes", "2", "--wait", *words, *more])


def test_both_nodes_install_the_lock_before_their_ranks(
    cluster, project, team_index, tmp_path, capsys
):
    package_index.write_project(project, team_index, "tiny<1.1")
    (project / "train.py").write_text(PROGRAM)
    assert submit("--run", "locked") == 0
    said = capsys.readouterr().out
    prefixes = re.findall(r"\] tiny 1\.0 (.*)", said)
    assert len(prefixes) == 2
    assert all(Path(prefix).is_relative_to(tmp_path / "disk") for prefix in prefixes)
    once = "environment: installing the packages of uv.lock into "
    assert said.count(once) == 1  # both nodes have the same disk, and a lock on it
    assert PASSWORD not in said
    assert PASSWORD not in Path(registry.known("locked").folder, "plan.sh").read_text()


def test_a_node_that_cannot_install_ends_the_job(cluster, project, team_index, team_wheels, capsys):
    package_index.write_project(project, team_index, "tiny<1.1")
    (project / "train.py").write_text(PROGRAM)
    (team_wheels / "tiny/tiny-1.0-py3-none-any.whl").unlink()
    assert submit("--run", "broken", "--set", "env.UV_NO_CACHE=1") == 78
    said = capsys.readouterr().out
    assert "Failed to download `tiny==1.0`" in said
    assert "cause   environment_setup" in said
    assert "] tiny" not in said
