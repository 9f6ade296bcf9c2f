"""Doctor on VPCs in moto: each fault is found, alone, and gone after the printed fix.

The fix is run as it is printed, by the AWS CLI. A repaired VPC serves the next
fault too.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests.doctor.aws_faults import FAULTS
from tests.doctor.aws_vpcs import IsolatedVpc, NatVpc
from tests.doctor.terraform import AWS, check_terraform, needs_programs
from tests.nightly import few

pytestmark = [pytest.mark.aws, pytest.mark.slow]
FIRST = {fault.finding: fault for fault in reversed(FAULTS)}.values()
"""One fault for each label."""


@pytest.mark.parametrize("kind", ["ml.g5.xlarge", "ml.p4d.24xlarge"])
@pytest.mark.parametrize("vpc", [IsolatedVpc, NatVpc])
def test_a_working_vpc_has_no_findings(vpc, kind, doctor, moto):
    found = doctor(vpc(moto).settings, kind=kind)
    assert (found.findings, found.code) == ([], 0)


@needs_programs
@pytest.mark.parametrize("fault", few(FAULTS, *FIRST), ids=lambda fault: fault.id)
def test_exactly_that_fault_is_found_and_its_fix_cures_it(fault, doctor, moto, tmp_path):
    vpc = fault.vpc(moto)
    settings = {**vpc.settings, **(fault.break_(vpc) or {})}
    saved = tmp_path / "facts"
    found = doctor(settings, "--save", str(saved), kind=fault.kind)
    assert [one["code"] for one in found.findings] == [fault.finding], found.findings
    (one,) = found.findings
    assert one["severity"] == fault.severity
    assert found.code == (80 if fault.severity == "error" else 0)
    assert one["evidence"]
    assert doctor(settings, "--from", str(saved), kind=fault.kind) == found
    check_terraform(one["fix"])
    settings |= {**one["fix"]["settings"], **apply(one["fix"]["cli"])}
    after = doctor(settings, kind=fault.kind)
    assert (after.findings, after.code) == ([], 0)


def apply(script):
    """Run the printed commands; returns the job file's settings that they print."""
    if not script:
        return {}
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        env={
            **os.environ,
            "PATH": f"{Path(AWS).parent}:{os.environ['PATH']}",
            "AWS_DEFAULT_REGION": "eu-west-3",  # not that of the VPC: commands must name theirs
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, f"{script}\n{done.stderr}"
    return dict(re.findall(r"^in the job file: (\S+): (.*)$", done.stdout, re.MULTILINE))


GROUP_FAULTS = [fault for fault in FAULTS if fault.finding.startswith(("peers_", "efa_"))]


def page(capsys, settings):
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert cli.main(["guide", "security-groups", "--job", "job.yaml", *words]) == 0
    return capsys.readouterr().out


@needs_programs
@pytest.mark.parametrize("fault", few(GROUP_FAULTS, GROUP_FAULTS[0]), ids=lambda fault: fault.id)
def test_the_page_names_the_missing_rule_and_its_command_adds_it(fault, doctor, moto, capsys):
    vpc = fault.vpc(moto)
    settings = {**vpc.settings, **(fault.break_(vpc) or {})}
    (found,) = doctor(settings, kind=fault.kind).findings
    text = page(capsys, settings)
    assert f"### {found['severity']}: {found['message']}" in text
    assert all(f"- {proof}" in text for proof in found["evidence"])
    assert f"| `security_group_ids` | {settings['sagemaker.security_group_ids'].strip('[]')} |" in (
        text
    )
    (command,) = re.findall(r"```sh\n(aws .*?)```", text, re.DOTALL)
    apply(command)
    assert "`deploykit doctor` found no problems in the job's network." in page(capsys, settings)
