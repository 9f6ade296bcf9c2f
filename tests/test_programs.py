"""The line that names what was skipped for want of a program."""

from __future__ import annotations

from pathlib import Path

from tests import programs

ROOT = Path(__file__).parents[1]


def test_one_line_names_what_was_skipped_and_the_packages():
    reasons = [
        "Skipped: optional: needs root",
        "Skipped: not installed: zsh",
        *["Skipped: not installed: slurmctld, sbatch"] * 2,
        "Skipped: not installed: scontrol",
    ]
    assert programs.summary(reasons) == (
        "Skipped tests: Slurm (3), completion in zsh (1). "
        "To run them too: apt install slurm-client slurmctld zsh"
    )


def test_nothing_is_said_if_every_program_is_installed():
    assert not programs.summary(["Skipped: optional: needs root"])
    assert not programs.summary(["Skipped: not installed: make .venv-trackers/.ready"])
    assert not programs.reason("sh", "env")


def test_a_missing_program_is_the_reason():
    assert programs.reason("sh", "no-such-program", "nor-this") == (
        "not installed: no-such-program, nor-this"
    )


def test_ci_installs_every_package():
    """CONTRIBUTING names them, too."""
    for file in (".ci/run", "CONTRIBUTING.md"):
        words = (ROOT / file).read_text().replace("`", " ").split()
        packages = {package for _, package in programs.PACKAGES.values()}
        assert packages - {"util-linux"} <= set(words)  # util-linux is on every Debian
