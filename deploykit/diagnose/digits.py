"""Whether a regular expression tells one digit from another: by its parsed form.

If it does not, it matches a line exactly if it matches the line with a zero for each digit.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

_DIGITS = frozenset(range(ord("0"), ord("9") + 1))
_ONE = {"LITERAL", "NOT_LITERAL"}
_SAME = {"ANY", "AT", "CATEGORY"}
_BACK = {"GROUPREF", "GROUPREF_EXISTS"}


@cache
def are_alike(regex: re.Pattern[str]) -> bool:
    """Whether all digits from 0 to 9 are the same to the expression, wherever they are."""
    parser: Any = getattr(re, "_parser", None)  # not a public one: without it no line is known
    return parser is not None and _are_alike(parser.parse(regex.pattern, regex.flags))


def _are_alike(parsed: Any) -> bool:
    """The same of a part: a sequence, an operator with its argument, or a plain value."""
    if isinstance(parsed, tuple) and (operator := getattr(parsed[0], "name", None)):
        argument = parsed[1]
        if operator in _ONE:
            return argument not in _DIGITS
        if operator in _BACK:
            return False
        if operator == "IN":
            return _set_is_alike(argument)
        if operator in _SAME:
            return True
    if isinstance(parsed, (int, str)) or parsed is None:
        return True
    return all(map(_are_alike, parsed))


def _set_is_alike(items: Any) -> bool:
    """Whether a set of characters holds all digits or none. False for all of them in two ranges."""
    for operator, argument in items:
        if operator.name == "LITERAL" and argument in _DIGITS:
            return False
        if operator.name == "RANGE":
            held = min(argument[1], ord("9")) - max(argument[0], ord("0")) + 1
            if 0 < held < len(_DIGITS):
                return False
    return True
