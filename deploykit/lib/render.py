"""Render Jinja templates: an undefined name raises, and a value never becomes code or markup.

A template is a file in ``templates/``; ``FILE#BLOCK`` is one of its blocks alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from deploykit.lib import paths, quoting, terminal
from deploykit.lib.shell import command

_MAX_LINE, _MAX_BLOCK = 1_000, 20_000
"""Characters of a line and of a block of an HTML page."""


def shell(template: str, **values: Any) -> str:
    """Render ``templates/<template>``; every ``{{ value }}`` is shell-quoted.

    Raises jinja2.UndefinedError for a name that is not among `values`.
    """
    return _rendered(template, _quote, values)


def data(template: str, **values: Any) -> str:
    """Render a YAML file; every ``{{ value }}`` becomes JSON, which YAML includes.

    Raises jinja2.UndefinedError for a name that is not among `values`.
    """
    return _rendered(template, _json, values)


def terraform(template: str, **values: Any) -> str:
    """Render a Terraform file; every ``{{ value }}`` becomes a literal of its language.

    Raises jinja2.UndefinedError for a name that is not among `values`.
    """
    return _rendered(template, _hcl, values)


def markdown(template: str, **values: Any) -> str:
    """Render a page for people: every ``{{ value }}`` is one line of text.

    In a command, ``{{ value | shell }}`` is quoted; ``{{ text | verbatim }}`` is code already.

    Raises jinja2.UndefinedError for a name that is not among `values`.
    """
    return _rendered(template, _prose, values)


def html(template: str, **values: Any) -> str:
    """Render a page or a part of one: every ``{{ value }}`` is text, escaped and on one line.

    Control characters are shown as in a terminal, and a long text is cut. ``{{ text | block }}``
    keeps the lines of a text; ``{{ value | safe }}`` is for numbers and markup of our own.

    Raises jinja2.UndefinedError for a name that is not among `values`.
    """
    return _rendered(template, _html_line, values)


def macros(template: str) -> Any:
    """Return the macros of an HTML template as functions; their results are safe markup."""
    return _environment(_html_line).get_template(template).module


# HTML for notebooks, by templates/report/cards.html.j2


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
    return macros("report/cards.html.j2")


def _rendered(template: str, finalize: Callable[[Any], object], values: Mapping[str, Any]) -> str:
    name, _, block = template.partition("#")
    loaded = _environment(finalize).get_template(name)
    if block:
        return "".join(loaded.blocks[block](loaded.new_context(values)))
    return str(loaded.render(values))


@functools.cache
def _environment(finalize: Callable[[Any], object]) -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.shipped("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=finalize,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=finalize is _html_line,
    )
    environment.filters["block"] = _html_block
    environment.filters["words"] = _words
    environment.filters["verbatim"] = _Quoted
    environment.filters["shell"] = _one_word
    return environment


class _Quoted(str):
    """Text that is already code."""

    __slots__ = ()


def _words(argv: Sequence[str]) -> _Quoted:
    """An argument vector as shell words: ``{{ argv | words }}``."""
    return _Quoted(command(*argv))


def _one_word(value: object) -> _Quoted:
    """A value as one word of the shell, on one line."""
    return _Quoted(command(str(value)).replace("\n", "'$'\\n''"))


def _quote(value: object) -> str:
    # str() of an undefined name raises: StrictUndefined
    return value if isinstance(value, _Quoted) else command(str(value))


def _prose(value: object) -> str:
    """A value as text of one line that ends no table cell and no code span."""
    if isinstance(value, _Quoted):
        return value
    return " ".join(str(value).split()).replace("|", "\\|").replace("`", "'")


def _html_line(value: object) -> object:
    """A value as one line of text, which the autoescape then escapes; markup as it is."""
    if isinstance(value, int | float) or hasattr(value, "__html__"):
        return value
    text = str(value)
    if len(text) > _MAX_LINE:
        text = f"{text[:_MAX_LINE]}... ({len(text) - _MAX_LINE} more characters)"
    return terminal.line(text)


def _html_block(text: str) -> Any:
    """A text of several lines as markup; the middle of a very long one is left out."""
    import markupsafe

    if len(text) > _MAX_BLOCK:
        half = _MAX_BLOCK // 2
        text = f"{text[:half]}\n... {len(text) - _MAX_BLOCK} characters ...\n{text[-half:]}"
    return markupsafe.escape(terminal.lines(text))


def _json(value: object) -> str:
    return value if isinstance(value, _Quoted) else quoting.data(value)


def _hcl(value: object) -> str:
    return value if isinstance(value, _Quoted) else quoting.terraform(value)
