"""Security rules of the project: dangerous calls, ruff's exceptions, SECURITY.md."""

from __future__ import annotations

import json
import re
import sys
import tomllib

import pytest

from tests.audit import calls, packages

ROOT = calls.ROOT
HIDDEN = {
    "import os; os.system('x')": "os.system",
    "import subprocess as s\ndef f(): s.run(['x'])": "subprocess.run",
    "from os import execvp as go; go('x', [])": "os.execvp",
    "def f():\n    from subprocess import Popen\n    return Popen": "subprocess.Popen",
    "import subprocess; start = subprocess.Popen": "subprocess.Popen",
    "import os; getattr(os, 'popen')('x')": "os.popen",
    "import pickle\nclass A(pickle.Unpickler): pass": "pickle.Unpickler",
    "import torch; torch.load('x', weights_only=True)": "torch.load",
    "from torch.distributed import checkpoint as dcp; dcp.load({})": (
        "torch.distributed.checkpoint.load"
    ),
    "import numpy as np; np.load('x', allow_pickle=True)": "allow_pickle=True",
    "run('x', shell=True)": "shell=True",
    "eval('1')": "eval",
    "import builtins; builtins.exec('1')": "builtins.exec",
    "__import__('os')": "__import__",
    "import tarfile; tarfile.open('x')": "tarfile.open",
    "import yaml; yaml.unsafe_load('x')": "yaml.unsafe_load",
    "import xml.etree.ElementTree as E; E.parse('x')": "xml.etree.ElementTree.parse",
    "import socket; socket.socket().bind(('', 1))": ".bind",
    "from http.server import HTTPServer; HTTPServer(('', 1), None)": "http.server.HTTPServer",
    "import ctypes; ctypes.CDLL('x')": "ctypes.CDLL",
    "import tempfile; tempfile.mktemp()": "tempfile.mktemp",
    "import jinja2; jinja2.Environment()": "jinja2.Environment",
    "@wraps(exec)\ndef f(a=eval): pass": "exec",
}
HARMLESS = [
    "import re; re.compile('x')",
    "import subprocess; subprocess.PIPE; subprocess.TimeoutExpired",
    "import subprocess\ndef f(p: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]: return p",
    "import pickle\ntry: f()\nexcept pickle.UnpicklingError: pass",
    "model.eval(); torch.compile(model)",
]


def of(tmp_path, text):
    """The calls in a product of one file."""
    folder = tmp_path / "deploykit"
    folder.mkdir()
    (folder / "new.py").write_text(text)
    return {call.call for call in calls.found(tmp_path)}


def test_the_list_names_every_call_of_interest_and_nothing_that_is_gone(capsys):
    """`.venv/bin/python tests/audit/calls.py` prints what to add."""
    assert calls.main() == 0, capsys.readouterr().out


@pytest.mark.parametrize("text", HIDDEN, ids=HIDDEN.values())
def test_a_new_call_is_found_whatever_it_is_called(tmp_path, text):
    assert HIDDEN[text] in of(tmp_path, text)


@pytest.mark.parametrize("text", HARMLESS)
def test_names_that_only_look_alike_are_left_alone(tmp_path, text):
    assert of(tmp_path, text) == set()


def test_a_second_call_in_the_same_function_is_new(tmp_path):
    text = "import os\ndef f():\n    os.system('a')\n"
    listed = tmp_path / "calls.toml"
    listed.write_text(
        '[[call]]\nfile = "deploykit/new.py"\nfunction = "f"\ncall = "os.system"\nwhy = "a"\n'
    )
    of(tmp_path, text)
    assert calls.missing(calls.found(tmp_path), listed) == []
    (tmp_path / "deploykit/new.py").write_text(text + "    os.system('b')\n")
    (stub,) = calls.missing(calls.found(tmp_path), listed)
    assert tomllib.loads(stub)["call"][0]["times"] == 2


def test_an_entry_without_a_reason_is_refused(tmp_path):
    path = tmp_path / "calls.toml"
    path.write_text('[[call]]\nfile = "a"\nfunction = "f"\ncall = "c"\nwhy = " "\n')
    with pytest.raises(ValueError, match="no `why`"):
        calls.listed(path)


def test_every_exception_from_ruffs_security_rules_has_its_reason_beside_it():
    lines = [
        (path, line)
        for folder in calls.FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"# noqa: [^-#]*\bS\d{3}", line)
    ]
    assert len(lines) > 5
    assert [found for found in lines if " - " not in found[1].partition("# noqa:")[2]] == []


def test_ruffs_security_rules_are_all_on():
    text = (ROOT / "pyproject.toml").read_text()
    ruff = tomllib.loads(text)["tool"]["ruff"]["lint"]
    assert ruff["select"] == ["ALL"]
    assert [rule for rule in ruff["ignore"] if re.fullmatch(r"S\d*", rule)] == []
    for pattern, rules in ruff["per-file-ignores"].items():
        if any(re.fullmatch(r"S\d*", rule) for rule in rules):
            (line,) = [one for one in text.splitlines() if one.startswith(f'"{pattern}" =')]
            assert "  # " in line, f"{pattern} has no reason beside it"


CLEAN = {"name": "b", "version": "1", "vulns": []}
VULNERABLE = {"name": "a", "version": "1", "vulns": [{"id": "CVE-1", "fix_versions": ["2"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found"}


def told(*packages):
    return f"print({json.dumps(json.dumps({'dependencies': packages}))})"


@pytest.mark.parametrize(
    ("program", "code", "line"),
    [
        ("raise SystemExit('Traceback')", 69, "so no package was checked"),
        (told(), 69, "so no package was checked"),
        (told(CLEAN), 0, "1 packages checked, 0 known vulnerabilities"),
        (told(CLEAN, VULNERABLE), 1, "a 1: CVE-1, mended in 2"),
        (told(CLEAN, SKIPPED), 1, "c: was not checked: not found"),
    ],
    ids=["unreachable", "empty", "clean", "vulnerable", "skipped"],
)
def test_packages_are_green_only_where_each_was_checked(tmp_path, program, code, line):
    path = tmp_path / "pip-audit"
    path.write_text(f"#!{sys.executable}\n{program}\n")
    path.chmod(0o755)
    ended, said = packages.audit(path, tmp_path / "constraints.txt")
    assert ended == code
    assert line in said
    assert "Traceback" not in said


def test_packages_without_the_program_are_no_success(tmp_path):
    ended, said = packages.audit(tmp_path / "none", tmp_path / "constraints.txt")
    assert ended == 69
    assert "so no package was checked" in said


PAGE = (ROOT / "SECURITY.md").read_text()


def named_tests(text):
    """The tests that a line names: each behind the file that holds it."""
    for link in re.finditer(r"\]\((tests/[^)]+)\)((?:[ ,]*`test_\w+`)*)", text):
        yield ROOT / link[1], re.findall(r"`(test_\w+)`", link[2])


def test_every_test_that_the_page_on_security_names_is_there():
    found = list(named_tests(PAGE))
    assert len(found) > 8
    for path, names in found:
        assert path.exists(), path
        for name in names:
            assert f"def {name}(" in path.read_text(), (path, name)


def test_every_claim_of_the_page_on_security_has_its_test():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 12
    for row in rows:
        assert "`test_" in row, row


def test_the_page_on_security_is_one_page():
    assert len(PAGE.split()) < 900
    assert "SECURITY.md" in (ROOT / "README.md").read_text()
    assert "SECURITY.md" in (ROOT / "CONTRIBUTING.md").read_text()
