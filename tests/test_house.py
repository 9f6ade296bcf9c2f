"""The house keeps its shape: small files and functions, a wheel that holds what ships."""

from __future__ import annotations

import ast
import os
import statistics
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploykit import contract

ROOT = Path(__file__).parent.parent
SOURCES = [
    path
    for folder in ("deploykit", "entrypoints", "infra", "benchmarks")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def functions(path):
    tree = ast.parse(path.read_text())
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def length(node):
    return node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_files_and_functions_are_small(path):
    assert len(path.read_text().splitlines()) <= 400
    assert [node.name for node in functions(path) if length(node) > 60] == []


def test_most_functions_are_short():
    lengths = sorted(length(node) for path in SOURCES for node in functions(path))
    assert statistics.median(lengths) <= 10
    assert lengths[len(lengths) * 9 // 10] <= 30


def test_the_node_plane_is_complete_and_stands_alone():
    """Its files import each other, the standard library, torch and boto3; none is left out."""
    files = contract.node_plane()
    package = ROOT / "entrypoints" / "deploykit_node"
    assert len(files) == 1 + len(list(package.rglob("*.py")))
    for name, content in files.items():
        tree = ast.parse(content, feature_version=(3, 10))
        for node in ast.walk(tree):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module] if isinstance(node, ast.ImportFrom) else []
            for module in modules:
                top = module.split(".")[0]
                others = {"deploykit_node", "boto3", "botocore", "torch"}
                assert top in sys.stdlib_module_names | others, (name, module)
                if top == "deploykit_node":
                    path = f"{contract.FOLDER}/{module.replace('.', '/')}"
                    assert {f"{path}.py", f"{path}/__init__.py"} & set(files), (name, module)


def test_only_one_module_prints():
    """Whatever else wrote to a terminal would go round what makes the words of others safe."""
    found = []
    for path in sorted((ROOT / "deploykit").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            stream = isinstance(node, ast.Attribute) and node.attr in {"stdout", "stderr"}
            stream = stream and isinstance(node.value, ast.Name) and node.value.id == "sys"
            if stream or (isinstance(node, ast.Name) and node.id == "print"):
                found.append(path.relative_to(ROOT / "deploykit").as_posix())
    # cli.py flushes, and lets go of what cannot be written
    assert sorted(set(found)) == ["cli.py", "commands/output.py"]
    assert found.count("cli.py") == 2


def test_the_wheel_holds_what_ships(tmp_path):
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(argv, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    for folder, pattern in (("templates", "*.j2"), ("entrypoints", "*.py")):
        for path in (ROOT / folder).rglob(pattern):
            assert f"deploykit/{path.relative_to(ROOT).as_posix()}" in inside
    assert "deploykit/cli.py" in inside
    assert not any(name.startswith(("tests/", "infra/", "entrypoints/")) for name in inside)


def test_a_wheel_works_where_there_is_no_checkout(tmp_path):
    argv = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(argv, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    (tmp_path / "train.py").touch()
    (tmp_path / "job.yaml").write_text(
        "name: x\nentrypoint: {script: train.py}\nresources: {time_limit: 1m}\n"
    )
    main = "import deploykit.cli as c; assert 'site/' in c.__file__; raise SystemExit(c.main())"
    done = subprocess.run(
        [sys.executable, "-c", main, "submit", "--backend", "slurm", "--dry-run"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path / "site"), "HOME": str(tmp_path), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "torchrun --nnodes=1" in done.stdout


@pytest.mark.xdist_group("house")
def test_the_groups_of_tests_that_share_a_server_hold(request):
    """With pytest 9.2, pytest-xdist 3.8 spreads them over all workers without a word."""
    assert request.node.nodeid.endswith("@house") == ("PYTEST_XDIST_WORKER" in os.environ)
