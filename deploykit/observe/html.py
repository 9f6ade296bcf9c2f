"""The page of a report: one file, without a script, from untrusted texts."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NewType

from deploykit.lib import paths, terminal

Markup = NewType("Markup", str)
"""HTML that is safe to put between tags."""

_LONGEST = 1_000
"""Characters of a line."""
_MOST_FACTS = 400
_LONGEST_BLOCK = 20_000
"""Characters of a text of several lines."""


def text(value: str) -> Markup:
    """A text in one line, also for an attribute between double quotes."""
    if len(value) > _LONGEST:
        value = f"{value[:_LONGEST]}... ({len(value) - _LONGEST} more characters)"
    return Markup(html.escape(terminal.line(value)))


def block(value: str) -> Markup:
    """A text of several lines; the middle of a very long one is left out."""
    if len(value) > _LONGEST_BLOCK:
        half = _LONGEST_BLOCK // 2
        left_out = f"\n... {len(value) - _LONGEST_BLOCK} characters ...\n"
        value = value[:half] + left_out + value[-half:]
    escaped = html.escape(terminal.lines(value))
    return Markup(f'<pre tabindex="0">{escaped}</pre>')  # it can be scrolled by keys


def join(parts: Iterable[Markup]) -> Markup:
    """Pieces one after the other."""
    return Markup("".join(parts))


def element(tag: str, content: Markup, kind: str = "") -> Markup:
    """An element, of the class `kind`."""
    return Markup(
        f'<{tag} class="{kind}">{content}</{tag}>' if kind else f"<{tag}>{content}</{tag}>"
    )


def paragraph(value: str, kind: str = "") -> Markup:
    """A paragraph of text."""
    return element("p", text(value), kind)


def section(title: str, *contents: Markup) -> Markup:
    """A section with a heading; nothing where it has no content."""
    inner = join(contents)
    return Markup(f"<section><h2>{text(title)}</h2>{inner}</section>") if inner else Markup("")


def details(title: str, *contents: Markup) -> Markup:
    """Contents that are shown on demand; nothing where there are none."""
    inner = join(contents)
    summary = f"<summary>{text(title)}</summary>"
    return Markup(f"<details>{summary}{inner}</details>") if inner else Markup("")


def facts(pairs: Iterable[tuple[str, str]]) -> Markup:
    """A name and a value in each line; those without a value are left out."""
    rows = [
        f"<dt>{text(name)}</dt><dd>{text(value)}</dd>"
        for name, value in itertools.islice((pair for pair in pairs if pair[1]), _MOST_FACTS)
    ]
    return Markup(f"<dl>{''.join(rows)}</dl>") if rows else Markup("")


def table(headings: Sequence[str], rows: Iterable[Sequence[str | tuple[str, bool]]]) -> Markup:
    """Rows under headings, the first cell of each its name; ``(text, True)`` is a best value."""
    head = "".join(f'<th scope="col">{text(it)}</th>' if it else "<td></td>" for it in headings)
    body = "".join(f"<tr>{_name(row[0])}{''.join(map(_cell, row[1:]))}</tr>" for row in rows)
    if not body:
        return Markup("")
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return Markup(f'<div class="wide" tabindex="0">{inner}</div>')


def _name(cell: str | tuple[str, bool]) -> str:
    return f'<th scope="row">{text(cell if isinstance(cell, str) else cell[0])}</th>'


def _cell(cell: str | tuple[str, bool]) -> str:
    if isinstance(cell, str):
        return f"<td>{text(cell)}</td>"
    if cell[1]:
        return f'<td class="best">{text(cell[0])} <abbr title="the best">★</abbr></td>'
    return f"<td>{text(cell[0])}</td>"


def link(path: Path, name: str) -> Markup:
    """A link to a file or folder of this machine."""
    return Markup(f'<a href="{html.escape(path.as_uri())}">{text(name)}</a>')


def items(parts: Iterable[Markup]) -> Markup:
    """A list."""
    inner = "".join(f"<li>{part}</li>" for part in parts)
    return Markup(f"<ul>{inner}</ul>") if inner else Markup("")


LARGEST = 1_000_000
"""Bytes of a page at most."""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; form-action 'none'"


def page(title: str, body: Markup, footer: str) -> str:
    """The document."""
    style = (paths.shipped("templates") / "report" / "report.css").read_text(encoding="utf-8")
    return (
        "<!DOCTYPE html>\n"
        '<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>\n{style}</style></head>"
        f"<body><main>{body}</main><footer><p>{text(footer)}</p></footer></body></html>\n"
    )
