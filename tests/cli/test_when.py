"""`deploykit when` without a queue, and the key that `--pick` writes into a job file."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli
from deploykit.job import file as jobfile
from deploykit.lib.errors import UsageError
from tests.aws_server import SECTION, as_json

SPOT_QUOTA = "ml.g5.xlarge for spot training job"


def run(capsys, *argv, code=0):
    assert cli.main(["when", *argv]) == code, capsys.readouterr()
    return capsys.readouterr()


def test_on_this_machine_now(project, capsys):
    assert run(capsys).out.split("\t")[0::2] == ["this machine", "now", "\n"]
    (one,) = json.loads(run(capsys, "--json", "--pick").out)["starts"]
    assert (one["possible"], one["seconds"], one["settings"]) == (True, 0, {})


@pytest.mark.aws
def test_the_quota_is_what_aws_tells(aws, project, capsys):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    quota = "the quota 'ml.g5.xlarge for training job usage'"
    pages = [
        {"Quotas": [{"QuotaName": f"{SPOT_QUOTA} usage", "Value": 0.0}], "NextToken": "t"},
        {"Quotas": [{"QuotaName": "ml.g5.xlarge for training job usage", "Value": 2.0}]},
    ]
    aws.answers["ListServiceQuotas"] = lambda body: pages["NextToken" in body]
    argv = ["--backend", "sagemaker"]
    shown = run(capsys, *argv).out
    assert shown.startswith("ml.g5.xlarge in us-east-1\t-\t-\t0.16 USD\t")
    assert f"{quota} is 2; AWS does not report when instances will be available" in shown
    assert f"the quota '{SPOT_QUOTA} usage' is 0, but the job needs 1" in shown
    shown = run(capsys, *argv, "--nodes", "3", code=81).out
    assert f"{quota} is 2, but the job needs 3" in shown
    pages[1]["Quotas"] = []
    assert f"{quota} is not listed" in run(capsys, *argv).out


@pytest.mark.aws
def test_training_plans_on_offer_are_shown_and_not_picked(aws, project, capsys):
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    aws.answers["ListServiceQuotas"] = lambda _: {"Quotas": []}
    asked = []

    def offers(body):
        asked.append(body)
        part = {"InstanceType": body["InstanceType"], "InstanceCount": 2}
        part |= {"AvailabilityZone": "us-east-1b", "StartTime": 4102444800.0}
        fee = {"DurationHours": 24, "UpfrontFee": "2360.10", "CurrencyCode": "USD"}
        one = {"TrainingPlanOfferingId": "tpo-1", "TargetResources": ["training-job"]}
        return {"TrainingPlanOfferings": [{**one, **fee, "ReservedCapacityOfferings": [part]}]}

    aws.answers["SearchTrainingPlanOfferings"] = offers
    argv = ["--backend", "sagemaker", "--nodes", "2", "--json", "--pick"]
    argv += ["--set", "resources.gpus_per_node=8"]
    p5 = ["--set", "sagemaker.instance_type=ml.p5.48xlarge", "--set", "resources.time_limit=90m"]
    *_, offer = json.loads(run(capsys, *argv, *p5).out)["starts"]
    assert asked[0] == {
        "InstanceType": "ml.p5.48xlarge",
        "InstanceCount": 2,
        "DurationHours": 2,
        "TargetResources": ["training-job"],
    }
    assert offer["where"] == "training plan in us-east-1b"
    assert offer["start"] == "2100-01-01T00:00:00Z"
    assert "for 24 h at 2360.10 USD, paid in advance" in offer["reason"]
    assert (offer["possible"], offer["cost"]["worst"]) == (False, None)
    assert "training plan" not in run(capsys, *argv[:5]).out  # ml.g5 is not sold so
    denied = {"__type": "AccessDeniedException", "Message": "you may not"}
    aws.respond = lambda one, forward: (
        as_json(400, denied) if one.action == "SearchTrainingPlanOfferings" else forward()
    )
    del aws.answers["SearchTrainingPlanOfferings"]
    *_, refused = json.loads(run(capsys, *argv, *p5).out)["starts"]
    assert (refused["possible"], refused["where"]) == (False, "training plans in us-east-1")
    assert "you may not" in refused["reason"]


SPOT = """<DescribeSpotPriceHistoryResponse><spotPriceHistorySet>{}</spotPriceHistorySet>
</DescribeSpotPriceHistoryResponse>"""
PRICE = """<item><instanceType>g5.xlarge</instanceType><spotPrice>{}</spotPrice>
<timestamp>2026-01-0{}T00:00:00.000Z</timestamp>
<availabilityZone>us-east-1{}</availabilityZone></item>"""
DENIED = """<Response><Errors><Error><Code>UnauthorizedOperation</Code>
<Message>you may not</Message></Error></Errors></Response>"""


@pytest.mark.aws
def test_spot_instances_with_what_they_have_cost(aws, project, capsys):
    """EC2 tells the prices of the zones; the job's own way stays what --pick leaves."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    before = (project / "job.yaml").read_text()
    aws.answers["ListServiceQuotas"] = lambda _: {"Quotas": []}
    prices = [("0.61", 1, "a"), ("0.4224", 2, "a"), ("0.5", 1, "b"), ("x", 3, "c")]
    answers = [(200, SPOT.format("".join(PRICE.format(*one) for one in prices)))]
    asked = []

    def respond(one, forward):
        if b"DescribeSpotPriceHistory" not in one.body:
            return forward()
        asked.append(one.body.decode())
        return answers[0][0], [("Content-Type", "text/xml")], answers[0][1].encode()

    aws.respond = respond
    argv = ["--backend", "sagemaker", "--set", "retries=1", "--pick"]
    own, spot = json.loads(run(capsys, *argv, "--json").out)["starts"]
    assert own["where"] == "ml.g5.xlarge in us-east-1"
    assert spot["where"] == "ml.g5.xlarge (spot) in us-east-1"
    assert "the quota 'ml.g5.xlarge for spot training job usage' is not listed; " in spot["reason"]
    assert spot["reason"].endswith(
        "EC2's spot price for g5.xlarge in the last 7 days: 0.4224 to 0.61 USD an hour; now 0.4224 "
        "in us-east-1a, 30% of SageMaker's on-demand price"
    )
    assert spot["settings"] == {"sagemaker.spot": "true", "sagemaker.max_wait": "1200s"}
    assert spot["cost"]["low"] < own["cost"]["low"]
    assert (project / "job.yaml").read_text() == before
    assert "InstanceType.1=g5.xlarge" in asked[0]
    chosen = [f"--set={key}={value}" for key, value in spot["settings"].items()]
    (row,) = json.loads(run(capsys, *argv, *chosen, "--json").out)["starts"]
    assert (row["where"], row["reason"], row["settings"]) == (spot["where"], spot["reason"], {})
    for answer, said in (
        (
            (200, SPOT.format("")),
            "lists no spot prices for g5.xlarge in us-east-1 in the last 7 days",
        ),
        ((403, DENIED), "spot prices are unavailable: "),
    ):
        answers[:] = [answer]
        assert said in run(capsys, *argv).out


