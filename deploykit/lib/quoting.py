"""Quote values in YAML and Terraform files that a person pastes; `shell.command` does in commands.

The values come from job files, saved facts and other machines; quoting keeps them from becoming
code. In templates, render.py does the same.
"""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z]([\w./ -]*[\w./-])?", re.ASCII)
_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
"""Words that YAML does not read as text."""
_ESCAPE = re.compile(r"\\u(d[89ab]..)\\u(d[c-f]..)|\\(.)")
_SHORT = {"b": "\\u0008", "f": "\\u000c"}
_FILL_IN = re.compile(r"(\$+|%+)\{")


def yaml(text: str) -> str:
    """A text as a YAML scalar, quoted only where necessary."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _WORDS
    return text if plain else data(text)


def data(value: Any) -> str:
    """Plain data as ASCII JSON, with the escapes that YAML and Terraform also read."""
    return _ESCAPE.sub(_escape, json.dumps(value, default=str))


def terraform(value: Any) -> str:
    """The same, without Terraform's template sequences (``${``, ``%{``)."""
    return _FILL_IN.sub(_literal, data(value))


def _escape(match: re.Match[str]) -> str:
    high, low, other = match.groups()
    if other:
        return _SHORT.get(other, match[0])
    return "\\U" + f"{0x10000 + ((int(high, 16) - 0xD800) << 10) + int(low, 16) - 0xDC00:08x}"


def _literal(match: re.Match[str]) -> str:
    """``${`` becomes ``$${``; of several signs the first ones are escaped, or they would pair."""
    sign, count = match[1][0], len(match[1])
    return f"\\u{ord(sign):04x}" * (count - 1) + f"{sign}{sign}{{"
