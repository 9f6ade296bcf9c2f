"""Doctor for SageMaker: collect the facts of the account and network of a job, and judge them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from deploykit.backends.sagemaker import aws as clients
from deploykit.backends.sagemaker import requirements
from deploykit.backends.sagemaker.options import Options, region
from deploykit.doctor import aws
from deploykit.doctor.aws import collect, network
from deploykit.job.model import JobSpec
from deploykit.lib.errors import NotFound, NotPermitted
from deploykit.lib.finding import Finding, Fix

_TIMEOUT = 20.0
"""Seconds for an answer: there are about 25, and the checks go on without one."""
_MISSHAPEN = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading saved responses raises if they do not have the shape of AWS's."""


def examine(
    job: JobSpec, options: Options, saved: Path | None, save: Path | None
) -> Iterator[Finding]:
    """Findings about the account and the network, live or from a folder of saved responses."""
    where = region(options) or ""
    required = requirements.of_job(job, options, where)
    try:
        if saved:
            answers = collect.load(saved)
        else:
            client = partial(clients.client, region=where, attempts=2, timeout=_TIMEOUT)
            answers = collect.live(required, client, partial(clients.errors, where))
    except NotPermitted as error:
        fix = Fix(error.hint or "log in to AWS")
        yield Finding("credentials", "error", str(error), (f"region {where}",), fix)
        return
    if save:
        collect.save(answers, save)
    with reading(saved):
        yield from aws.findings(network.parse(required, answers))


@contextlib.contextmanager
def reading(saved: Path | None) -> Iterator[None]:
    """Raise NotFound where saved answers, which may have been edited, are not valid.

    Live answers have the shape that AWS documents: there, an error is one of deploykit's own.
    """
    try:
        yield
    except _MISSHAPEN as error:
        if saved is None:
            raise
        raise NotFound(
            f"the facts in {saved} are not valid responses from AWS: {error!r:.200}",
            hint="save them with `deploykit doctor --save FOLDER` or `aws ... --output json`",
        ) from error
