"""Folders and limits that a user may have without knowing: each gets a sentence that says so."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from deploykit.cli import main as cli

ODD = os.fsdecode(b"latin \xe9")
"""A name that is not UTF-8."""
C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def shown(*argv, folder=None, code=0, before="", **env):
    """What a verb prints to standard error, in a process of its own."""
    script = f'{before} exec "$@"'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-P", "-m", "deploykit", *argv],
        cwd=folder,
        env={**os.environ, **env},
        capture_output=True,
        check=False,
    )
    err = done.stderr.decode(errors="replace")
    assert done.returncode == code, err
    return err


@pytest.mark.parametrize("verb", [["list"], ["submit", "--dry-run"], ["status"]])
def test_a_state_folder_that_is_not_utf8(verb, project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / ODD))
    assert cli.main(verb) == 73
    err = capsys.readouterr().err
    assert "error: the state folder '" in err
    assert "latin \\udce9' is not a valid UTF-8 name" in err
    assert "DEPLOYKIT_HOME" in err


def test_a_state_folder_with_a_backslash(project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "back\\slash"))
    assert cli.main(["submit", "--dry-run", "--backend", "local"]) == 0
    assert cli.main(["submit", "--dry-run", "--backend", "slurm"]) == 65
    assert "contains a control character, % or \\, which Slurm does" in capsys.readouterr().err


@pytest.mark.parametrize("verb", [["check"], ["submit", "--run", "one"], ["submit", "--dry-run"]])
def test_a_source_folder_that_is_not_utf8(verb, project, tmp_path, monkeypatch, capsys):
    project.rename(tmp_path / ODD)
    monkeypatch.chdir(tmp_path / ODD)
    assert cli.main(verb) == 64
    assert "latin \\udce9' is not a valid UTF-8 name" in capsys.readouterr().err


def test_a_locale_without_utf8_in_a_folder_with_umlauts(project, tmp_path):
    folder = project.rename(tmp_path / "Übung")
    said = "requires a UTF-8 locale: export LC_ALL=C.UTF-8"
    assert said in shown("submit", "--run", "one", folder=folder, code=64, **C_LOCALE)
    home = str(tmp_path / "ä")
    assert said in shown("list", code=73, DEPLOYKIT_HOME=home, **C_LOCALE)
    shown("submit", "--dry-run", folder=folder)


@pytest.mark.parametrize("verb", ["init", "check", "report"])
def test_a_working_folder_that_was_deleted(verb, live, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    live.end()
    err = shown(verb, folder=gone, code=66, before=f"rmdir '{gone}';")
    assert "error: the working folder was deleted" in err
    assert "change to another folder" in err


def test_a_limit_of_processes(live, monkeypatch, capsys):
    """As `ulimit -u 6` makes it, which root is not subject to."""
    live.log("step 1/2 loss 0.5")

    def refused(*_, **__):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("subprocess.Popen", refused)
    assert cli.main(["diagnose", str(live.folder / "logs/node-0.log")]) == 75
    err = capsys.readouterr().err
    assert "error: cannot start another process: [Errno 11] Resource temporarily" in err
    assert "ulimit -u" in err
