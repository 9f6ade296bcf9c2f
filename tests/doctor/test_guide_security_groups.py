"""The guide to security groups for a job whose group is wrong: its command puts it right."""

from __future__ import annotations

import re

import pytest

from deploykit.cli import main as cli
from tests.doctor.aws_faults import FAULTS
from tests.doctor.terraform import needs_programs
from tests.doctor.test_doctor_aws import apply
from tests.nightly import few

pytestmark = [pytest.mark.aws, pytest.mark.slow]
GROUP_FAULTS = [fault for fault in FAULTS if fault.finding.startswith(("peers_", "efa_"))]


def page(capsys, settings):
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    assert cli.main(["guide", "security-groups", "--job", "job.yaml", *words]) == 0
    return capsys.readouterr().out


@needs_programs
@pytest.mark.parametrize("fault", few(GROUP_FAULTS, *GROUP_FAULTS[:3]), ids=lambda fault: fault.id)
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
    assert "doctor found nothing wrong with the job's network." in page(capsys, settings)
