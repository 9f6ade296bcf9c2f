"""Calls in a script that start processes, or that choose where they meet."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

_COMMAND = re.compile(
    r"(?<![\w./-])(torchrun|accelerate launch|deepspeed|torch\.distributed\.(?:launch|run)"
    r"|fastai\.launch)(?![\w./-])"
)
_STARTS = re.compile(
    r"subprocess\.(?:run|call|check_call|check_output|Popen)|os\.(?:system|(?:exec|spawn)\w+)"
)
_SPAWNS = re.compile(
    r"(?:\w+\.)*(?:mp|multiprocessing)\.(?:spawn|start_processes)|(?:\w+\.)*notebook_launcher"
)
_MODULES = {"torch.multiprocessing", "subprocess", "os"}


class Found(NamedTuple):
    """What a script does, in words, with its line; whether it needs `launcher: python`."""

    what: str
    line: int
    plain: bool


def first(text: bytes) -> Found | None:
    """The first call that needs a plain process, or else the first with an address."""
    try:
        calls = list(_found(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return None
    return min(calls, key=lambda one: (not one.plain, one.line), default=None)


def _found(tree: ast.AST) -> Iterator[Found]:
    names = _imported(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        called = _name(node.func)
        called = names.get(called, called)
        if _SPAWNS.fullmatch(called):
            yield Found(f"calls {called}", node.lineno, plain=True)
        elif _STARTS.fullmatch(called) and (started := _COMMAND.search(" ".join(_texts(node)))):
            yield Found(f"runs {started[1]}", node.lineno, plain=True)
        elif any(one.arg == "init_method" and _is_tcp(one.value) for one in node.keywords):
            yield Found("gives init_process_group a tcp:// address", node.lineno, plain=False)


def _imported(tree: ast.AST) -> dict[str, str]:
    """Names that `from ... import` gives to functions, and what they are."""
    return {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in _MODULES
        for alias in node.names
    }


def _name(node: ast.AST) -> str:
    """A dotted name as it is written; empty for any other expression."""
    if isinstance(node, ast.Attribute):
        before = _name(node.value)
        return f"{before}.{node.attr}" if before else ""
    return node.id if isinstance(node, ast.Name) else ""


def _texts(call: ast.Call) -> Iterator[str]:
    for node in ast.walk(call):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_tcp(node: ast.AST) -> bool:
    first = node.values[0] if isinstance(node, ast.JoinedStr) and node.values else node
    return isinstance(first, ast.Constant) and str(first.value).startswith("tcp://")
