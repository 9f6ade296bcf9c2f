"""Jinja, as deploykit uses it: a typo raises, and a value never becomes shell code."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from deploykit import paths


def shell(template: str, **values: Any) -> str:
    """Render ``templates/<template>``; every ``{{ value }}`` comes out shell-quoted.

    Raises jinja2.UndefinedError for a name that is not among `values`.
    """
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.shipped("templates")),
        undefined=jinja2.StrictUndefined,
        finalize=_quote,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    environment.filters["words"] = _words
    environment.filters["verbatim"] = _Quoted
    return environment.get_template(template).render(values)


class _Quoted(str):
    """Text that is shell already."""

    __slots__ = ()


def _words(argv: Sequence[str]) -> _Quoted:
    """An argument vector as shell words: ``{{ argv | words }}``."""
    return _Quoted(shlex.join(argv))


def _quote(value: object) -> str:
    # str() of an undefined name raises: StrictUndefined
    return value if isinstance(value, _Quoted) else shlex.quote(str(value))
