"""Make untrusted text safe for a terminal: nothing in it can act, hide, or imitate other output.

Logs, reasons, names and files come from jobs, nodes and services. A terminal executes control
characters (one sequence writes the clipboard), and some Unicode characters reorder others, or are
invisible.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata

_ODD = re.compile(r"[^ -~]")
_COLOR = re.compile(r"\x1b\[[0-9;:]*m")
"""SGR, the only kind of sequence that just sets colors (ECMA-48, 8.3.117)."""
_COLOURS_END = "\x1b[0m"
_INVISIBLE = frozenset("\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0")
"""Letters and marks in Unicode that are invisible."""
_SHORT = {"\t": "\t", "\n": "\\n", "\r": "\\r"}
_BYTES = range(0xDC80, 0xDD00)
"""Surrogates of the bytes 0x80 to 0xff where they are not UTF-8 (PEP 383)."""


def line(text: str) -> str:
    r"""`text` as one line; control and invisible characters become escapes such as ``\x1b``."""
    return _ODD.sub(_shown, text)


def lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(line, text.split("\n")))


def log(text: str, *, colors: bool) -> list[str]:
    """A line of a log as one line for each state of a progress bar, which overwrites itself.

    `colors` keeps its colors, reset at the end of each line; otherwise they are removed.
    """
    states = [part for part in text.split("\r") if part] or [""]
    return [_colored(part) if colors else line(_COLOR.sub("", part)) for part in states]


def has_colors() -> bool:
    """Whether to color what a terminal shows: if it has colors, unless ``NO_COLOR`` is set.

    https://no-color.org
    """
    return not (os.environ.get("NO_COLOR") or os.environ.get("TERM") in {"dumb", "unknown"})


def data(text: str) -> str:
    """Equivalent JSON, with such characters as JSON escapes."""
    return _ODD.sub(_in_json, text)


def _colored(text: str) -> str:
    pieces = re.split(f"({_COLOR.pattern})", text)  # every second piece is a color
    shown = [piece if number % 2 else line(piece) for number, piece in enumerate(pieces)]
    return "".join(shown) + (_COLOURS_END if len(pieces) > 1 else "")


def _harmless(character: str) -> bool:
    """Whether a character is visible, or a space of any script."""
    if character.isprintable():
        return character not in _INVISIBLE
    return unicodedata.category(character) == "Zs"


def _shown(odd: re.Match[str]) -> str:
    character, code = odd[0], ord(odd[0])
    if _harmless(character):
        return character
    if code in _BYTES:
        return f"\\x{code - 0xDC00:02x}"
    if character in _SHORT:
        return _SHORT[character]
    return ascii(character)[1:-1]


def _in_json(odd: re.Match[str]) -> str:
    character = odd[0]
    return character if character == "\n" or _harmless(character) else json.dumps(character)[1:-1]
