"""A job for a VPC in moto, and doctor's findings for it."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from deploykit.cli import main as cli
from tests.doctor.aws_vpcs import job_text


@pytest.fixture
def quotas(aws):
    """Service Quotas of SageMaker, which moto does not know: name to value."""
    values = {f"ml.{kind} for training job usage": 4.0 for kind in ("g5.xlarge", "p4d.24xlarge")}

    def listed(_):
        return {
            "Quotas": [
                {"QuotaCode": f"L-{number}", "QuotaName": name, "Value": value}
                for number, (name, value) in enumerate(values.items())
            ]
        }

    def increase(body):
        name = list(values)[int(body["QuotaCode"].removeprefix("L-"))]
        values[name] = body["DesiredValue"]
        return {"RequestedQuota": {"QuotaCode": body["QuotaCode"], "Status": "PENDING"}}

    aws.answers |= {
        "ListServiceQuotas": listed,
        "RequestServiceQuotaIncrease": increase,
    }
    return values


@pytest.fixture
def doctor(aws, quotas, tmp_path, monkeypatch, capsys):
    """Run `deploykit doctor --json` on a job in a VPC, with settings on top."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text("print()\n")
    monkeypatch.chdir(folder)

    def look(settings, *words, kind="ml.g5.xlarge", as_json=True):
        (folder / "job.yaml").write_text(job_text(instance_type=kind))
        argv = ["doctor", "--backend", "sagemaker", *words, *(["--json"] if as_json else [])]
        for key, value in settings.items():
            argv += ["--set", f"{key}={value}"]
        code = cli.main(argv)
        said = capsys.readouterr()
        if not as_json:
            return SimpleNamespace(code=code, out=said.out, err=said.err)
        found = json.loads(said.out)
        assert "findings" in found, said.out
        return SimpleNamespace(code=code, findings=found["findings"])

    return look
