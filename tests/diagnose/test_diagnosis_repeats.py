"""Lines that only repeat what was proved are skipped, and nothing else is."""

from __future__ import annotations

import itertools
import random
import re

import pytest

from deploykit.diagnose import cause_rules, log_prefixes, ranking
from tests.diagnose.answers import cases, diagnosis

LOST = "[rank{}]: RuntimeError at step {}: CUDA out of memory. Tried to allocate 2.00 GiB."
RULES = cause_rules.load()


def causes(*logs):
    """What a diagnosis of logs knows in the end."""
    found = diagnosis(*("".join(f"{line}\n" for line in lines) for lines in logs))
    return [
        (it.rule.label, it.evidence, it.order, it.also, it.first_rank, it.firm, it.values)
        for it in found.causes()
    ]


@pytest.fixture
def examined(monkeypatch):
    """The lines that were compared with the rules."""
    seen = []
    find = type(RULES.index).find
    monkeypatch.setattr(
        type(RULES.index), "find", lambda index, line: seen.append(line) or find(index, line)
    )
    return seen


def test_a_thousand_lines_of_a_kind_are_compared_with_the_rules_a_few_times(examined):
    ((label, evidence, *_),) = causes(LOST.format(n % 8, n) for n in range(1000))
    assert (label, [proof.line for proof in evidence]) == ("cuda_oom", [1, 2, 3])
    assert len(examined) <= 200  # each of the first hundred lines, and its text that excuses it


@pytest.mark.parametrize(
    "other",
    [
        "RuntimeError at step 700: CUDA out of memory. Tried to allocate 2.00 GiB. code: 0",
        "HTTP Error 403 at step 1: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "torch.distributed.DistNetworkError: The client socket has timed out",
    ],
)
def test_a_line_of_another_kind_among_them_is_compared(examined, other):
    lines = [LOST.format(0, n) for n in range(500)]
    causes([*lines, other, *lines])
    assert log_prefixes.bare(other) in examined


def test_an_earlier_time_in_a_later_log_still_counts():
    early, late = (f"2026-11-21T01:0{n}:00.000Z {LOST.format(0, 5)}" for n in (1, 2))
    ((_, evidence, order, *_),) = causes([late] * 9, [late] * 9, [late] * 9 + [early])
    assert order[:2] == ("2026-11-21T01:01:00.000", 3)
    assert evidence[0].line == 10


def decisive(log):
    """Of each cause what decides: not which of several equal lines are shown below the first."""
    return [(label, evidence[0], *rest) for label, evidence, *rest in causes(log)]


@pytest.mark.slow
def test_the_own_cases_several_times_in_a_log_have_the_causes_of_examining_every_line(monkeypatch):
    chance = random.Random(1)
    logs = [
        case["text"].split("\n")
        for name in ("failures", "healthy")
        for case in cases(f"{name}.toml")
    ]
    monkeypatch.setattr(ranking, "_ENOUGH", 3)

    def other(line):
        """The line with other digits, unless they are its time: logs do not run backwards."""
        if log_prefixes.time(line):
            return line
        return re.sub(r"\d", lambda _: str(chance.randrange(10)), line)

    texts = [[other(line) if n else line for line in log] for log in logs for n in range(5)]
    repeated = [[*itertools.chain(*texts[at : at + 10])] for at in range(0, len(texts), 10)]
    found = [decisive(log) for log in repeated]
    monkeypatch.setattr(ranking, "_ENOUGH", 10**9)
    assert found == [decisive(log) for log in repeated]