BLOCK = "name: x\nslurm:\n  # ours\n  price: 1 USD/node-hour  # really\nenv: {A: b}\n"


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("name: x\n", "name: x\nslurm:\n  partition: gpu\n"),
        (BLOCK, BLOCK.replace("slurm:\n", "slurm:\n  partition: gpu\n")),
        (BLOCK.replace("price: 1", "partition: cpu # c\n  price: 1"), None),
        ("slurm:\n    nodes: 1\n    partition: 'a b'\n", None),
        ("slurm: {partition: cpu, account: a} # c\n", "slurm: {partition: gpu, account: a} # c\n"),
        ("slurm: {account: a}\n", "slurm: {partition: gpu, account: a}\n"),
        ("slurm: {}\n", "slurm: {partition: gpu}\n"),
        ("slurm:\nname: x\n", "slurm:\n  partition: gpu\nname: x\n"),
        ("slurm: ~\nname: x\n", "slurm:\n  partition: gpu\nname: x\n"),
    ],
)
def test_one_key_changes_and_nothing_else(tmp_path, text, changed):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    before = jobfile.parse(path)[0]
    jobfile.set_key(path, "slurm.partition", "gpu")
    after = jobfile.parse(path)[0]
    assert after == {**before, "slurm": {**(before.get("slurm") or {}), "partition": "gpu"}}
    if changed is not None:
        assert path.read_text() == changed
    assert path.read_text().count("#") == text.count("#")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("job.toml", "[slurm]\npartition = 'cpu'\n"),
        ("job.yaml", "a: &a {partition: cpu}\nslurm: *a\n"),
        ("job.yaml", "slurm: {\n  partition: |-\n    cpu}\n"),
    ],
)
def test_a_file_that_cannot_be_changed_stays_as_it_is(tmp_path, name, text):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises((UsageError, jobfile.JobFileError)) as caught:
        jobfile.set_key(path, "slurm.partition", "gpu")
    assert path.read_text() == text
    assert "slurm.partition" in (caught.value.hint or "slurm.partition")
