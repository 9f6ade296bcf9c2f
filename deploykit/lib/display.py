"""Runs, plans and diagnoses as HTML for notebooks, by templates/report/cards.html.j2."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from deploykit.lib import render


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under headings."""
    return str(_cards().table(headings, list(rows)))


def card(title: str, facts: Iterable[tuple[str, str]]) -> str:
    """A title, and a line for each fact that has a value."""
    return str(_cards().card(title, [(name, value) for name, value in facts if value]))


def block(text: str) -> str:
    """A text of several lines; the middle of a very long one is left out."""
    return str(_cards().block(text))


def notes(texts: Iterable[str]) -> str:
    """Remarks, one line each."""
    return str(_cards().notes(list(texts)))


def _cards() -> Any:
    return render.macros("report/cards.html.j2")
