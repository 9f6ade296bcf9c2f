"""Draw which packages and modules of deploykit import which: `make docs`.

A matrix: each row imports the marked columns. Rows and columns are in the order of the layers in
pyproject.toml, so an import of a lower layer is a mark to the right of the diagonal. A mark to the
left would be an import against the layers, or a cycle.
"""

# ruff: noqa: INP001

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from svg import Picture

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "deploykit"
CELL, LEFT, TOP = 18, 128, 112
"""Pixels: side of a cell, and where the cells begin."""
Graph = Mapping[str, frozenset[str]]


def graph() -> Graph:
    """What each unit imports; a unit is a package or a module directly in deploykit."""
    units = {path.stem for path in PACKAGE.iterdir() if _is_unit(path)}
    return {
        unit: frozenset(name for name in _imports(unit) if name in units and name != unit)
        for unit in sorted(units)
    }


def _is_unit(path: Path) -> bool:
    if path.suffix == ".py":
        return not path.stem.startswith("__")
    return (path / "__init__.py").exists()


def _imports(unit: str) -> Iterator[str]:
    """Names below deploykit that the files of a unit import, at the top or in a function."""
    folder = PACKAGE / unit
    for path in folder.rglob("*.py") if folder.is_dir() else [PACKAGE / f"{unit}.py"]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "deploykit":
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("deploykit."):
                yield str(node.module).split(".")[1]
            elif isinstance(node, ast.Import):
                names = (alias.name for alias in node.names)
                yield from (name.split(".")[1] for name in names if name.startswith("deploykit."))


def layers(imports: Graph) -> list[list[str]]:
    """The layers of the import contract, top to bottom; a unit that has none is put by itself."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    contracts = tomllib.loads(text)["tool"]["importlinter"]["contracts"]
    lines = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = [[name for name in re.split(r"\s*\|\s*", line) if name in imports] for line in lines]
    for unit in sorted(set(imports) - {name for row in rows for name in row}):
        lower = (number for number, row in enumerate(rows) if imports[unit] & set(row))
        rows.insert(next(lower, len(rows)), [unit])
    return [row for row in rows if row]


def picture() -> Picture:
    """The matrix, with a line between layers; packages are blue."""
    imports = graph()
    rows = layers(imports)
    order = [unit for row in rows for unit in row]
    side = CELL * len(order)
    drawn = Picture(
        (LEFT + side + 60, TOP + side + 10),
        "Imports between the packages and modules of deploykit: rows import columns",
    )
    _layers(drawn, rows, side)
    for number, unit in enumerate(order):
        at = CELL * number
        drawn.text((LEFT - 8, TOP + at + 13), unit, "code end")
        drawn.slanted((LEFT + at + 13, TOP - 8), unit)
        drawn.rect((LEFT + at, TOP + at), (CELL, CELL), "empty", radius=0)
        for other in sorted(imports[unit]):
            style = "blue" if (PACKAGE / other).is_dir() else "green"
            style = style if order.index(other) > number else "amber"
            corner = (LEFT + CELL * order.index(other) + 3, TOP + at + 3)
            drawn.rect(corner, (CELL - 6, CELL - 6), style, radius=2)
    return drawn


def _layers(drawn: Picture, rows: list[list[str]], side: int) -> None:
    """A thin line below and right of each layer."""
    at = 0
    for row in rows[:-1]:
        at += CELL * len(row)
        drawn.line((LEFT, TOP + at), (LEFT + side, TOP + at), style="thin")
        drawn.line((LEFT + at, TOP), (LEFT + at, TOP + side), style="thin")
    drawn.rect((LEFT, TOP), (side, side), "empty", radius=0)
