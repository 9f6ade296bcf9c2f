"""Markdown for a pull request, which shows text from programs and logs as code.

Markup, links and mentions in that text are not rendered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

MAX_LINES = 40
"""Lines of a log that are shown."""
MAX_LINE = 300
"""Characters of such a line: a comment on GitHub has at most 65,536."""
MAX_VALUE = 200
"""Characters of a value in a table."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]+")


def code(text: str) -> str:
    """The text as code in a line; empty for none."""
    line = _cut(_CONTROL.sub(" ", text).strip(), MAX_VALUE)
    fence = "`" * (_longest(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{fence}{pad}{line}{pad}{fence}" if line else ""


def block(lines: Sequence[str]) -> str:
    """Lines as a block of code."""
    shown = [_cut(_CONTROL.sub(" ", line), MAX_LINE) for line in lines[:MAX_LINES]]
    fence = "`" * max(3, 1 + max(map(_longest, shown), default=0))
    return "\n".join([f"{fence}text", *shown, fence])


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}…"


def _longest(text: str) -> int:
    """The length of the longest run of backticks."""
    return max(map(len, re.findall("`+", text)), default=0)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; its cells are Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    escaped = ([cell.replace("|", r"\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)
