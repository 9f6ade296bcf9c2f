"""The Terraform that doctor prints, checked by a parser of its language."""

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


def check_terraform(fix):
    """The parser accepts the Terraform of a fix, which names the resources of its commands."""
    assert _parsed(fix["terraform"]).keys() <= {"resource"}
    if fix["terraform"]:
        assert set(_ID.findall(fix["cli"])) <= set(_ID.findall(fix["terraform"])), fix["terraform"]


def _parsed(snippet):
    """Terraform's language as HCL's grammar reads it; nothing where there is no snippet."""
    argv = [HCL, "--quiet"]
    done = subprocess.run(argv, input=snippet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{snippet}\n{done.stderr}"
    return json.loads(done.stdout)
