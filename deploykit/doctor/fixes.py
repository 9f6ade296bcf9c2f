"""The exact fix of a fault, in three languages, from ``templates/doctor/``."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from deploykit import paths, quoting, render
from deploykit.doctor.finding import Fix

CLI, CLOUDFORMATION, TERRAFORM = "aws-cli", "cloudformation", "terraform"
_ACTS = re.compile(r"-|(file|fileb|https?)://")
"""https://docs.aws.amazon.com/cli/latest/userguide/cli-usage-parameters-file.html"""
_OURS = {"option"}
"""Values that are words of the AWS CLI."""
LANGUAGES = (CLI, CLOUDFORMATION, TERRAFORM)


def make(kind: str, say: str, settings: Mapping[str, str] | None = None, /, **values: Any) -> Fix:
    """The fix `kind`: ``templates/doctor/KIND.sh.j2``, ``.yaml.j2`` and ``.tf.j2`` where they are.

    `values` are the user's own ids and names; those in a list or a policy are given as data. One
    that the AWS CLI would take for an option, or for a file to read, is in no command.
    """
    if odd := next(filter(_ACTS.match, _texts(values)), None):
        return Fix(f"{say}; no command is shown: {odd!r} in the facts is no name of AWS")
    values |= {"json": json.dumps}
    return Fix(
        say,
        cli=render.shell(f"doctor/{kind}.sh.j2", **values),
        cloudformation=_data(f"doctor/{kind}.yaml.j2", values),
        terraform=_data(f"doctor/{kind}.tf.j2", values),
        settings=settings or {},
    )


def _texts(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, str) and name not in _OURS:
            yield value
        elif isinstance(value, list | tuple):
            yield from (one for one in value if isinstance(one, str))


def job_file(say: str, **settings: str | Iterable[str]) -> Fix:
    """A fix in the job file's `sagemaker` section."""
    written = {
        f"sagemaker.{key}": quoting.yaml(value)
        if isinstance(value, str)
        else f"[{', '.join(map(quoting.yaml, value))}]"
        for key, value in settings.items()
    }
    return Fix(say, settings=written)


def _data(template: str, values: Mapping[str, Any]) -> str:
    """A snippet, or nothing: not every language can say everything."""
    if not (paths.shipped("templates") / template).exists():
        return ""
    return render.data(template, **values)
