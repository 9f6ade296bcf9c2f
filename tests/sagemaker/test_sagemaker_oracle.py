"""Each row of the oracle's tables: what deploykit says of it, what the real SDK does with it."""

from __future__ import annotations

import datetime as dt
import re

import pytest
import sdk_child

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import oracle, sdk_terms
from deploykit.backends.sagemaker.oracle import Sdk, Verdict, rows

TODAY = dt.date(2026, 11, 21)
HASH = "0123456789abcdef" * 4
RULES = [rule for rules in oracle.RULES.values() for rule in rules]
ROWS = {
    f"{rule.path} {at}.{number}": (rule, row)
    for at, rule in enumerate(RULES)
    for number, row in enumerate(rule.rows)
}
each_row = pytest.mark.parametrize(("rule", "row"), ROWS.values(), ids=ROWS)


@pytest.fixture(autouse=True)
def _no_region(monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def applied(job, options):
    return [finding.rule for finding in oracle.ask(job, options, TODAY)]


def refused(job, options):
    return [str(p) for p in sagemaker.check(job, options) if p.severity == "error"]


@each_row
def test_what_is_said_of_it(rule, row):
    job, options, problems = rows.job(row.given)
    if rule.when is None:
        assert [problem.path for problem in problems] == [rule.path]
        return
    assert problems == []
    (finding, *_) = [one for one in oracle.ask(job, options, TODAY) if one.rule == rule]
    assert "{" not in f"{finding.path}{finding.reason}{finding.nearest or ''}"
    reported = finding.problem()
    if rule.severity is None:
        assert reported is None
    else:
        assert reported in list(sagemaker.check(job, options))
        assert (reported.severity, reported.source) == (rule.severity, rule.source)


@each_row
def test_the_nearest_setting_works(rule, row):
    if row.cure is None:
        assert rule.severity is None, "a warning or an error needs a cure"
        return
    job, options, problems = rows.job(row.given, row.cure)
    assert problems == []
    assert rule not in applied(job, options)
    assert refused(job, options) == []


def test_what_is_not_refused_is_planned():
    for rule, row in ROWS.values():
        job, options, problems = rows.job(row.given)
        if rule.verdict is not Verdict.REFUSED:
            assert problems == []
            assert refused(job, options) == []


def test_every_rule_has_a_row_and_a_source():
    without = [rule.path for rule in RULES if not rule.rows]
    assert without == ["sagemaker.region"]  # of the environment; see test_sagemaker_plan.py
    for rule in RULES:
        assert rule.source.startswith("https://")
        assert rule.nearest or rule.severity is None


def question(*changes, raw=None):
    """What the SDK is asked; where the decoder refuses it, the plain job with raw arguments."""
    job, options, problems = rows.job(*changes)
    if problems:
        job, options, problems = rows.job()
    asked = sdk_terms.arguments(job, options, run="digits-1", bundle=HASH)
    asked["estimator"] |= raw or {}
    return asked


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The SDK's answer to each row, and to each cured one, from one process."""
    asked = {}
    for name, (_, row) in ROWS.items():
        if row.sdk is not Sdk.UNASKED:
            asked[name] = question(row.given, raw=row.raw)
        if row.cure is not None:
            asked[f"cured {name}"] = question(row.given, row.cure)
    found = sdk_child.ask(tmp_path_factory.mktemp("oracle"), list(asked.values()))
    return dict(zip(asked, found["requests"], strict=True))


@each_row
def test_what_the_sdk_does(rule, row, answers):
    """The living proof of what the SDK takes silently."""
    name = next(name for name, pair in ROWS.items() if pair == (rule, row))
    if row.sdk is Sdk.UNASKED:
        assert name not in answers
        return
    answer = answers[name]
    assert ("refused" in answer) == (row.sdk is Sdk.REFUSES), answer
    if row.sdk is Sdk.REFUSES:
        assert row.says
        assert re.search(re.escape(row.says), answer["refused"]), answer
    for key, value in row.sends.items():
        assert answer["HyperParameters"].get(key) == value


@each_row
def test_the_sdk_takes_the_nearest_setting(rule, row, answers):
    if row.cure is not None:
        name = next(name for name, pair in ROWS.items() if pair == (rule, row))
        assert "refused" not in answers[f"cured {name}"], answers[f"cured {name}"]
