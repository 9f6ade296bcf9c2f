"""Runs, plans and diagnoses as HTML, for notebooks.

Every text is untrusted: it is escaped for HTML, and control characters are shown as they are in a
terminal (terminal.py). Attributes are constants.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from deploykit.lib import terminal

_LEFT = ' style="text-align: left"'
_LONGEST = 20_000
"""Characters of a block: a notebook keeps what it displays."""


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under headings."""
    head = "".join(f"<th{_LEFT}>{_text(cell)}</th>" for cell in headings)
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def card(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A title, and a line for each fact that has a value."""
    rows = (
        f"<tr><th{_LEFT}>{_text(name)}</th>{_cell(value)}</tr>" for name, value in facts if value
    )
    return f"<b>{_text(title)}</b><table><tbody>{''.join(rows)}</tbody></table>"


def block(text: str) -> str:
    """A text of several lines; the middle of a very long one is left out."""
    if len(text) > _LONGEST:
        half = _LONGEST // 2
        text = f"{text[:half]}\n... {len(text) - _LONGEST} characters ...\n{text[-half:]}"
    return f"<pre>{html.escape(terminal.lines(text))}</pre>"


def notes(texts: Iterable[str]) -> str:
    """Remarks, one line each."""
    return "".join(f"<div>{_text(text)}</div>" for text in texts)


def _cell(text: str) -> str:
    return f"<td{_LEFT}>{_text(text)}</td>"


def _text(text: str) -> str:
    return html.escape(terminal.line(text))
