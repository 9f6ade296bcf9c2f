"""Plain data into dataclasses: the right value, or every problem with its path."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest

from deploykit.job.decode import Bounds, Duration, Help, Pattern, Plain, Size, decode, whole
from deploykit.job.spelling import did_you_mean


@dataclass(frozen=True)
class Inner:
    count: Annotated[int, Help("How many."), Bounds(1, 9)]
    flag: bool = False


@dataclass(frozen=True)
class Outer:
    name: Annotated[str, Pattern("[a-z]+", "small letters")]
    inner: Inner
    words: tuple[str, ...] = ()
    kind: Literal["red", "green"] = "red"
    table: Mapping[str, str] = field(default_factory=dict)
    maybe: int | None = None
    time: Duration = 60
    size: Size = 1


GOOD = {"name": "ab", "inner": {"count": 3}}


def problems(**changes):
    return [(p.path, p.message, p.hint) for p in decode(Outer, {**GOOD, **changes})[1]]


def test_reads_every_kind():
    value, found = decode(
        Outer,
        {
            "name": Plain("ab"),
            "inner": {"count": Plain("3"), "flag": Plain("yes")},
            "words": [Plain("0.10"), "", "--x"],
            "kind": "green",
            "table": {"A": Plain("010")},
            "maybe": None,
            "time": Plain("1h30m"),
            "size": "4GiB",
        },
    )
    assert found == []
    assert value == Outer(
        "ab", Inner(3, True), ("0.10", "", "--x"), "green", {"A": "010"}, None, 5400, 4 * 2**30
    )


def test_reports_all_problems_at_once():
    found = problems(nmae="x", inner={"count": 12, "flga": True}, words="a", kind="gren", maybe="x")
    wrong = {"nmae", "inner.count", "inner.flga", "words", "kind", "maybe"}
    assert {path for path, _, _ in found} == wrong


@pytest.mark.parametrize(
    ("changes", "path", "message", "hint"),
    [
        ({"nmae": 1}, "nmae", "unknown key", "did you mean 'name'?"),
        (
            {"kind": "gren"},
            "kind",
            "expected one of red, green; got 'gren'",
            "did you mean 'green'?",
        ),
        ({"inner": {}}, "inner.count", "is required", None),
        (
            {"inner": {"count": "3"}},
            "inner.count",
            "expected a whole number, got '3'",
            "remove the quotes",
        ),
        ({"inner": {"count": 10}}, "inner.count", "must be at most 9, got 10", None),
        ({"inner": {"count": True}}, "inner.count", "expected a whole number, got True", None),
        ({"inner": [1]}, "inner", "expected a section, got a list", None),
        ({"words": "a b"}, "words", "expected a list, got 'a b'", "write [a, b]"),
        ({"words": ""}, "words", "expected a list, got ''", None),
        ({"words": 3}, "words", "expected a list, got 3", None),
        ({"words": [3]}, "words[0]", "expected text, got 3", 'put it in quotes: "3"'),
        ({"name": "A"}, "name", "expected small letters; got 'A'", None),
        (
            {"name": "a\0"},
            "name",
            "expected text, got 'a\\x00'",
            "remove NUL characters and unpaired surrogates",
        ),
        ({"table": {"a": None}}, "table.a", "expected text, got nothing", None),
        (
            {"time": 30},
            "time",
            "expected a time such as 90s, 30m, 1h30m, 2d or 1-12:00:00, got 30",
            None,
        ),
        (
            {"time": "999999999d"},
            "time",
            "expected a time such as 90s, 30m, 1h30m, 2d or 1-12:00:00, got '999999999d'",
            None,
        ),
        (
            {"size": "4 parsecs"},
            "size",
            "expected a size such as 512MiB or 4GiB, got '4 parsecs'",
            None,
        ),
    ],
)
def test_says_what_was_expected(changes, path, message, hint):
    assert problems(**changes) == [(path, message, hint)]


@pytest.mark.parametrize("name", ["a\ud800", "a\ud800\uffff", "\udfffa"])
def test_text_with_half_a_surrogate_pair_is_refused(name):
    hint = "remove NUL characters and unpaired surrogates"
    assert problems(name=name) == [("name", f"expected text, got {name!r}", hint)]


def test_problem_in_one_section_does_not_hide_another():
    found = problems(inner={"count": 0, "flag": "maybe"}, size="x")
    assert [path for path, _, _ in found] == ["inner.count", "inner.flag", "size"]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90s", 90),
        ("30m", 1800),
        ("1h30m", 5400),
        ("2d", 172800),
        ("1-12:00:00", 129600),
        ("0:01:00", 60),
    ],
)
def test_durations(text, seconds):
    value, found = decode(Outer, {**GOOD, "time": text})
    assert (value.time, found) == (seconds, [])


@pytest.mark.parametrize(
    ("text", "size"), [("1B", 1), ("4KB", 4000), ("512MiB", 512 * 2**20), ("2 gb", 2 * 10**9)]
)
def test_sizes(text, size):
    value, _ = decode(Outer, {**GOOD, "size": text})
    assert value.size == size


def test_did_you_mean_keeps_quiet_when_nothing_is_near():
    assert did_you_mean("partition", ["nodes", "memory"]) is None


@dataclass(frozen=True)
class Edges:
    count: Annotated[int, Bounds(1, 9)] = 1
    number: int = 0
    flag: bool = False


def at(name, value):
    """A field's value, or the one message of its problem."""
    decoded, found = decode(Edges, {name: value})
    return [problem.message for problem in found] if found else getattr(decoded, name)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("count", 1, 1),
        ("count", 9, 9),
        ("count", 0, ["must be at least 1, got 0"]),
        ("count", 10, ["must be at most 9, got 10"]),
        ("number", -(10**18), -(10**18)),
        ("number", True, ["expected a whole number, got True"]),
        ("number", "x" * 58, [f"expected a whole number, got '{'x' * 58}'"]),
        ("number", "x" * 59, [f"expected a whole number, got '{'x' * 59}..."]),
        ("flag", Plain("ON"), True),
        ("flag", Plain("true"), True),
        ("flag", Plain("yes"), True),
        ("flag", Plain("off"), False),
        ("flag", Plain("false"), False),
        ("flag", Plain("no"), False),
        ("flag", "yes", ["expected true or false, got 'yes'"]),
    ],
)
def test_values_at_the_edges(name, value, expected):
    """Regression: each of these was a mutant that no test noticed."""
    decoded = at(name, value)
    assert (decoded, type(decoded)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("123456789012345678", 123456789012345678), ("1234567890123456789", None)],
)
def test_whole_numbers_of_untrusted_text(text, number):
    assert whole(text) == number
    assert [whole(word) for word in ("", "-1", " 1", "1x", "٣")] == [None] * 5
