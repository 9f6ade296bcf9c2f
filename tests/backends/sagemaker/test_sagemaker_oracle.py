"""Each example of the oracle: what deploykit reports for it, and what the real SDK does with it."""

from __future__ import annotations

import datetime as dt
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import request
from deploykit.backends.sagemaker import rules as oracle
from deploykit.backends.sagemaker.rules import Verdict
from tests.backends.sagemaker.sdk_requests import sdk_requests

pytestmark = pytest.mark.slow

SOURCE = Path(__file__).parents[3] / "docs/sagemaker_oracle.py"
TODAY = dt.date(2026, 11, 21)
HASH = "0123456789abcdef" * 4


def load_examples():
    """The module of docs/ that reads the examples; docs/ is not on the import path."""
    spec = importlib.util.spec_from_file_location("sagemaker_oracle", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


docs = load_examples()
RULES = {rule.id: rule for rules in oracle.rules().values() for rule in rules}
EXAMPLES = {
    f"{name}-{number}": (name, example)
    for name, examples in docs.examples().items()
    for number, example in enumerate(examples)
}
each_example = pytest.mark.parametrize("name", EXAMPLES)


@pytest.fixture(autouse=True)
def _no_region(monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def rule_and_example(name):
    rule, example = EXAMPLES[name]
    return RULES[rule], example


def errors(job, options):
    return [str(p) for p in sagemaker.check(job, options) if p.severity == "error"]


@each_example
def test_the_rule_reports_its_example(name):
    rule, example = rule_and_example(name)
    job, options, problems = docs.job(example.change)
    if rule.when is None:
        assert [problem.path for problem in problems] == [rule.path]
        return
    assert problems == []
    (consequence, *_) = [
        one for one in oracle.consequences(job, options, TODAY) if one.rule is rule
    ]
    text = f"{consequence.path}{consequence.reason}{consequence.suggestion or ''}"
    assert "{" not in text
    problem = consequence.problem()
    if rule.severity is None:
        assert problem is None
    else:
        assert problem in list(sagemaker.check(job, options))
        assert (problem.severity, problem.source) == (rule.severity, rule.source)


@each_example
def test_the_fixed_example_has_no_errors(name):
    rule, example = rule_and_example(name)
    if example.fixed is None:
        assert rule.severity is None, "an example of a warning or an error needs `fixed`"
        return
    job, options, problems = docs.job(example.change, example.fixed)
    assert problems == []
    assert rule not in [one.rule for one in oracle.consequences(job, options, TODAY)]
    assert errors(job, options) == []


@each_example
def test_exactly_the_refused_examples_have_errors(name):
    rule, example = rule_and_example(name)
    job, options, problems = docs.job(example.change)
    refused = rule.verdict is Verdict.REFUSED
    assert bool(problems or errors(job, options)) == refused


def test_every_rule_has_an_example_and_a_source():
    without = set(RULES) - {name for name, _ in EXAMPLES.values()}
    assert len(RULES) == sum(map(len, oracle.rules().values()))
    assert without == {
        "invalid-region",  # of the environment; see test_sagemaker_request.py
        "unknown-hardware",  # of a newer botocore; see test_sagemaker_hardware.py
    }
    for rule in RULES.values():
        assert rule.source.startswith("https://")
        assert rule.suggestion or rule.severity is None


def test_every_condition_and_placeholder_is_a_fact(vary):
    """Also those that a job reaches only if the conditions before them hold."""
    known = oracle.facts(*vary(), TODAY)
    conditions = [one for rule in RULES.values() for one in rule.when or ()]
    assert len(conditions) > 100
    assert {one.removeprefix("not ") for one in conditions} <= set(known)
    for rule in RULES.values():
        for text in (rule.path, rule.reason, rule.suggestion or ""):
            text.format(**known, item="")
        assert rule.when is None or rule.when


TYPOS = {
    "key": ("quiet = true", "quite = true", TypeError),
    "missing key": ("path = ", "# path = ", TypeError),
    "verdict": ("asked = ", "aksed = ", ValueError),
    "source": ("{launcher}", "{lancher}", KeyError),
}


@pytest.mark.parametrize(("right", "wrong", "error"), TYPOS.values(), ids=TYPOS)
def test_a_typo_in_the_rules_is_an_error(right, wrong, error):
    text = Path(oracle.__file__).with_name("rules.toml").read_text(encoding="utf-8")
    before, _, after = text.partition("[launchers]")
    with pytest.raises(error):
        oracle.read(f"{before}[launchers]{after.replace(right, wrong)}")


@pytest.mark.parametrize(
    "wrong", [{"when": ["mpirum"]}, {"when": ["not mpirum"]}, {"reason": "{rank}"}]
)
def test_an_unknown_fact_is_an_error(vary, wrong):
    with pytest.raises(KeyError):
        list(replace(RULES["torchrun"], **wrong).apply(oracle.facts(*vary(), TODAY)))


def asked_of_the_sdk(*changes, replaced=None):
    """A job for `sdk_requests`; the plain one, `replaced`, where no job file can express it."""
    job, options, problems = docs.job(*changes)
    if problems:
        job, options, problems = docs.job()
    # the image is the SDK's choice, and some examples have none
    renderable = replace(options, image_uri=options.image_uri or "image")
    planned = request.render(job, renderable, run="digits-1", bundle=HASH)
    return job, options, planned, replaced or {}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """The SDK's answer to each example, and to each fixed one, from one process."""
    asked = {}
    for name, (_, example) in EXAMPLES.items():
        if example.sdk != "not asked":
            asked[name] = asked_of_the_sdk(example.change, replaced=example.arguments)
        if example.fixed is not None:
            asked[f"fixed {name}"] = asked_of_the_sdk(example.change, example.fixed)
    answered = sdk_requests(tmp_path_factory.mktemp("oracle"), list(asked.values()))
    return dict(zip(asked, answered["requests"], strict=True))


@each_example
def test_the_sdk_does_what_the_example_says(name, answers):
    _, example = rule_and_example(name)
    if example.sdk == "not asked":
        assert name not in answers
        return
    answer = answers[name]
    assert ("refused" in answer) == (example.sdk == "refuses"), answer
    if example.sdk == "refuses":
        assert example.refusal
        assert re.search(re.escape(example.refusal), answer["refused"]), answer
    for key, value in example.sends.items():
        assert answer["HyperParameters"].get(key) == value


@each_example
def test_the_sdk_accepts_the_fixed_example(name, answers):
    _, example = rule_and_example(name)
    if example.fixed is not None:
        assert "refused" not in answers[f"fixed {name}"], answers[f"fixed {name}"]
