"""The manual page: whole, and without a complaint of man."""

from __future__ import annotations

import subprocess
from pathlib import Path

from deploykit.cli import main as cli
from tests.programs import need

PAGE = Path(__file__).parents[2] / "docs/reference/deploykit.1"


def test_man_shows_the_page_without_a_complaint():
    need("man")
    argv = ["man", "--warnings=all", "-E", "UTF-8", "-l", "-Tutf8", "-Z", str(PAGE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    shown = subprocess.run(
        ["man", "-E", "ascii", "-l", str(PAGE)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": "/usr/bin:/bin", "MANPAGER": "cat", "MANWIDTH": "200", "TERM": "dumb"},
    ).stdout
    for verb in cli.VERBS:
        assert f"deploykit {verb}" in shown
    assert "--set KEY=VALUE" in shown
    assert "deploykit list --name 'exp-*' -n 100" in shown
    for heading in ("NAME", "SYNOPSIS", "EXIT STATUS", "ENVIRONMENT", "FILES", "EXAMPLES"):
        assert f"\n{heading}\n" in shown
    assert "`" not in shown
