"""The oracle: what SageMaker does with a job. It runs as asked, runs as something else, is refused,
or the outcome cannot be known.

The rules are data, in the TOML files of this folder; 01-launchers.toml documents every key. Each
names the setting, the reason, the nearest setting that works and a source. The reference page is
generated from them, with examples that the tests check against the real SDK. `check` adds what the
service's own description says of the request. Pure: nothing is queried.
"""

from __future__ import annotations

import datetime as dt
import enum
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import description, request
from deploykit.backends.sagemaker.options import Options, launched, region
from deploykit.backends.sagemaker.oracle.case import Case
from deploykit.job import checks
from deploykit.job.model import JobSpec, Problem
from deploykit.lib.errors import BackendUnavailable

_SOURCES = {
    "sdk": "https://github.com/aws/sagemaker-python-sdk/blob/v2.257.7/src/sagemaker",
    "api": "https://docs.aws.amazon.com/sagemaker/latest/APIReference",
    "guide": "https://docs.aws.amazon.com/sagemaker/latest/dg",
    "toolkit": "https://github.com/aws/sagemaker-training-toolkit/tree/master/"
    "src/sagemaker_training",
    "launcher": "https://github.com/aws/sagemaker-pytorch-training-toolkit/blob/master/"
    "src/sagemaker_pytorch_container/training.py",
}
"""Beginnings of the sources that rules cite."""
_ANY_RUN, _ANY_BUNDLE = "r" * 63, "0" * 64
"""As long as a run id and a hash can be: a request that is valid with these is valid with any."""
_ANY_IMAGE, _ANY_REGION, _ANY_TYPE = "image", "us-east-1", "ml.g5.12xlarge"


class Verdict(enum.Enum):
    """What SageMaker does with a setting."""

    ASKED = "runs as asked"
    OTHER = "runs as something else"
    REFUSED = "refused"
    UNKNOWN = "cannot know"


@dataclass(frozen=True, kw_only=True)
class OracleRule:
    """One fact about SageMaker. Its fields are the keys of ``[[rule]]``."""

    id: str
    path: str
    verdict: Verdict
    when: Sequence[str] | None = None
    """None: the rule never applies, and is there for the reference only."""
    reason: str
    nearest: str | None = None
    source: str
    quiet: bool = False

    @property
    def severity(self) -> Literal["error", "warning"] | None:
        """Severity of the problem that `check` reports; None if it reports none."""
        if self.verdict is Verdict.REFUSED:
            return "error"
        return None if self.quiet else "warning"

    def apply(self, case: Case) -> Iterator[Consequence]:
        """One consequence for each item that the rule applies to."""
        items = [] if self.when is None else case.items(self.when)
        for item in items:
            values = {"case": case, "job": case.job, "options": case.options, "item": item}
            nearest = self.nearest and self.nearest.format(**values)
            path, reason = self.path.format(**values), self.reason.format(**values)
            yield Consequence(self, path, reason, nearest)


@dataclass(frozen=True)
class Consequence:
    """A rule that applies to a job, with its texts filled in."""

    rule: OracleRule
    path: str
    reason: str
    nearest: str | None

    def problem(self) -> Problem | None:
        """The problem that `check` reports; None if the job simply runs as asked."""
        severity = self.rule.severity
        if severity is None:
            return None
        source = self.rule.source
        return Problem(self.path, self.reason, self.nearest, severity=severity, source=source)


def check(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Every problem of a job: the oracle's, then those of the request that would be sent.

    Pure, except that the date decides which images still receive patches. Raises
    BackendUnavailable if botocore is not installed and nothing else is wrong.
    """
    options = launched(job, options)
    yield from backend.check_program(job)
    yield from _check_plain(job, options)
    yield from _check_profile(job, options)
    yield from _check_debugger(job)
    yield from _check_log_limit(job)
    known = [problem for one in consequences(job, options) if (problem := one.problem())]
    yield from known
    errors = {problem.path for problem in known if problem.severity == "error"}
    try:
        problems = _request_problems(job, options if not errors else _completed(options))
    except BackendUnavailable:
        if not errors:
            raise
        return
    yield from (problem for problem in problems if problem.path not in errors)


def _check_plain(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Whether a script that starts its own processes gets a node without another launcher."""
    if job.entrypoint.launcher != "python":
        return
    if options.distribution != "none":
        message = f"{options.distribution} starts the ranks, and `launcher: python` the script"
        yield Problem("sagemaker.distribution", message, "distribution: none")
    if job.preflight and job.resources.nodes > 1:
        message = "the nodes cannot test the network before a plain process of each"
        yield Problem("preflight", message, "remove it, or use launcher: torchrun")


def _check_profile(job: JobSpec, options: Options) -> Iterator[Problem]:
    """Nsight Systems stands above a rank, which only deploykit's own torchrun allows."""
    if (job.profile or "").startswith("nsys") and options.distribution != "none":
        message = "nsys needs ranks that deploykit starts, and here SageMaker's toolkit starts them"
        yield Problem("profile", message, "torch:20:25, which PyTorch's own profiler records")


def _check_debugger(job: JobSpec) -> Iterator[Problem]:
    if checks.DEBUGGER in job.env:
        message = "no editor can connect to a container of SageMaker"
        yield Problem(f"env.{checks.DEBUGGER}", message, "remove --debugger, or run it locally")


def _check_log_limit(job: JobSpec) -> Iterator[Problem]:
    if job.log_limit != backend.LOG_LIMIT:
        message = "is not enforced on SageMaker: CloudWatch takes all output, and bills it"
        yield Problem("log_limit", message, severity="warning")


def _completed(options: Options) -> Options:
    """The options with an image, a type and a region, so that a request can be rendered."""
    return replace(
        options,
        image_uri=options.image_uri or _ANY_IMAGE,
        region=region(options) or _ANY_REGION,
        instance_type=options.instance_type or (None if options.instance_groups else _ANY_TYPE),
    )


def _request_problems(job: JobSpec, options: Options) -> list[Problem]:
    """What the service's own description says of the request."""
    rendered = request.render(job, options, run=_ANY_RUN, bundle=_ANY_BUNDLE)
    return description.request_problems(rendered)


def consequences(job: JobSpec, options: Options, today: dt.date | None = None) -> list[Consequence]:
    """The consequences of every rule that applies, in the order of `rules`.

    `today` decides which images still receive patches; the default is today's date in UTC.
    """
    case = Case(job, options, today or dt.datetime.now(tz=dt.UTC).date())
    return [one for group in rules().values() for rule in group for one in rule.apply(case)]


@cache
def rules() -> Mapping[str, tuple[OracleRule, ...]]:
    """All rules, under the headings of the reference."""
    files = sorted(Path(__file__).parent.glob("*.toml"))
    return dict(read(path.read_text(encoding="utf-8")) for path in files)


def read(text: str) -> tuple[str, tuple[OracleRule, ...]]:
    """The heading and the rules of a file.

    Raises TypeError for an unknown or missing key, ValueError for an unknown verdict, and KeyError
    for an unknown beginning of a source.
    """
    return _group(**tomllib.loads(text))


def _group(*, heading: str, rule: list[dict[str, Any]]) -> tuple[str, tuple[OracleRule, ...]]:
    return heading, tuple(_rule(**table) for table in rule)


def _rule(*, verdict: str, source: str, **texts: Any) -> OracleRule:
    return OracleRule(verdict=Verdict(verdict), source=source.format(**_SOURCES), **texts)
