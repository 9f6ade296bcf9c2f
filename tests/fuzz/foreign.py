"""Hostile bytes: odd texts and trees, and valid ones with mutations."""

from __future__ import annotations

import copy
import json
import random

from hypothesis import given
from hypothesis import strategies as st

from deploykit.lib.errors import DeploykitError

ODD = [
    *("", " ", "-", "0", "-1", "+1", "1.5", "1e999", "NaN", "Infinity", "true", "null"),
    *(
        "\u00b2",
        "\u0663",
        "\u2028",
        "\x0b",
        "\r",
        "\n",
        "\t",
        "\x00",
        "\x1b]52;c;AAAA\x07",
        "\ufeff",
    ),
    *("9" * 40, "9" * 5000, "a" * 5000, "[" * 3000, "{" * 3000, '{"a":' * 3000, "(" * 3000),
    *("../../x", "/nowhere/at/all", "a/b", "~", "$(id)", "'", '"', "\\", "%s", "{0}", "[/red]"),
    *("N/A", "(null)", "None", "UNLIMITED", "Unknown", "INVALID", "1-2-3", "1:2:3:4", "2026-13-45"),
    *("n[0-99999999]", "n[1-999][1-999][1-999]", "n[", "n[a-b]", "n[3-1]", "[]", "1_[0-99999999]"),
    *("9999-12-31T23:59:59", "0001-01-01T00:00:00+14:00", "0" * 300 + "1", "|", "=", "=" * 50),
]
TEXT = st.sampled_from(ODD) | st.text(max_size=20)
SCALARS = [
    *(None, True, False, 0, -1, 1, 7, 255, 256, 2**31, 2**63, 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1e308, float("nan"), float("inf"), -float("inf")),
]


def made(make):
    """What `make` gives for a source of chance: ten times as fast as drawing each choice."""
    return st.integers(0, 2**63).map(lambda seed: make(random.Random(seed)))


def odd(chance):
    """An odd text, or a short one of letters from everywhere."""
    if chance.random() < 0.6:
        return chance.choice(ODD)
    reach = chance.choice([0x80, 0x800, 0xD800])
    return "".join(chr(chance.randrange(reach)) for _ in range(chance.randrange(12)))


def spoiled(*samples):
    """One of the samples, with up to four parts removed or overwritten."""

    def make(chance):
        text = chance.choice(samples)
        for _ in range(chance.randrange(5)):
            start = chance.randint(0, len(text))
            end = chance.randint(start, min(len(text), start + 40))
            words = text.split() or [""]
            other = chance.choice(words) if chance.random() < 0.3 else odd(chance)
            text = text[:start] + other + text[end:]
        return text

    return made(make)


def soup(*words):
    """The format's own words in any order, with odd ones between."""

    def make(chance):
        parts = range(chance.randrange(20))
        return "".join(chance.choice([chance.choice(words), odd(chance)]) for _ in parts)

    return made(make)


def unlike(*trees):
    """One of the trees, with up to three parts removed or replaced."""

    def make(chance):
        tree = copy.deepcopy(chance.choice(trees))
        for _ in range(chance.randrange(4)):
            places = list(_places(tree))
            if not places:
                return anything(chance)
            inside, key = chance.choice(places)
            if isinstance(inside, dict) and chance.random() < 0.3:
                del inside[key]
            else:
                inside[key] = anything(chance)
        return tree

    return made(make)


def anything(chance, depth=2):
    """Any JSON value, and more."""
    kind = chance.randrange(8 if depth else 6)
    if kind >= 6:
        parts = [anything(chance, depth - 1) for _ in range(chance.randrange(3))]
        return parts if kind == 6 else {odd(chance): part for part in parts}
    return odd(chance) if kind > 2 else chance.choice(SCALARS)


def _places(tree):
    keys = tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ()
    for key in keys:
        yield tree, key
        yield from _places(tree[key])


def files(*trees):
    """What a file of JSON may hold: such a tree, a spoiled one, or no JSON at all."""
    written = unlike(*trees).map(lambda tree: json.dumps(tree).encode())
    texts = spoiled(*map(json.dumps, trees)).map(lambda text: text.encode(errors="replace"))
    return written | texts | st.binary(max_size=40)


def outcome(function, *arguments, ours=DeploykitError):
    """What a reader returns, or its error; any error but deploykit's fails the test."""
    try:
        return function(*arguments)
    except ours as error:
        return error


__all__ = ["ODD", "TEXT", "files", "given", "outcome", "soup", "spoiled", "unlike"]
