"""Fixes from ``templates/fixes.j2``: AWS CLI commands, and Terraform where it can express them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from deploykit.lib import quoting, render
from deploykit.lib.finding import Fix

CLI, TERRAFORM = "aws-cli", "terraform"
LANGUAGES = (CLI, TERRAFORM)
_OPTION_OR_URL = re.compile(r"-|(file|fileb|https?)://")
"""https://docs.aws.amazon.com/cli/latest/userguide/cli-usage-parameters-file.html"""
_OPTION = "option"
"""The one template value that is an option of the AWS CLI on purpose."""


def make(
    kind: str, summary: str, settings: Mapping[str, str] | None = None, /, **values: Any
) -> Fix:
    """Render the block `kind` of ``templates/fixes.j2`` in both languages.

    `values` are the user's ids and names. The fix has no commands if the AWS CLI would take one of
    them for an option or for a file to read.
    """
    texts: list[Any] = []
    for name, value in values.items():
        texts += () if name == _OPTION else value if isinstance(value, list) else [value]
    words = (text for text in texts if isinstance(text, str))
    if unsafe := next(filter(_OPTION_OR_URL.match, words), None):
        return Fix(f"{summary}; no command is shown, because {unsafe!r} is not a valid AWS name")
    template = f"fixes.j2#{kind}"
    return Fix(
        summary,
        cli=render.shell(template, cli=True, json=json.dumps, **values),
        terraform=render.terraform(template, cli=False, **values),
        settings=settings or {},
    )


def job_file(summary: str, **settings: str | Iterable[str]) -> Fix:
    written = {
        f"sagemaker.{key}": quoting.yaml(value)
        if isinstance(value, str)
        else f"[{', '.join(map(quoting.yaml, value))}]"
        for key, value in settings.items()
    }
    return Fix(summary, settings=written)
