"""Programs that tests start and pip does not install, with the Debian packages that do."""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest

PACKAGES = {
    "munged": ("Slurm", "munge"),
    "sbatch": ("Slurm", "slurm-client"),
    "scontrol": ("Slurm", "slurm-client"),
    "slurmctld": ("Slurm", "slurmctld"),
    "slurmd": ("Slurm", "slurmd"),
    "slurmdbd": ("Slurm's accounting", "slurmdbd"),
    "mariadbd": ("Slurm's accounting", "mariadb-server"),
    "ssh": ("ssh", "openssh-client"),
    "sshd": ("ssh", "openssh-server"),
    "mpirun": ("mpirun", "openmpi-bin"),
    "ip": ("network namespaces", "iproute2"),
    "tc": ("network namespaces", "iproute2"),
    "nft": ("network namespaces", "nftables"),
    "sysctl": ("network namespaces", "procps"),
    "unshare": ("network namespaces", "util-linux"),
    "shellcheck": ("shellcheck", "shellcheck"),
    "curl": ("the guide to deploy", "curl"),
    "gcc": ("a C library", "gcc"),
    "man": ("the manual page", "man-db"),
    "zsh": ("completion in zsh", "zsh"),
    "fish": ("completion in fish", "fish"),
}
"""Program: the subject of the tests that start it, its package. `.ci/run` installs all of them."""
SLURM = ("munged", "sbatch", "slurmctld", "slurmd")
"""What a cluster on this machine needs."""
_REASON = "not installed: "


def find(name: str) -> str | None:
    """Return the path of a program, or None: on PATH, or where Debian has daemons."""
    return shutil.which(name, path=f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin")


def reason(*programs: str) -> str:
    """Return why tests that start these programs must be skipped, or nothing."""
    missing = [name for name in programs if find(name) is None]
    return f"{_REASON}{', '.join(missing)}" if missing else ""


def need(*programs: str) -> None:
    """Skip the test, or the tests of the fixture, if one of the programs is missing."""
    if why := reason(*programs):
        pytest.skip(why)


def needs(*programs: str) -> pytest.MarkDecorator:
    """Mark a test that starts the programs."""
    why = reason(*programs)
    return pytest.mark.skipif(bool(why), reason=why)


def summary(reasons: list[str]) -> str:
    """Return the line that names what was skipped for want of programs, or nothing."""
    named = [text.partition(_REASON)[2].split(", ") for text in reasons if _REASON in text]
    missing = [programs for programs in named if programs[0] in PACKAGES]  # others name a target
    if not missing:
        return ""
    subjects = Counter(PACKAGES[programs[0]][0] for programs in missing)
    counts = ", ".join(f"{subject} ({count})" for subject, count in subjects.most_common())
    packages = sorted({PACKAGES[name][1] for programs in missing for name in programs})
    return f"Skipped tests: {counts}. To run them too: apt install {' '.join(packages)}"
