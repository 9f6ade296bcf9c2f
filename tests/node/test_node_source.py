"""Promises about the node plane's source: old Pythons, standard library, nothing of deploykit."""

from __future__ import annotations

import ast
import sys

import pytest

from deploykit import contract, paths

ENTRYPOINTS = paths.shipped("entrypoints")

OURS = {name.removesuffix(".py") for name in contract.NODE_PLANE}
ALLOWED = {
    "secret_refs": {"boto3", "botocore"},
    "preflight_group": {"torch"},
    "elastic": {"torch"},
}


def tree(name):
    return ast.parse((ENTRYPOINTS / name).read_text(), feature_version=(3, 10))


@pytest.mark.parametrize("name", contract.NODE_PLANE)
def test_imports_only_the_standard_library_and_its_own(name):
    allowed = sys.stdlib_module_names | OURS | ALLOWED.get(name.removesuffix(".py"), set())
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            imported = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported = {node.module}
        else:
            continue
        assert {module.partition(".")[0] for module in imported} <= allowed


def test_no_name_hides_a_module_of_the_standard_library():
    assert not OURS & sys.stdlib_module_names
