"""The page of other people's scripts says of each what is really run."""

from __future__ import annotations

import re
import shlex

import pytest

from tests.frameworks.people import BACKENDS, ROOT, description, people

PAGE = (ROOT / "docs/how-to/scripts-of-others.md").read_text()


@pytest.mark.parametrize("person", people(), ids=lambda one: one.name)
def test_a_row_names_what_is_run(person):
    (row,) = [line for line in PAGE.splitlines() if line.startswith(description(person))]
    results = row.removeprefix(description(person)).strip(" |").split(" | ")
    assert len(results) == len(BACKENDS)
    assert all(re.fullmatch(r"\d+ s|not run", result) for result in results)
    assert shlex.join(person.two_nodes) in PAGE


def test_ten_scripts_and_none_of_them_here():
    ours = {path.name for path in (ROOT / "tests").rglob("*.py")}
    assert len(people()) == 10
    assert not {file for person in people() for file in person.files} & ours
