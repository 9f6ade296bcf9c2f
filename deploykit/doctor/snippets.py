"""Fixes as code, rendered from ``templates/doctor/``: AWS CLI, CloudFormation, Terraform."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deploykit.lib import paths, quoting, render
from deploykit.lib.finding import Fix

CLI, CLOUDFORMATION, TERRAFORM = "aws-cli", "cloudformation", "terraform"
LANGUAGES = (CLI, CLOUDFORMATION, TERRAFORM)
_OPTION_OR_URL = re.compile(r"-|(file|fileb|https?)://")
"""https://docs.aws.amazon.com/cli/latest/userguide/cli-usage-parameters-file.html"""
_TRUSTED = {"option"}
"""Template values that are options of the AWS CLI on purpose."""


def make(
    kind: str, summary: str, settings: Mapping[str, str] | None = None, /, **values: Any
) -> Fix:
    """Render ``templates/doctor/KIND.sh.j2``, and ``.yaml.j2`` and ``.tf.j2`` where they exist.

    `values` are the user's ids and names. The fix has no commands if the AWS CLI would take one of
    them for an option or for a file to read.
    """
    if unsafe := next(filter(_OPTION_OR_URL.match, _texts(values)), None):
        return Fix(f"{summary}; no command is shown: {unsafe!r} is not a valid AWS name")
    values |= {"json": json.dumps}
    return Fix(
        summary,
        cli=render.shell(f"doctor/{kind}.sh.j2", **values),
        cloudformation=_snippet(f"doctor/{kind}.yaml.j2", values),
        terraform=_snippet(f"doctor/{kind}.tf.j2", values),
        settings=settings or {},
    )


def _texts(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, str) and name not in _TRUSTED:
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, str))


def job_file(summary: str, **settings: str | Iterable[str]) -> Fix:
    """A fix in the `sagemaker` section of the job file."""
    written = {
        f"sagemaker.{key}": quoting.yaml(value)
        if isinstance(value, str)
        else f"[{', '.join(map(quoting.yaml, value))}]"
        for key, value in settings.items()
    }
    return Fix(summary, settings=written)


def _snippet(template: str, values: Mapping[str, Any]) -> str:
    """The rendered template; empty where the language cannot express the fix."""
    if not (paths.shipped("templates") / template).exists():
        return ""
    return render.data(template, **values)
