"""The exact fix of a fault, in three languages, from ``templates/doctor/``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from deploykit import paths, render
from deploykit.doctor.finding import Fix

CLI, CLOUDFORMATION, TERRAFORM = "aws-cli", "cloudformation", "terraform"
LANGUAGES = (CLI, CLOUDFORMATION, TERRAFORM)


def make(kind: str, say: str, settings: Mapping[str, str] | None = None, /, **values: Any) -> Fix:
    """The fix `kind`: ``templates/doctor/KIND.sh.j2``, ``.yaml.j2`` and ``.tf.j2`` where they are.

    `values` are the user's own ids and names; those in a list or a policy are given as data.
    """
    values |= {"json": json.dumps}
    return Fix(
        say,
        cli=render.shell(f"doctor/{kind}.sh.j2", **values),
        cloudformation=_data(f"doctor/{kind}.yaml.j2", values),
        terraform=_data(f"doctor/{kind}.tf.j2", values),
        settings=settings or {},
    )


def job_file(say: str, **settings: str | Iterable[str]) -> Fix:
    """A fix in the job file's `sagemaker` section."""
    written = {
        f"sagemaker.{key}": value if isinstance(value, str) else f"[{', '.join(value)}]"
        for key, value in settings.items()
    }
    return Fix(say, settings=written)


def _data(template: str, values: Mapping[str, Any]) -> str:
    """A snippet, or nothing: not every language can say everything."""
    if not (paths.shipped("templates") / template).exists():
        return ""
    return render.data(template, **values)
