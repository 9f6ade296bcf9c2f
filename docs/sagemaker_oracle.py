"""The examples of the SageMaker oracle, and the tables of its reference page.

`sagemaker-oracle/*.yaml` maps the id of each rule to examples. An example is a change to `PLAIN`, a
job that runs as is. `tests/backends/sagemaker/test_sagemaker_oracle.py` checks every one against
deploykit and against the real SDK.
"""

# ruff: noqa: INP001

from __future__ import annotations

import datetime as dt
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from deploykit.backends.sagemaker import catalog
from deploykit.backends.sagemaker import rules as oracle
from deploykit.backends.sagemaker.options import Options
from deploykit.job.decode import decode
from deploykit.job.model import JobSpec, Problem

_FOLDER = Path(__file__).with_name("sagemaker-oracle")
_LONGEST_VALUE = 90
"""Characters of a value that are shown."""
_LONG = "x" * 60_000
"""Stands for ``LONG`` in an example."""
PLAIN: dict[str, Any] = {
    "name": "digits",
    "entrypoint.script": "train.py",
    "resources.nodes": 2,
    "resources.processes_per_node": 4,
    "resources.time_limit": "1h",
    "sagemaker.role": "arn:aws:iam::123456789012:role/training",
    "sagemaker.bucket": "my-bucket",
    "sagemaker.region": "us-east-1",
    "sagemaker.instance_type": "ml.g5.12xlarge",
    "sagemaker.image_uri": "763104351884.dkr.ecr.us-east-1.amazonaws.com/"
    "pytorch-training:2.10.0-gpu-py313",
}
"""The job that the examples change. A change to null removes the key."""


class Example(NamedTuple):
    """A job to which a rule applies, and what the SDK does with it."""

    change: dict[str, Any]
    """Key of the job file -> value."""
    sdk: str = "accepts"
    """``accepts``, ``refuses``, or ``not asked``: the SDK has no such argument or never sees it."""
    refusal: str = ""
    """Part of the SDK's message, if it refuses."""
    arguments: dict[str, Any] = {}  # noqa: RUF012
    """Arguments of the estimator that replace those of the job, if no job file can express them."""
    sends: dict[str, str | None] = {}  # noqa: RUF012
    """Hyperparameters of the SDK's request that show the effect; null for one that is absent."""
    fixed: dict[str, Any] | None = None
    """A further change, after which the rule no longer applies and nothing is refused."""


def examples() -> dict[str, list[Example]]:
    """The examples of each rule that has any, by the rule's id."""
    texts = [path.read_text(encoding="utf-8") for path in sorted(_FOLDER.glob("*.yaml"))]
    loaded = {name: group for text in texts for name, group in yaml.safe_load(text).items()}
    return {name: [Example(**fields) for fields in group] for name, group in loaded.items()}


def job(*changes: Mapping[str, Any]) -> tuple[JobSpec | None, Options | None, list[Problem]]:
    """The plain job with changes, and its problems, as the decoder of the job file reads it."""
    merged = {key: value for change in (PLAIN, *changes) for key, value in change.items()}
    tree: dict[str, Any] = {}
    for key, value in merged.items():
        *sections, name = key.split(".")
        section = tree
        for inner in sections:
            section = section.setdefault(inner, {})
        if value is not None:
            section[name] = [_LONG] if value == ["LONG"] else value
    options, option_problems = decode(Options, tree.pop("sagemaker"), "sagemaker")
    spec, problems = decode(JobSpec, tree)
    return spec, options, [*problems, *option_problems]


def differences(rules: Iterable[oracle.OracleRule], today: dt.date) -> Iterator[list[str]]:
    """A table row for each rule against something that the SDK accepts: its first example."""
    by_rule = examples()
    for rule in rules:
        if rule.verdict is not oracle.Verdict.ASKED:
            accepted = (one for one in by_rule.get(rule.id, []) if one.sdk == "accepts")
            yield from (_row(rule, example, today) for example in itertools.islice(accepted, 1))


def _row(rule: oracle.OracleRule, example: Example, today: dt.date) -> list[str]:
    spec, options, problems = job(example.change)
    reason, suggestion = rule.reason, rule.suggestion
    if spec is not None and options is not None and not problems:
        consequences = oracle.consequences(spec, options, today)
        applied = next(one for one in consequences if one.rule is rule)
        reason, suggestion = f"`{applied.path}`: {applied.reason}", applied.suggestion
    return [
        "<br>".join(f"`{line}`" for line in _shown(example)) or "nothing special",
        f"**{rule.verdict.value}**",
        f"{reason} ([source]({rule.source}))",
        suggestion or "",
    ]


def _shown(example: Example) -> Iterator[str]:
    """The changes as lines of a job file; the SDK's argument, if it says more."""
    for key, value in example.change.items():
        name = key.removeprefix("sagemaker.")
        if value is not None and value != []:
            yield f"{name}: {_value(value)}"
        elif value is None and "sagemaker.framework_version" not in example.change:
            yield f"no {name}"
    distribution = example.arguments.get("distribution")
    if distribution not in (None, example.change.get("sagemaker.distribution")):
        yield f"SDK: distribution={json.dumps(distribution)}"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key}: {_value(item)}" for key, item in value.items())
        return f"{{{inner}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    text = _LONG if value == "LONG" else str(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def patches() -> Iterator[list[str]]:
    """A table row for each minor version of PyTorch: end of patches, and how to choose it.

    The versions that `framework_version` can choose share a row.
    """
    shorthand = {catalog.minor(full) for full in catalog.VERSIONS}
    ends = [catalog.PATCHED_UNTIL[minor] for minor in shorthand]
    choices = ", ".join(f"`{full}`" for full in catalog.VERSIONS)
    yield ["older", f"{min(ends)} to {max(ends)}", f"`framework_version`: {choices}"]
    for minor, end in catalog.PATCHED_UNTIL.items():
        if minor not in shorthand:
            image = catalog.later_image(minor, None, "ml.g5.xlarge")
            yield [minor, str(end), f"`image_uri: {image}`"]
