"""When Slurm expects a job to start, for each partition: ``sbatch --test-only``, which queues none.

https://slurm.schedmd.com/sbatch.html#OPT_test-only
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

from deploykit.backends.base import Start
from deploykit.backends.slurm import client, complaints, script, site, site_checks
from deploykit.backends.slurm.options import Options
from deploykit.backends.slurm.site import Site
from deploykit.job.model import Plan, Problem
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable, TryAgain

_STARTS = re.compile(r"\bto start at (\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\b(?: using (.*))?")
_UTC = ("TZ=UTC", "SLURM_TIME_FORMAT=standard")


def of(plan: Plan) -> Iterator[Start]:
    """When the job would start in each partition that Slurm knows.

    Raises BackendUnavailable or TryAgain.
    """
    known = site.read(plan.options.host)
    for partition in known.partitions:
        options = replace(plan.options, partition=partition.name)
        chosen = plan.options.partition or next(
            (one.name for one in known.partitions if one.default), None
        )
        settings = {} if chosen == partition.name else {"slurm.partition": partition.name}
        start = _start(plan, options, known)
        yield start._replace(where=f"partition {partition.name}", settings=settings)


def _start(plan: Plan, options: Options, known: Site) -> Start:
    """When the job would start with these options."""
    problems = site_checks.problems(plan.job, options, known)
    reasons = [one.message for one in problems if _prevents(one)]
    if reasons:
        return Start("", options, None, "; ".join(map(_without_profile, reasons)), possible=False)
    text = script.plan(plan.job, options, run=plan.run, bundle=plan.bundle).text
    code, answer = _test(text, options.host)
    match = _STARTS.search(answer)
    if code or match is None:
        return Start("", options, None, _refusal(answer), possible=False)
    moment = datetime.fromisoformat(match[1]).replace(tzinfo=UTC)
    return Start("", options, moment, (match[2] or "").strip())


def _prevents(problem: Problem) -> bool:
    """Whether a job with this problem does not start: Slurm gives a time in DOWN partitions too."""
    return problem.severity == "error" or problem.path == "slurm.partition"


def _without_profile(message: str) -> str:
    """A problem's message without the profile that it was found in, which was read just now."""
    return re.sub(r"^the profile of .*? \([\d-]*\):? (has )?", "", message)


def _refusal(answer: str) -> str:
    """What sbatch complains of. Raises BackendUnavailable or TryAgain where it is no answer."""
    error = complaints.error_for(answer)
    if isinstance(error, BackendUnavailable | TryAgain):
        raise error
    return complaints.in_one_line(answer).removeprefix("allocation failure: ")


def _test(text: str, host: str | None) -> tuple[int, str]:
    """The exit code of ``sbatch --test-only`` for a script, and what it prints."""
    argv = [*client.clean_environment(text), *_UTC, "sbatch", "--test-only"]
    if host is None:
        code, _, err = shell.raw(argv, env=dict(os.environ), data=text.encode())
        return code, err
    from deploykit.backends.slurm import ssh  # only runs with a host need it

    code, _, err = ssh.run(host, f"exec {shell.command(*argv)}", text.encode())
    return code, err
