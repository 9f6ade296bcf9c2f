"""The page of other people's scripts says of each what is run, and the commands are right."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests.frameworks.people import (
    BACKENDS,
    CONFIG,
    IMAGE,
    ROOT,
    description,
    people,
    section,
)

PAGE = (ROOT / "docs/how-to/scripts-of-others.md").read_text()
everybody = pytest.mark.parametrize("person", people(), ids=lambda one: one.name)


@everybody
def test_a_row_names_what_is_run(person):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(description(person))]
    results = row.removeprefix(description(person)).strip(" |").split(" | ")
    assert len(results) == len(BACKENDS)
    assert all(re.fullmatch(r"\d+ s|not run", result) for result in results)


@everybody
def test_the_commands_are_those_that_are_run(person):
    assert section(person) in PAGE
    assert CONFIG in PAGE
    assert IMAGE in PAGE


@pytest.fixture
def its_folder(tmp_path, monkeypatch):
    """A folder with an empty script of that name, or a package with an empty module."""
    config = Path.home() / ".config/deploykit/config.toml"
    config.parent.mkdir(parents=True)
    config.write_text(CONFIG)
    config.chmod(0o600)
    monkeypatch.chdir(tmp_path)

    def make(person):
        file = tmp_path / (person.script or person.module.replace(".", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    return make


@everybody
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_command_needs_no_job_file(person, backend, its_folder, capsys):
    its_folder(person)
    words = shlex.split(person.command(backend).replace("$IMAGE", IMAGE))
    assert words[0] == "deploykit"
    words[2:2] = ["--dry-run", "--json"]
    assert cli.main([word for word in words[1:] if word != "--wait"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["backend"] == backend
    assert not plan["warnings"]


def test_ten_scripts_and_none_of_them_here():
    ours = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert len(people()) == 10
    assert not {file for person in people() for file in person.files} & ours
