"""Environments that the nodes make with uv: from the uv.lock of a project, or a script's header.

uv is the real one, and installs tiny packages from an index that asks for a password.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.run import registry
from tests import package_index
from tests.package_index import PASSWORD, PROJECT, USER, UV, add_wheel

pytestmark = pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
SHOW = "import sys, tiny; print('tiny', tiny.version, sys.prefix)\n"


@pytest.fixture
def packages(tmp_path):
    """The folder of the index, with two versions of `tiny`."""
    folder = tmp_path / "packages"
    for version in ("1.0", "1.1"):
        add_wheel(folder, "tiny", version)
    return folder


@pytest.fixture
def index(packages, tmp_path, monkeypatch):
    """The address of the index; uv's cache and the nodes' own disk are the test's."""
    disk = tmp_path / "disk"
    disk.mkdir()
    monkeypatch.setenv("TMPDIR", str(disk))
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", f"{Path(UV).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("TEAM_TOKEN", PASSWORD)
    with package_index.serve(packages) as address:
        yield address


ACCESS = ["env.UV_INDEX_TEAM_USERNAME=" + USER, "env.UV_INDEX_TEAM_PASSWORD=secret:env:TEAM_TOKEN"]


def submit(*words, sets=ACCESS):
    """Submit and wait; returns the exit code."""
    return cli.main(["submit", *words, "--wait", *(w for s in sets for w in ("--set", s))])


@pytest.fixture
def uv_project(project, index):
    """A uv project with a lock, whose script imports `tiny`."""
    (project / "pyproject.toml").write_text(PROJECT.format(url=index, dependencies='["tiny<1.1"]'))
    (project / "train.py").write_text(SHOW)
    package_index.lock(project)
    return project


@pytest.mark.torch
def test_two_nodes_get_one_environment_from_the_lock(uv_project, tmp_path, capsys):
    sets = [*ACCESS, "environment={uv: ., node_local: true}"]
    assert submit("--run", "first", "--nodes", "2", sets=sets) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"\] tiny 1\.0 ", said)) == 2
    assert said.count("environment: uv installs uv.lock into ") == 1
    assert str(tmp_path / "disk") in said
    assert PASSWORD not in said
    assert submit("--run", "again", sets=sets) == 0  # the environment is there
    assert "uv installs" not in capsys.readouterr().out
    folder = Path(registry.known("first").folder)
    assert 'name = "tiny"\nversion = "1.0"' in (folder / "exit_records/pylock.toml").read_text()
    kept = "".join(
        file.read_text() for file in folder.rglob("*") if file.suffix in {".sh", ".json"}
    )
    assert PASSWORD not in kept
