"""Rules for the node plane's source: old Pythons, no other packages, no import cycles."""

from __future__ import annotations

import ast
import graphlib
import os
import re
import subprocess
import sys

import pytest

from deploykit.bundle import node_plane
from deploykit.lib import paths

FILES = {
    name: ast.parse(text, feature_version=(3, 10)) for name, text in node_plane.node_plane().items()
}
PACKAGE = f"{node_plane.FOLDER}/deploykit_node"
ALLOWED = {
    f"{PACKAGE}/bucket.py": {"boto3", "botocore"},
    f"{PACKAGE}/environment.py": {"boto3", "botocore"},
    f"{PACKAGE}/preflight/members.py": {"torch"},
    f"{PACKAGE}/network/elastic.py": {"torch"},
    f"{PACKAGE}/observe/debug_server.py": {"debugpy"},  # in the Python of the job
    f"{PACKAGE}/observe/torch_profile.py": {"torch"},
    f"{PACKAGE}/observe/hook/sitecustomize.py": {"sitecustomize"},  # the program's own
}


def imported(tree):
    """Dotted names of the modules that a file imports, at its top or inside a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def file_of(module):
    """The node plane's file that holds a module, or a name in it; None for other packages."""
    while module.startswith("deploykit_node"):
        path = f"{node_plane.FOLDER}/{module.replace('.', '/')}"
        for name in (f"{path}.py", f"{path}/__init__.py"):
            if name in FILES:
                return name
        module = module.rpartition(".")[0]
    return None


@pytest.mark.parametrize("name", FILES)
def test_imports_only_the_standard_library_and_its_own_package(name):
    allowed = sys.stdlib_module_names | {"deploykit_node"} | ALLOWED.get(name, set())
    assert {module.partition(".")[0] for module in imported(FILES[name])} <= allowed


def test_no_file_imports_itself_through_others():
    """A cycle raises CycleError. Imports for type checkers and inside functions count."""
    graph = {
        name: {file for file in map(file_of, imported(tree)) if file and file != name}
        for name, tree in FILES.items()
    }
    assert len(list(graphlib.TopologicalSorter(graph).static_order())) == len(FILES)


def test_modules_of_the_user_neither_hide_ours_nor_are_hidden(bundle, as_rank):
    """The user's folder, also on PYTHONPATH, has modules with the names of ours."""
    names = ["cluster", "command", "log", "network", "node", "rank", "records"]
    names += ["relay", "signals", "launch"]
    for name in names:
        bundle.write(f"{name}.py", "MINE = True\n")
    bundle.write(
        "use.py", f"import {', '.join(names)}\nprint(all(m.MINE for m in [{', '.join(names)}]))"
    )
    done = bundle.run("use.py", **as_rank, PYTHONPATH=bundle.source)
    assert done.said["rank 3"] == ["True"], done.log


def test_the_user_cannot_import_the_node_plane(bundle, as_rank):
    bundle.write("use.py", "import deploykit_node")
    assert "No module named 'deploykit_node'" in bundle.run("use.py", **as_rank).log


def test_starts_where_python_leaves_the_scripts_folder_out(bundle, as_rank):
    bundle.write("use.py", "print('ran')")
    assert bundle.run("use.py", **as_rank, PYTHONSAFEPATH=1).said["rank 3"] == ["ran"]


def test_nothing_large_is_imported_before_it_is_needed(bundle, as_rank):
    """A rank is started for each GPU; asyncio and torch belong to the preflight test."""
    code = "import sys; sys.argv = ['x']; sys.path.insert(0, '.deploykit')\n"
    code += "from deploykit_node import node, rank\nprint({'asyncio', 'torch'} & {*sys.modules})"
    argv = [sys.executable, "-c", code]
    done = subprocess.run(
        argv,
        cwd=bundle.source,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "set()\n"


def test_the_process_above_a_rank_stays_small(bundle):
    """Each rank has one, so it does without the modules that take most memory."""
    code = """\
import os, sys
sys.path.insert(0, '.deploykit')
from deploykit_node import rank, signals
signals.hold([*signals.FORWARDED, rank.signal.SIGCHLD])
child = os.fork()
if not child:
    os._exit(7)
print(signals.attend(child), {'enum', 're', 'typing', 'pathlib', 'subprocess'} & {*sys.modules})
"""
    argv = [sys.executable, "-S", "-c", code]
    env = {"PATH": os.environ["PATH"]}
    said = subprocess.check_output(argv, cwd=bundle.source, env=env, text=True, timeout=250)
    assert said == "(7, False) set()\n"


def test_the_way_to_the_first_rank_names_functions_that_exist():
    """The list in launch.py, one function a step."""
    launch = f"{node_plane.FOLDER}/launch.py"
    text = ast.get_docstring(FILES[launch])
    steps = re.findall(r"^ ?(\d+)\. `([\w.]+)`", text, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 27))
    for _, name in steps:
        file = launch if name.startswith("launch.") else file_of(f"deploykit_node.{name}")
        defined = {it.name for it in ast.walk(FILES[file]) if isinstance(it, ast.FunctionDef)}
        assert name.rpartition(".")[2] in defined, name


def test_an_old_python_can_parse_the_launcher_which_refuses_it():
    """Python 2.7 has no f-strings, annotations or ``a, *b = c``; see launch.py."""
    nodes = list(ast.walk(FILES[f"{node_plane.FOLDER}/launch.py"]))
    newer = (ast.JoinedStr, ast.AnnAssign, ast.Starred, ast.NamedExpr)
    assert not [ast.unparse(node) for node in nodes if isinstance(node, newer)]
    assert not [node.arg for node in nodes if isinstance(node, ast.arg) and node.annotation]
    assert not any(node.returns for node in nodes if isinstance(node, ast.FunctionDef))
    assert not [node for node in nodes if getattr(node, "module", "") == "__future__"]
    launch = paths.shipped("entrypoints") / "launch.py"
    code = "import runpy, sys; sys.version_info = (2, 7, 18); "
    code += f"runpy.run_path({str(launch)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 78
    assert done.stderr.endswith(" is Python 2.7.18; deploykit requires 3.10 or later\n")
    assert done.stderr.startswith("deploykit: the job cannot start: ")
