"""The literals of the rules of diagnose: a line that matches a rule holds one of them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.diagnose import cause_rules
from deploykit.diagnose.pattern_index import fixed_text
from tests.diagnose.answers import LOGS, cases
from tests.regex_samples import parsed, sample

NARROWED = "nan_loss"
"""Its literals narrow its expressions on purpose: three letters such as `nan` are in many words."""


def examples():
    """Every line of the logs written for the tests of diagnose."""
    for name in ("failures.toml", "healthy.toml"):
        for log in cases(name):
            yield from log["text"].splitlines()
    yield from (LOGS / "lines.txt").read_text(encoding="utf-8").splitlines()


@pytest.mark.slow
def test_every_example_contains_a_literal_of_each_rule_that_matches_it():
    patterns = [pattern for _, pattern in cause_rules.load().patterns()]
    missing = [
        (pattern.regex.pattern, line)
        for line in set(examples())
        for pattern in patterns
        if pattern.regex.search(line) and not any(text in line for text in pattern.literals)
    ]
    assert missing == []


@pytest.mark.slow
def test_every_text_that_a_rule_matches_contains_one_of_its_literals():
    """Texts are drawn from the expressions; those that do not match are left out."""
    rules = cause_rules.load()
    draw = random.Random(0)
    matched, missing = 0, []
    for (part, number), pattern in rules.patterns():
        if part == "cause" and rules.causes[number].label == NARROWED:
            continue
        tree = parsed(pattern.regex)
        for text in {sample(tree, draw.choice) for _ in range(20)}:
            if pattern.regex.search(text):
                matched += 1
                held = any(literal in text for literal in pattern.literals)
                missing += [] if held else [(pattern.regex.pattern, text)]
    assert missing == []
    assert matched > 5000


CAUSE = "[[cause]]\nlabel='a'\nmeans='m'\nfix='{fix}'\nmatch='{match}'\n"
MESSAGES = "[[messages]]\nlabel='disk_full'\nmeans='the disk is slow'\nmatch='slow disk'\n"
REFUSED = {
    CAUSE.format(fix="f", match="lost .* nodes"): "add `literals`",
    CAUSE.format(fix="f", match="lost .* nodes") + "literals=['ab']": "has no fixed text to search",
    CAUSE.format(fix="f", match="lost .* nodes") + "literals=[]": "has no fixed text to search",
    CAUSE.format(fix="f", match="lost .* nodes") + "literals=['lost', '']": "has no fixed text",
    CAUSE.format(fix="{prot|PORT}", match="abc"): "unknown placeholder 'prot'",
    MESSAGES: "has the meaning 'the disk is slow'\n  meanings of 'disk_full': ",
}


@pytest.mark.parametrize("text", REFUSED)
def test_rules_that_are_refused(text, tmp_path, capsys):
    rules = tmp_path / "rules.toml"
    rules.write_text(text)
    assert cli.main(["diagnose", str(rules), "--rules", str(rules)]) == 64
    assert REFUSED[text] in capsys.readouterr().err


def test_messages_extend_a_shipped_rule(tmp_path):
    table = "[[messages]]\nlabel='disk_full'\nmeans='a disk or quota is full'\n"
    rules = tmp_path / "rules.toml"
    rules.write_text(f"{table}match='our store (A|B) has no room left'\n")
    causes = cause_rules.load([rules]).causes
    (extended,) = (rule for rule in causes if rule.means == "a disk or quota is full")
    (shipped,) = (rule for rule in cause_rules.load().causes if rule.means == extended.means)
    assert [pattern.literals for pattern in extended.match[len(shipped.match) :]] == [
        (" has no room left",)
    ]


@pytest.mark.parametrize(
    ("regex", "text"),
    [
        (r"lost (?P<n>\d+) nodes of \[all\]", " nodes of [all]"),
        (r"it\x27s|not", ""),
        (r"(?<!not )readyy? to go{2}", "ready"),
        (r"a\.b[^]|]c", "a.b"),
    ],
)
def test_the_text_that_every_match_holds(regex, text):
    assert fixed_text(regex) == text


def test_ordinary_lines_contain_hardly_any_literal(monkeypatch):
    """Those are matched with rules: the literal `validation error` cost five times the CPU."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import diagnose

    literals = cause_rules.load().literals
    lines = list(itertools.islice(diagnose.lines(random.Random(1), 0), 4000))
    held = [line for line in lines if any(text in line for text in literals)]
    assert len(held) <= 0.01 * len(lines), held[-1]
