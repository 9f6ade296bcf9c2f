"""Diagnosis on the exceptions of real libraries: none at the end of a traceback goes unseen.

These messages were not chosen with the rules in mind: they are those of every `raise` in packages
that are installed here, read from their source.
"""

from __future__ import annotations

import ast
import asyncio
import importlib.util
import multiprocessing
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.diagnose.answers import first_label

TORCH = Path(importlib.util.find_spec("torch").origin).parent
PACKAGES = {
    "asyncio": Path(asyncio.__file__).parent,
    "multiprocessing": Path(multiprocessing.__file__).parent,
    "torch.distributed": TORCH / "distributed/checkpoint",
    "torch.nn": TORCH / "nn/modules",
    "torch.utils": TORCH / "utils/data",
}
LEAST = 15
"""Messages of each package."""


def message(node: ast.expr) -> str:
    """The text of an exception's argument, with a number for each value; empty if it has none."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(message(part) or "7" for part in parts)
        case ast.BinOp(left=left):
            return message(left)
        case ast.Call(func=ast.Attribute(value=text, attr="format")):
            return message(text)
    return ""


def raised(path: Path) -> Iterator[str]:
    """``NAME: MESSAGE``, on one line, of each exception that a module raises with a text."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        match node:
            case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[argument, *_])):
                text = " ".join(message(argument).split())
                if text and name.endswith("Error"):
                    yield f"{name}: {text}"


def label_of(path: Path, exception: str) -> str | None:
    return first_label(
        "step 12 loss 2.31\nTraceback (most recent call last):\n"
        '  File "/home/ada/job/train.py", line 88, in <module>\n    main()\n'
        f'  File "{path}", line 7, in forward\n    raise Error(\n{exception}\n'
    )


@pytest.mark.parametrize("package", PACKAGES)
def test_no_exception_at_the_end_of_a_traceback_goes_unseen(package):
    found = {
        exception: label_of(path, exception)
        for path in sorted(PACKAGES[package].rglob("*.py"))
        if "tests" not in path.parts
        for exception in raised(path)
    }
    assert len(found) >= LEAST
    assert [exception for exception, label in found.items() if label is None] == []
    scheduler = [e for e, label in found.items() if (label or "").startswith(("slurm", "sage"))]
    assert scheduler == []
