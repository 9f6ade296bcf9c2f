"""`examples/backend_print.py`: a backend from outside, found by its entry point and really used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit import backend, cli

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """What pip leaves behind of a package that offers the backend."""
    site = tmp_path / "site"
    info = site / "paper-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: paper\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[deploykit.backends]\nprint = backend_print\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(EXAMPLES)


def run(capsys, *argv):
    code = cli.main(list(argv))
    return code, capsys.readouterr()


def test_it_is_a_backend_with_every_function():
    engine = backend.find("print")
    members = {name for name in vars(backend.Backend) if not name.startswith("_")}
    assert len(members) == 11
    assert all(hasattr(engine, name) for name in members)
    assert list(backend.names())[-1] == "print"


def test_its_whole_life(project, capsys):
    argv = ["--backend", "print", "--run", "one", "--set", "print.prefix='> '"]
    _, shown = run(capsys, "submit", *argv, "--dry-run")
    assert shown.out == "> train.py --epochs 5\n"
    code, shown = run(capsys, "submit", *argv, "--wait")
    assert code == 0
    assert "[node 0] > train.py --epochs 5\n" in shown.out
    assert "one: succeeded, exit code 0" in shown.out
    assert json.loads(run(capsys, "status", "--json")[1].out)[0]["handle"] == "print://paper/one"
    assert run(capsys, "logs", "one")[1].out == "[node 0] > train.py --epochs 5\n"
    assert run(capsys, "cancel", "one")[0] == 0
    assert "print\tyes\t" in run(capsys, "backends")[1].out


def test_its_problems_are_reported(project, capsys):
    argv = ["--backend", "print", "--set", "resources.nodes=2", "--set", "print.prefx=x"]
    code, shown = run(capsys, "check", *argv[:4])
    assert code == 65
    assert "resources.nodes: paper has one node (nodes: 1)" in shown.err
    code, shown = run(capsys, "check", *argv)
    assert "print.prefx: there is no such key (did you mean 'prefix'?)" in shown.err


def test_init_writes_its_section_too(project, capsys):
    assert run(capsys, "init", "new.yaml")[0] == 0
    assert "#   # What stands before the program.\n" in (project / "new.yaml").read_text()


def test_contributing_names_every_function():
    text = (EXAMPLES.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    functions = ("check", "plan", "submit", "find", "status", "logs", "cancel")
    for number, name in enumerate(functions, 1):
        assert f"\n{number}. `{name}(" in text
