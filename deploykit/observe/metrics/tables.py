"""Tables that a program prints row by row: fastai's, with or without its heading.

Checked against fastai 2.8; without progress bars it prints rows as Python lists and no heading.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from deploykit.observe.metrics.points import LONGEST_NAME, number
from deploykit.observe.metrics.reading import Reading

_HEADING = re.compile(r"epoch +train_loss +(?:[\w.@-]{1,60} +){0,30}time *")
_ROW = re.compile(r"\d{1,9}(?: +[\d.a-z+-]{1,30}){1,30} +\d{1,4}(?::\d\d){1,2} *")
_LIST = re.compile(r"\[\d{1,9}(?:, [\d.a-z+-]{1,30}){1,30}, '\d{1,4}(?::\d\d){1,2}'\]")
_FIRST = ("epoch", "train_loss", "valid_loss")
"""The columns that every such table of fastai begins with."""


class Table:
    """The rows of one table, and the names of its columns."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()

    def read(self, line: str) -> Reading | None:
        """The numbers of a row; None for any other line."""
        if line.startswith("[") and _LIST.fullmatch(line):
            return _reading(_FIRST, line[1:-1].replace("'", "").split(", "))
        if line.startswith("epoch") and _HEADING.fullmatch(line):
            self._names = line.split()
        elif self._names and _ROW.fullmatch(line):
            cells = line.split()
            return _reading(self._names, cells) if len(cells) == len(self._names) else None
        return None


def _reading(names: Sequence[str], cells: Sequence[str]) -> Reading:
    """A row, which ends with its time; a column without a name is called by its number."""
    more = [f"metric_{column}" for column in range(1, len(cells))]
    named = dict(zip([*names, *more], cells[:-1], strict=False))
    numbers = {name[:LONGEST_NAME]: number(cell) for name, cell in named.items()}
    epoch = numbers.pop("epoch", None)
    values = {name: value for name, value in numbers.items() if value is not None}
    return Reading("fastai", values, epoch=None if epoch is None else epoch + 1)
