"""Texts that follow a regular expression, from the syntax tree of Python's own parser."""

from __future__ import annotations

import importlib
import string


def parsed(regex):
    """The syntax tree of a compiled expression."""
    return importlib.import_module("re._parser").parse(regex.pattern, regex.flags)


def sample(tree, choose):
    """A text that follows `tree`, where `choose` picks from the list of alternatives.

    Lookarounds and back references add nothing, so the text need not match.
    """
    text = ""
    for operation, argument in tree:
        match str(operation):
            case "LITERAL":
                text += chr(argument)
            case "SUBPATTERN":
                text += sample(argument[3], choose)
            case "BRANCH":
                text += sample(choose(argument[1]), choose)
            case "MAX_REPEAT" | "MIN_REPEAT":
                low, high, part = argument
                count = choose(range(low, min(high, low + 2) + 1))
                text += "".join(sample(part, choose) for _ in range(count))
            case "IN":
                text += choose([char for char in string.printable if _holds(argument, char)])
            case "ANY" | "NOT_LITERAL":
                text += "a"
    return text


def _holds(members, char):
    """Whether a character class of these members holds `char`."""
    negated = str(members[0][0]) == "NEGATE"
    return negated != any(_is(kind, value, char) for kind, value in members[negated:])


def _is(kind, value, char):
    classes = {"DIGIT": char.isdigit(), "SPACE": char.isspace(), "WORD": char.isalnum()}
    match str(kind):
        case "LITERAL":
            return ord(char) == value
        case "RANGE":
            return value[0] <= ord(char) <= value[1]
    name = str(value).removeprefix("CATEGORY_")
    return classes[name.removeprefix("NOT_")] != name.startswith("NOT_")
