"""The shape of the source: small functions, one module that prints."""

from __future__ import annotations

import ast
import functools
import os
import re
import sys
from pathlib import Path

import pytest

from deploykit.bundle import node_plane

pytestmark = pytest.mark.xdist_group("source")  # one worker parses the files, once
ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("deploykit", "entrypoints", "infra", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


@functools.cache
def tree(path):
    return ast.parse(path.read_text())


def functions(path):
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree(path)) if isinstance(node, kinds)]


def length(node):
    return node.end_lineno - node.lineno + 1


def test_functions_are_small():
    every = [(path, node) for path in SOURCES for node in functions(path)]
    assert [(path, node.name) for path, node in every if length(node) > 60] == []


def test_the_node_plane_is_complete_and_imports_nothing_else():
    """Its files import each other, the standard library and few packages; none is left out."""
    files = node_plane.node_plane()
    package = ROOT / "entrypoints" / "deploykit_node"
    assert len(files) == 1 + len(list(package.rglob("*.py")))
    for name, content in files.items():
        tree = ast.parse(content, feature_version=(3, 10))
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                top = module.split(".")[0]
                others = {
                    "deploykit_node",
                    "boto3",
                    "botocore",
                    "debugpy",
                    "torch",
                    "sitecustomize",
                }
                assert top in sys.stdlib_module_names | others, (name, module)
                if top == "deploykit_node":
                    path = f"{node_plane.FOLDER}/{module.replace('.', '/')}"
                    assert {f"{path}.py", f"{path}/__init__.py"} & set(files), (name, module)


def test_only_one_module_prints():
    """Any other output would bypass what makes untrusted text safe for a terminal."""
    printing = []
    for path in sorted((ROOT / "deploykit").rglob("*.py")):
        for node in ast.walk(tree(path)):
            stream = isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr"}
            stream = stream and isinstance(node.value, ast.Name) and node.value.id == "sys"
            if stream or (isinstance(node, ast.Name) and node.id == "print"):
                printing.append(path.relative_to(ROOT / "deploykit").as_posix())
    # cli/main.py flushes, and discards what cannot be written
    assert sorted(set(printing)) == ["cli/main.py", "cli/output.py"]
    assert printing.count("cli/main.py") == 2


def test_groups_of_tests_that_share_a_server_stay_on_one_worker(request):
    """With pytest 9.2, pytest-xdist 3.8 silently spreads them over all workers."""
    assert request.node.nodeid.endswith("@source") == ("PYTEST_XDIST_WORKER" in os.environ)


def test_what_make_test_does_not_collect_has_no_quick_test():
    """It ignores files of which every test starts torch, because collecting them imports it."""
    makefile = (ROOT / "Makefile").read_text()
    ignored = [ROOT / name for name in re.findall(r"--ignore (\S+)", makefile)]
    assert ignored
    for place in ignored:
        for path in place.rglob("test_*.py") if place.is_dir() else [place]:
            text = path.read_text()
            assert re.search(r"^pytestmark = [^]]*pytest\.mark\.torch", text, re.MULTILINE), path
            assert "mark.quick" not in text, path


VAGUE = {"asked", "found", "ours", "said", "theirs", "there", "told"}


def stored_names(path):
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno


def test_a_variable_is_called_by_what_it_holds():
    """Not by what was done to get it."""
    shipped = [path for path in SOURCES if path.relative_to(ROOT).parts[0] != "benchmarks"]
    vague = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in shipped
        for name, line in stored_names(path)
        if name in VAGUE
    ]
    assert vague == []
