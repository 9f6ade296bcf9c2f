"""Tables of tests too long for each merge: a few rows in `make test-all`, the rest at night."""

import pytest


def few(rows, *kept):
    """Parameters of a test: `make test-all` runs those in `kept`, `make test-nightly` the others.

    Raises ValueError if a row to keep is none of the rows.
    """
    rows = list(rows)
    if missing := [row for row in kept if row not in rows]:
        raise ValueError(f"not in the table: {missing}")
    return [
        row if row in kept else pytest.param(*_values(row), marks=pytest.mark.nightly)
        for row in rows
    ]


def _values(row):
    return row if isinstance(row, tuple) else (row,)
