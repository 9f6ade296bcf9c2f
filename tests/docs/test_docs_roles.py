"""The page of four first minutes: each role is played again, and prints what the page shows."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.docs_runner import consoles
from tests.programs import SLURM, needs

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "benchmarks/roles.md").read_text(encoding="utf-8")
MARKS = {
    "A student with a laptop": (),
    "A researcher on a Slurm cluster": (
        pytest.mark.nightly,
        pytest.mark.slurm,
        pytest.mark.xdist_group("slurm"),
        needs(*SLURM),
    ),
    "An engineer on SageMaker": (pytest.mark.aws,),
    "An operator": (),
}


@pytest.fixture
def roles(monkeypatch):
    """The script that writes the page."""
    monkeypatch.syspath_prepend(ROOT / "docs")
    import roles

    return roles


def section(name):
    """The transcript of a role."""
    return re.search(rf"^## {name}$.*?^```console\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)[1]


def test_the_page_has_every_role_and_no_dead_end(roles):
    assert [role.name for role in roles.ROLES] == list(MARKS)
    commands = [command for role in roles.ROLES for command, _ in role.commands]
    assert [command for command, _, _ in consoles(PAGE)] == commands
    rows = re.findall(r"^\| (An? .*?) \| (\d+) s \| \d+ \| (\d+) \|$", PAGE, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(MARKS)
    assert all(int(seconds) <= 180 and dead_ends == "0" for _, seconds, dead_ends in rows)


@pytest.mark.torch
@pytest.mark.parametrize("name", [pytest.param(name, marks=marks) for name, marks in MARKS.items()])
def test_a_role_sees_what_the_page_shows(roles, name, tmp_path):
    (role,) = (role for role in roles.ROLES if role.name == name)
    shown, _ = roles.play(role, Path(sys.executable).parent, tmp_path / "home")
    assert in_one_order(roles.loose(shown)) == in_one_order(roles.loose(section(name)))


def in_one_order(text):
    """The text with rows of `deploykit disk` in the order of runs: that of sizes may change."""
    rows = re.compile(r"(?:^\w+\t\w+(?:\t\.\.\.){6}\n)+", re.MULTILINE)
    return rows.sub(lambda found: "".join(sorted(found[0].splitlines(keepends=True))), text)
