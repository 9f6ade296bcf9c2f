"""The CloudFormation and Terraform that doctor prints, checked by the parsers of both."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

_PLACES = f"{Path(__file__).parents[2] / '.venv-aws/bin'}:{os.environ['PATH']}"
AWS = shutil.which("aws", path=_PLACES)
HCL = shutil.which("hcl2tojson", path=_PLACES)
needs_programs = pytest.mark.skipif(
    AWS is None or HCL is None, reason="the AWS CLI or a parser of Terraform is not installed"
)
_ID = re.compile(r"\b(?:vpc|subnet|sg|acl|rtb|vpce|nat)-[0-9a-f]{8,}\b")


def check_snippets(fix, *, lint):
    """Both parsers accept the snippets of a fix, which name the resources of its commands."""
    if lint:
        assert _linted(fix["cloudformation"]) == []
    assert _parsed(fix["terraform"]).keys() <= {"resource"}
    wanted = set(_ID.findall(fix["cli"]))
    for language in ("cloudformation", "terraform"):
        if fix[language]:
            assert wanted <= set(_ID.findall(fix[language])), fix[language]


def _linted(snippet):
    """Errors and warnings of cfn-lint, as its command shows them; some fixes have no snippet."""
    if not snippet:
        return []
    from cfnlint import lint_all

    return [str(one) for one in lint_all(snippet) if one.rule.id[0] != "I"]


def _parsed(snippet):
    """Terraform's language as HCL's grammar reads it; nothing where there is no snippet."""
    argv = [HCL, "--quiet"]
    done = subprocess.run(argv, input=snippet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{snippet}\n{done.stderr}"
    return json.loads(done.stdout)
