"""`--query` and `--format`: print a part of the JSON, or one line of text per record."""

from __future__ import annotations

import argparse
import json
import re
import string
from collections.abc import Mapping, Sequence
from typing import Any

from deploykit.cli import output
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import UsageError

_ESCAPES = {r"\t": "\t", r"\n": "\n"}
_NONE = "-"


def is_data(args: argparse.Namespace) -> bool:
    """Whether the user wants data instead of a table."""
    return bool(args.json or args.query is not None or args.format is not None)


def emit(args: argparse.Namespace, data: Any, records: Sequence[Mapping[str, Any]]) -> None:
    """Print the data as JSON, the chosen part of it, or a line for each of `records`.

    Raises UsageError for an expression or a format that is not valid.
    """
    if args.query is not None and args.format is not None:
        raise UsageError("--query and --format cannot be used together")
    if args.query is not None:
        _print_part(_part(args.query, output.with_version(data)))
    elif args.format is not None:
        formatter, text = _Formatter(), args.format
        for written, meant in _ESCAPES.items():
            text = text.replace(written, meant)
        output.say(*(formatter.line(text, record) for record in records))
    else:
        output.emit(data)


def _part(expression: str, data: Any) -> Any:
    import jmespath

    as_read = json.loads(json.dumps(data, default=str))
    try:
        return jmespath.search(expression, as_read)
    except (
        ValueError,
        TypeError,
        KeyError,
        ArithmeticError,
    ) as error:  # its errors are ValueErrors
        first = str(error).strip().split("\n")[0].removesuffix(", for expression:")
        hint = "see https://jmespath.org; `deploykit schema COMMAND` lists the keys"
        raise UsageError(f"--query {expression!r}: {first}", hint=hint) from error


def _print_part(part: Any) -> None:
    """Print texts and numbers as they are, a list of them a line each, and all else as JSON."""
    parts = part if isinstance(part, list) else [part]
    if any(isinstance(one, (dict, list)) for one in parts):
        output.block(json.dumps(part, indent=2, ensure_ascii=False) + "\n")
    else:
        output.say(*(one if isinstance(one, str) else json.dumps(one) for one in parts))


class _Formatter(string.Formatter):
    """Python's format strings, in which ``{a.b}`` is the key b of the record in a."""

    def line(self, text: str, record: Mapping[str, Any]) -> str:
        """The text for a record. Raises UsageError."""
        try:
            return self.vformat(text, (), record)
        except (ValueError, IndexError, TypeError, OverflowError, MemoryError) as error:
            hint = (
                "write keys in braces, as in '{run} {state}'; for literal braces, write {{ and }}"
            )
            raise UsageError(f"--format {text!r}: {error}", hint=hint) from error

    def get_field(
        self,
        field_name: str,
        args: Sequence[Any],  # noqa: ARG002 - string.Formatter's signature
        kwargs: Mapping[str, Any],
    ) -> tuple[Any, str]:
        value: Any = kwargs
        for key in field_name.split("."):
            if not isinstance(value, Mapping) or key not in value:
                raise _unknown(field_name, key, value)
            value = value[key]
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None:
            value, format_spec = _NONE, _layout(format_spec)
        if isinstance(value, (dict, list)):
            value = json.dumps(value, ensure_ascii=False)
        return str(super().format_field(value, format_spec))


def _layout(format_spec: str) -> str:
    """Of a format only how it fills, aligns and widens; the rest is for numbers."""
    return re.sub(
        r"(.?[<>^]|)(?:.?=)?[-+ ]?z?#?0?(\d*).*", r"\1\2", format_spec, count=1, flags=re.DOTALL
    )


def _unknown(path: str, key: str, value: Any) -> UsageError:
    """The error for a key that a record does not have, with those that it has."""
    if not isinstance(value, Mapping):
        return UsageError(f"--format: {path!r}: the value before {key!r} has no keys")
    hint = did_you_mean(key, value) or f"keys: {', '.join(value)}"
    return UsageError(f"--format: unknown key {key!r}", hint=hint)
