"""What the page on installing says, the Makefile does and the package claims."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/how-to/install.md").read_text()
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@pytest.mark.parametrize(("words", "index"), [(["CPU=1"], True), ([], False)])
def test_make_takes_the_build_without_gpu_libraries_when_asked(words, index, tmp_path):
    command = ["make", "-C", ROOT, "-n", f"VENV={tmp_path}/venv", *words, "run"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    (torch,) = [line for line in shown.splitlines() if line.endswith(" torch")]
    assert (f"--index-url {CPU_INDEX} " in torch) == index


def test_the_page_installs_the_small_build_first_and_from_the_makefiles_index():
    rows = [line for line in PAGE.splitlines() if ".[train]" in line and line.startswith("|")]
    assert [row.split("|")[1].strip() for row in rows] == ["without a GPU", "with a GPU"]
    assert CPU_INDEX in rows[0]
    assert CPU_INDEX not in rows[1]


def test_python_versions_are_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    claimed = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    documented = re.findall(r"^\| (3\.\d+) \|", PAGE, re.MULTILINE)
    assert claimed == documented
    assert project["requires-python"] == f">={claimed[0]}"
