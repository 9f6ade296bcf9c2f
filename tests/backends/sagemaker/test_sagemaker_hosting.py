"""No forgotten endpoint: its price before it is sent, the schedule that deletes it, the list."""

from __future__ import annotations

import datetime as dt
import json
import os
import signal
import subprocess
import sys
from decimal import Decimal

import boto3
import pytest

from deploykit.backends.deployment import Machines
from deploykit.backends.sagemaker import hosting, service_model
from deploykit.cli import main as cli
from deploykit.run import budgets, deployments
from tests.aws_server import SECTION, as_json
from tests.live_run import ROOT
from tests.model_package import package

pytestmark = pytest.mark.aws
ROLE = "arn:aws:iam::123456789012:role/training-scheduler"
DEPLOY = f"  deploy: {{name: digits, instance_type: ml.m5.xlarge, scheduler_role: '{ROLE}'}}\n"
HOUR, CPU_HOUR = Decimal("1.408"), Decimal("0.23")
ONE = [Machines("ml.g5.xlarge", 1, 1)]
SCALED = [Machines("ml.g5.xlarge", 1, 4)]
SERVERLESS = [Machines("", 0, 5, 2048)]


@pytest.mark.parametrize(
    ("machines", "seconds", "likely", "worst", "words"),
    [
        (ONE, None, HOUR * 730, HOUR * 730, "1.408 USD an hour, 1,027.84 USD a month: 1 x ml.g5"),
        (ONE, 8 * 3600, HOUR * 8, HOUR * 8, "1.408 USD an hour, 11.26 USD in 8h: 1 x ml.g5.xlarge"),
        (SCALED, 3600, HOUR, HOUR * 4, "1.41 USD to 5.63 USD in 1h: 1 x ml.g5.xlarge + up to 3"),
        (SERVERLESS, 3600, 0, Decimal("0.72"), "0.00004 USD per second of each request"),
    ],
)
def test_the_price_of_an_hour_and_of_its_time(machines, seconds, likely, worst, words):
    estimate = hosting.estimate(machines, "us-east-1", seconds)
    assert (estimate.amount("likely"), estimate.amount("worst")) == (likely, worst)
    time = "a month" if seconds is None else f"in {seconds // 3600}h"
    assert words in estimate.rate(time)


@pytest.mark.parametrize(
    ("machines", "region", "words"),
    [
        (
            ONE,
            "eu-west-3",
            "no price is known for an endpoint on ml.g5.xlarge in eu-west-3; `deploykit",
        ),
        (SERVERLESS, "eu-west-3", "no price is known for serverless endpoints in eu-west-3"),
        ([Machines("", 1, 5, 2048)], "us-east-1", "no price is known for provisioned concurrency"),
    ],
)
def test_a_missing_price_is_unknown_and_never_a_guess(machines, region, words):
    estimate = hosting.estimate(machines, region)
    assert estimate.amount("worst") is None
    assert words in estimate.rate("a month")


def test_the_schedule_is_a_valid_request():
    request = hosting.schedule("digits", ROLE, 8 * 3600)
    shape = "CreateScheduleInput"
    assert list(service_model.type_errors(shape, request.parameters, "scheduler")) == []
    assert list(service_model.violations(shape, request.parameters, "scheduler")) == []
    target = request.parameters["Target"]
    assert target["Arn"] == "arn:aws:scheduler:::aws-sdk:sagemaker:deleteEndpoint"
    assert json.loads(target["Input"]) == {"EndpointName": "digits"}
    ahead = hosting.end(request) - dt.datetime.now(dt.UTC).timestamp()
    assert 8 * 3600 - 60 < ahead <= 8 * 3600


@pytest.fixture
def deploy(aws, project, tmp_path, monkeypatch, capsys):
    """A function that runs a verb in a project with a package; what it prints."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "home"))
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION + DEPLOY)
    package(project / "model", "exp-1")

    def run(*words, code=0):
        capsys.readouterr()
        assert cli.main([*map(str, words)]) == code, "".join(capsys.readouterr())
        shown = capsys.readouterr()
        return shown.out + shown.err

    return run


MODEL = ("deploy", "model", "-b", "sagemaker")


def service(name):
    return boto3.client(name, "us-east-1")


def sent(aws):
    """The requests that change something, in their order."""
    named = [
        one.action if "x-amz-target" in one.headers else f"{one.method} {one.path}"
        for one in aws.requests
    ]
    return [
        name
        for name in named
        if name.startswith(("Create", "Update", "Delete", "POST /sch", "PUT /sch", "DELETE /sch"))
    ]


def test_a_dry_run_shows_price_and_schedule_and_asks_nothing(aws, deploy):
    shown = deploy(*MODEL, "--for", "8h", "--dry-run")
    assert "cost: 0.23 USD an hour, 1.84 USD in 8h: 1 x ml.m5.xlarge" in shown
    assert "scheduled for deletion at 20" in shown
    assert aws.requests == []
    data = json.loads(deploy(*MODEL, "--for", "8h", "--dry-run", "--json"))
    operations = [one["operation"] for one in data["requests"]]
    assert operations == [
        *("CreateModel", "CreateEndpointConfig", "CreateSchedule", "CreateEndpoint"),
    ]
    assert data["cost"]["worst"] == 1.84
    shown = deploy(*MODEL, "--dry-run")
    assert "167.90 USD a month" in shown
    assert "runs until you delete it; --for 8h" in shown


def test_the_schedule_comes_before_the_endpoint_and_goes_with_it(aws, deploy):
    deploy(*MODEL, "--for", "8h")
    order = sent(aws)
    assert order.index("POST /schedules/digits") < order.index("CreateEndpoint")
    first = service("scheduler").get_schedule(Name="digits")
    assert first["ActionAfterCompletion"] == "DELETE"
    assert first["Target"]["RoleArn"] == ROLE
    deploy(*MODEL, "--for", "9h")  # renews it
    second = service("scheduler").get_schedule(Name="digits")
    ahead = hosting.due(second) - hosting.due(first)
    assert 3500 < ahead < 3700
    assert sent(aws).count("CreateEndpoint") == 1
    assert "scheduled for deletion at 20" in deploy(*MODEL)  # without --for it stays
    assert (
        service("scheduler").get_schedule(Name="digits")["ScheduleExpression"]
        == (second["ScheduleExpression"])
    )
    deploy("endpoint", "rm", "digits")
    assert service("sagemaker").list_endpoints()["Endpoints"] == []
    assert service("scheduler").list_schedules()["Schedules"] == []


@pytest.mark.parametrize("refused", ["CreateModel", "CreateEndpoint"])
def test_a_deploy_that_fails_leaves_no_schedule(aws, deploy, refused):
    quota = {"__type": "ResourceLimitExceeded", "message": "0 Instances"}

    def respond(one, forward):
        return as_json(400, quota) if one.action == refused else forward()

    aws.respond = respond
    assert "0 Instances" in deploy(*MODEL, "--for", "8h", code=76)
    assert left() == (set(), set())
    aws.respond = lambda _, forward: forward()
    deploy(*MODEL, "--for", "8h")
    assert left() == ({"digits"}, {"digits"})


def test_an_update_that_fails_does_not_schedule_the_end_of_the_endpoint(aws, deploy, project):
    deploy(*MODEL)
    package(project / "better", "exp-2")
    refused = {"__type": "ResourceLimitExceeded", "message": "0 Instances"}

    def respond(one, forward):
        return as_json(400, refused) if one.action == "UpdateEndpoint" else forward()

    aws.respond = respond
    deploy("deploy", "better", "-b", "sagemaker", "--for", "8h", code=76)
    assert service("scheduler").list_schedules()["Schedules"] == []


def test_what_the_schedule_leaves_is_removed_with_the_endpoint(aws, deploy):
    """moto keeps schedules, and never runs them: here the endpoint is deleted as one would."""
    scaled = ("--set", "sagemaker.deploy.autoscaling={max: 2, target: 9}")
    deploy(*MODEL, "--for", "8h", *scaled)
    due = service("scheduler").get_schedule(Name="digits")
    service("sagemaker").delete_endpoint(**json.loads(due["Target"]["Input"]))
    service("scheduler").delete_schedule(Name="digits")
    assert "deletes its configuration and model" in deploy("endpoint", "status", "digits")
    assert listed(deploy) == []
    deploy("endpoint", "rm", "digits")
    assert service("sagemaker").list_endpoint_configs()["EndpointConfigs"] == []
    assert service("sagemaker").list_models()["Models"] == []
    targets = service("application-autoscaling").describe_scalable_targets(
        ServiceNamespace="sagemaker"
    )
    assert targets["ScalableTargets"] == []


def test_without_a_role_for_it_the_schedule_is_refused_offline(aws, deploy, project):
    job = project / "job.yaml"
    job.write_text(job.read_text().replace(f", scheduler_role: '{ROLE}'", ""))
    shown = deploy(*MODEL, "--for", "8h", code=65)
    assert "sagemaker.deploy.scheduler_role: is required with delete_after" in shown
    assert aws.requests == []


def test_a_schedule_of_that_name_that_does_something_else_is_not_touched(aws, deploy):
    target = {"Arn": "arn:aws:lambda:us-east-1:123456789012:function:f", "RoleArn": ROLE}
    service("scheduler").create_schedule(
        Name="digits",
        ScheduleExpression="rate(1 hour)",
        FlexibleTimeWindow={"Mode": "OFF"},
        Target=target,
    )
    shown = deploy(*MODEL, "--for", "8h", code=76)
    assert (
        "a schedule digits already exists in us-east-1 and does not delete this endpoint" in shown
    )
    assert service("scheduler").get_schedule(Name="digits")["ScheduleExpression"] == "rate(1 hour)"
    assert service("sagemaker").list_endpoints()["Endpoints"] == []


@pytest.mark.parametrize(
    ("cap", "more", "code"),
    [("2 USD", ("--for", "8h"), 0), ("1 USD", ("--for", "8h"), 65), ("100 USD", (), 65)],
)
def test_max_cost_refuses_before_anything_is_sent(aws, deploy, cap, more, code):
    shown = deploy(*MODEL, "--max-cost", cap, *more, code=code)
    assert bool(aws.requests) == (code == 0)
    if code:
        cost = "1.84 USD in 8h" if more else "167.90 USD in a month"
        assert f"the endpoint may cost {cost}, more than " in shown
        assert ("use a shorter --for" if more else "delete it earlier with --for 8h") in shown


def test_a_cap_with_an_unknown_price_is_refused(aws, deploy, project):
    job = project / "job.yaml"
    job.write_text(job.read_text().replace("ml.m5.xlarge", "ml.c7i.xlarge"))
    shown = deploy(*MODEL, "--max-cost", "12 USD", code=65)
    assert (
        "cannot be enforced: no price is known for an endpoint on ml.c7i.xlarge in us-east-1"
        in shown
    )
    assert aws.requests == []


def test_a_budget_counts_endpoints(aws, deploy):
    budget = ("--set", "budget=3 USD for vision")
    deploy(*MODEL, "--for", "8h", *budget)
    (use,) = budgets.uses()
    assert (use.reserved, use.endpoints) == (CPU_HOUR * 8, 1)
    assert "reserved for 1 endpoint" in str(use)
    shown = deploy(*MODEL, "--name", "other", "--for", "8h", *budget, code=64)
    assert "the endpoint may cost 1.84 USD, more than is left in its budget" in shown
    names = [one["EndpointName"] for one in service("sagemaker").list_endpoints()["Endpoints"]]
    assert names == ["digits"]
    deploy(*MODEL, "--for", "9h", *budget)  # the same endpoint is not counted twice
    (use,) = budgets.uses()
    assert (use.reserved, use.endpoints) == (CPU_HOUR * 9, 1)
    deploy("endpoint", "rm", "digits")
    (use,) = budgets.uses()
    assert (use.endpoints, use.reserved) == (0, 0)
    assert use.spent < 1


def test_after_its_time_a_budget_counts_an_endpoint_until_it_is_found_to_be_gone(
    aws, deploy, monkeypatch
):
    deploy(*MODEL, "--for", "8h", "--set", "budget=3 USD for vision")
    later = budgets.registry.now() + 9 * 3600
    monkeypatch.setattr(budgets.registry, "now", lambda: later)
    shown = deploy("list", "--endpoints")  # its schedule did not delete it
    assert "2.07 USD reserved for 1 endpoint, 1 endpoint is past its --for" in shown
    aws.respond = lambda *_: as_json(400, {"__type": "AccessDeniedException", "message": "no"})
    (use,) = budgets.uses()
    assert (use.overdue, use.endpoints) == (1, 1)
    assert "1 endpoint is past its --for" in deploy("list", "--cost")
    aws.respond = lambda _, forward: forward()
    service("sagemaker").delete_endpoint(EndpointName="digits")
    assert "2.07 USD spent" in deploy("list", "--cost")  # it outlived its schedule
    (use,) = budgets.uses()
    assert (use.endpoints, use.overdue, round(use.spent, 1)) == (0, 0, Decimal("2.1"))


def test_an_endpoint_that_nobody_saw_after_its_time_ended_then(aws, deploy, monkeypatch):
    deploy(*MODEL, "--for", "8h", "--set", "budget=3 USD for vision")
    service("sagemaker").delete_endpoint(EndpointName="digits")
    later = budgets.registry.now() + 72 * 3600
    monkeypatch.setattr(budgets.registry, "now", lambda: later)
    assert "1.84 USD spent" in deploy("list", "--cost")


def test_a_change_that_aws_refuses_does_not_lower_what_is_reserved(aws, deploy, project):
    budget = ("--set", "budget=5 USD for vision")
    deploy(*MODEL, "--for", "8h", *budget)
    (before,) = budgets.uses()
    answer = as_json(400, {"__type": "ResourceLimitExceeded", "message": "0 Instances"})
    aws.respond = lambda one, forward: answer if one.action == "UpdateEndpoint" else forward()
    package(project / "better", "exp-2")
    other = ("deploy", "better", "-b", "sagemaker", "--for", "4h", *budget)
    deploy(*other, code=76)
    (use,) = budgets.uses()
    assert use.reserved == before.reserved
    answer = as_json(200, {"EndpointArn": "arn"})
    assert "the endpoint still serves" in deploy(*other, code=1)  # moto has no UpdateEndpoint
    (use,) = budgets.uses()
    assert (use.reserved, use.endpoints) == (before.reserved / 2, 1)


def test_fewer_machines_are_never_refused(aws, deploy, monkeypatch):
    limits = ("--max-cost", "4 USD", "--set", "budget=5 USD for vision")
    deploy(*MODEL, "--for", "8h", *limits)
    scale = ("endpoint", "scale", "digits", "--instances")
    deploy(*scale, 2)
    later = budgets.registry.now() + 9 * 3600
    monkeypatch.setattr(budgets.registry, "now", lambda: later)
    deploy(*scale, 1)  # though its schedule did not delete it, and a month costs too much
    (use,) = budgets.uses()
    assert (use.endpoints, round(use.spent)) == (1, 4), "at the price of two until now"
    shown = deploy(*scale, 2, code=65)
    assert "fewer instances, or deploy again with a higher max_cost" in shown


def test_scaling_is_refused_as_deploying_is(aws, deploy):
    limits = ("--max-cost", "4 USD", "--set", "budget=5 USD for vision")
    deploy(*MODEL, "--for", "8h", *limits)
    aws.requests.clear()
    scale = ("endpoint", "scale", "digits", "--instances")
    shown = deploy(*scale, 3, code=65)
    assert "the endpoint may cost 5.52 USD in 7h" in shown
    assert ": 3 x ml.m5.xlarge" in shown
    assert aws.requests == []
    shown = deploy(*scale, 2)
    assert "cost: 0.46 USD an hour, 3." in shown
    (use,) = budgets.uses()
    assert use.endpoints == 1
    assert 2 * CPU_HOUR * 7 < use.reserved < 2 * CPU_HOUR * 8
    deploy(*MODEL, "--name", "other", "--for", "5h", *limits)
    other = deployments.get("other")
    aws.requests.clear()
    shown = deploy("endpoint", "scale", "other", "--instances", 2, code=64)
    assert "the endpoint may cost 2." in shown
    assert "more than is left in its budget: budget 5.00 USD for vision" in shown
    assert sent(aws) == []
    assert deployments.get("other") == other
    assert "digits: updated; 1 x ml.m5.xlarge" in deploy(*scale, 1)  # less is never refused
    (use,) = budgets.uses()
    assert CPU_HOUR * 12 < use.reserved < CPU_HOUR * 13


def test_deploying_again_counts_an_endpoint_as_it_was_scaled(aws, deploy):
    deploy(*MODEL, "--for", "8h")
    deploy("endpoint", "scale", "digits", "--instances", 3)
    data = json.loads(deploy(*MODEL, "--for", "8h", "--dry-run", "--json"))
    assert (data["machines"][0]["instances"], data["cost"]["worst"]) == (3, 5.52)
    shown = deploy(*MODEL, "--for", "8h", "--max-cost", "4 USD", code=65)
    assert "5.52 USD in 8h, more than 4.00 USD: 3 x ml.m5.xlarge" in shown
    deploy(*MODEL, "--for", "8h")
    assert deployments.get("digits").machine_list[0].instances == 3
    scaling = "sagemaker.deploy.autoscaling={{max: {}, target: 9}}"
    deploy(*MODEL, "--name", "scaled", "--set", scaling.format(2))
    deploy(*MODEL, "--name", "scaled", "--set", scaling.format(4))
    assert deployments.get("scaled").machine_list[0].most == 4, "new limits are sent"


def with_update(aws):
    """moto has no UpdateEndpoint."""

    def update(body):
        service("sagemaker").delete_endpoint(EndpointName=body["EndpointName"])
        service("sagemaker").create_endpoint(**body)
        return {"EndpointArn": "arn"}

    aws.answers["UpdateEndpoint"] = update


BIG = ("--set", "sagemaker.deploy.instance_type=ml.m5.2xlarge")
BIG_HOUR = Decimal("0.461")
BACK = ("endpoint", "rollback", "digits")


def limit(cap):
    """Set the `max_cost` of the current deployment."""
    row = deployments.get("digits")
    deployments._put(row._replace(settings=json.dumps({**row.given, "max_cost": cap})))
    return deployments.get("digits")


def test_a_rollback_to_dearer_machines_is_refused_as_deploying_is(aws, deploy):
    with_update(aws)
    deploy(*MODEL, *BIG, "--for", "8h", "--max-cost", "20 USD")
    dear = deployments.get("digits")
    deploy(*MODEL, "--for", "8h", "--max-cost", "2 USD")
    cheap = deployments.get("digits")
    aws.requests.clear()
    shown = deploy(*BACK, code=65)
    assert "max_cost: the endpoint may cost 3.69 USD in 7h" in shown
    assert ": 1 x ml.m5.2xlarge" in shown
    assert "use a cheaper configuration with --to, or a higher max_cost" in shown
    assert aws.requests == []
    assert deployments.get("digits") == cheap
    limit("20 USD")
    shown = deploy(*BACK)
    assert f"digits: from {cheap.config} to {dear.config}, with the model of exp-1" in shown
    assert "cost: 0.461 USD an hour, 3." in shown
    row = deployments.get("digits")
    assert (row.config, row.given["price"]) == (dear.config, "0.461")


def test_a_rollback_to_cheaper_machines_is_never_refused(aws, deploy):
    with_update(aws)
    deploy(*MODEL)
    deploy(*MODEL, *BIG, "--for", "8h")
    limit("1 USD")
    assert "cost: 0.23 USD an hour" in deploy(*BACK)
    given = deployments.get("digits").given
    assert given["until"], "its schedule stays"
    assert given["max_cost"] == "1 USD"
    deploy(*MODEL, "--set", "sagemaker.deploy.instance_type=ml.c5.xlarge")  # of an unknown price
    limit("1 USD")
    aws.requests.clear()
    assert "the endpoint may cost 1.84 USD in 7h" in deploy(*BACK, code=65)
    assert aws.requests == []


def test_a_budget_counts_an_endpoint_after_a_rollback(aws, deploy):
    with_update(aws)
    budget = ("--set", "budget=5 USD for vision")
    deploy(*MODEL, *BIG, "--for", "8h", *budget)
    deploy(*MODEL, "--for", "8h", *budget)
    deploy(*MODEL, "--name", "other", "--for", "8h", *budget)
    aws.requests.clear()
    shown = deploy(*BACK, code=64)
    assert "the endpoint may cost 3.69 USD, more than is left in its budget" in shown
    assert sent(aws) == []
    deploy("endpoint", "rm", "other")
    deploy(*BACK)
    (use,) = budgets.uses()
    assert (use.endpoints, round(use.reserved, 1)) == (1, round(BIG_HOUR * 8, 1))
    deploy(*BACK)
    (use,) = budgets.uses()
    assert (use.endpoints, round(use.reserved, 1)) == (1, round(CPU_HOUR * 8, 1))


def test_a_rollback_has_the_machines_of_its_configuration(aws, deploy, project):
    """And not those to which it was scaled once."""
    with_update(aws)
    deploy(*MODEL)
    deploy("endpoint", "scale", "digits", "--instances", 3)
    deploy(*MODEL)  # again: it stays as it was scaled
    package(project / "better", "exp-2")
    deploy("deploy", "better", "-b", "sagemaker")
    deploy(*BACK)
    row = deployments.get("digits")
    assert (row.run, row.machine_list[0].instances) == ("exp-1", 1)
    assert row.given["price"] == "0.23"


def test_a_rollback_to_what_is_served_sends_nothing(aws, deploy):
    with_update(aws)
    deploy(*MODEL)
    aws.requests.clear()
    deploy(*BACK, "--to", deployments.get("digits").config)
    assert sent(aws) == []
    assert deployments.get("digits").phase == "in service"


def listed(deploy, *words, code=0):
    shown = deploy("list", "--endpoints", "--json", *words, code=code)
    return json.JSONDecoder().raw_decode(shown)[0]  # notes follow


def test_endpoints_of_all_machines_with_age_price_and_last_request(
    aws, deploy, tmp_path, monkeypatch
):
    deploy(*MODEL, "--for", "8h")
    deploy(*MODEL, "--name", "other")
    now = dt.datetime.now(dt.UTC)
    names = [("EndpointName", "digits"), ("VariantName", "AllTraffic")]
    service("cloudwatch").put_metric_data(
        Namespace="AWS/SageMaker",
        MetricData=[
            {
                "MetricName": "Invocations",
                "Dimensions": [{"Name": name, "Value": value} for name, value in names],
                "Timestamp": now - dt.timedelta(hours=5),
                "Value": 3,
            }
        ],
    )
    service("sagemaker").create_endpoint(  # somebody else's
        EndpointName="theirs",
        EndpointConfigName=service("sagemaker").list_endpoint_configs()["EndpointConfigs"][0][
            "EndpointConfigName"
        ],
    )
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "another machine"))
    assert listed(deploy) == []  # it does not know where to ask
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    found = {one["name"]: one for one in listed(deploy)}
    assert set(found) == {"digits", "other"}
    one = found["digits"]
    assert (one["run"], one["hourly"], one["target"]) == ("exp-1", "0.23", "us-east-1")
    assert one["machines"][0]["instance_type"] == "ml.m5.xlarge"
    assert 4 * 3600 < now.timestamp() - one["used"] < 6 * 3600
    assert 7 * 3600 < one["until"] - now.timestamp() <= 8 * 3600 + 60
    other = found["other"]
    assert (other["used"], other["used_days"], other["until"]) == (None, 15, None)
    table = deploy("list", "--endpoints")
    assert "0.23 USD" in table


@pytest.mark.parametrize("refused", ["GraniteServiceVersion20100801", "/schedules/"])
def test_what_may_not_be_read_is_unknown(aws, deploy, refused):
    deploy(*MODEL, "--for", "8h")
    denied = {"__type": "AccessDeniedException", "message": "not authorized"}

    def respond(one, forward):
        is_metric = "monitoring" in one.headers.get("authorization", "")
        if (is_metric and refused[0] == "G") or (refused in one.path):
            return as_json(403, denied)
        return forward()

    aws.respond = respond
    (one,) = listed(deploy)
    assert one["hourly"] == "0.23"
    if refused[0] == "G":
        assert one["used_days"] is None
    else:
        assert (one["until"], one["until_known"]) == (None, False)
    assert "unknown" in deploy("list", "--endpoints")


def test_an_account_that_refuses_the_list_is_an_error(aws, deploy):
    deploy(*MODEL)
    denied = {"__type": "AccessDeniedException", "message": "not authorized: ListEndpoints"}

    def respond(one, forward):
        return as_json(400, denied) if one.action == "ListEndpoints" else forward()

    aws.respond = respond
    assert "ListEndpoints" in deploy("list", "--endpoints", code=77)


def test_a_region_that_fails_does_not_hide_the_endpoints_of_others(aws, deploy):
    deploy(*MODEL)
    deploy(*MODEL, "--name", "other", "--set", "sagemaker.region=eu-west-1")
    denied = {"__type": "AccessDeniedException", "message": "not authorized"}

    def respond(one, forward):
        is_failing = one.action == "ListEndpoints" and "/eu-west-1/" in one.headers["authorization"]
        return as_json(400, denied) if is_failing else forward()

    aws.respond = respond
    shown = deploy("list", "--endpoints", code=77)
    assert "digits\t" in shown
    assert "AWS (ListEndpoints, eu-west-1): not authorized" in shown
    assert [one["name"] for one in listed(deploy, code=77)] == ["digits"]


def test_the_limit_of_the_list_applies_to_json_too(aws, deploy):
    deploy(*MODEL)
    deploy(*MODEL, "--name", "other")
    assert [one["name"] for one in listed(deploy, "-n", "1")] == ["other"]
    assert "the newest 1 of 2 endpoints; -n 2 shows all" in deploy("list", "--endpoints", "-n", "1")


READS = ("Describe", "Get", "List")
changes = pytest.mark.parametrize(
    "reads", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["changes", "requests"]
)
"""Kill a process at each request that changes something, and at night at every request."""


class Killer:
    """Kills a process once it has sent `last` requests and another one, which is carried out.

    Requests that change nothing count only with `reads`.
    """

    def __init__(self, aws, project, last, *words, reads):
        self.seen, self.last, self.reads = 0, last, reads
        aws.respond = self.respond
        argv = [sys.executable, "-m", "deploykit", *words]
        env = {**os.environ, "PYTHONPATH": str(ROOT)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(argv, cwd=project, env=env, **quiet)
        self.code = self.process.wait()
        aws.respond = lambda _, forward: forward()

    def respond(self, one, forward):
        answer = forward()
        if not self.reads and (one.method in {"GET", "HEAD"} or one.action.startswith(READS)):
            return answer
        self.seen += 1
        if self.seen <= self.last:
            return answer
        self.process.kill()
        return None


def left():
    """The endpoints, and the schedules, that exist; no endpoint is without its own."""
    made = {one["EndpointName"] for one in service("sagemaker").list_endpoints()["Endpoints"]}
    planned = {one["Name"] for one in service("scheduler").list_schedules()["Schedules"]}
    assert made <= planned
    return made, planned


@changes
@pytest.mark.slow
def test_a_kill_at_any_request_leaves_no_endpoint_without_its_schedule(aws, deploy, project, reads):
    """And the same command again completes it, with nothing twice."""
    number, code = 0, -signal.SIGKILL
    while code:
        words = (*MODEL, "--for", "8h", "--name", f"digits-{number}")
        code = Killer(aws, project, number, *words, reads=reads).code
        assert code in {0, -signal.SIGKILL}
        left()
        deploy(*words)
        made, planned = left()
        assert f"digits-{number}" in made & planned
        number += 1
    assert number >= (8 if reads else 5)
    configs = service("sagemaker").list_endpoint_configs(MaxResults=100)["EndpointConfigs"]
    assert len(configs) == number


@changes
@pytest.mark.slow
def test_a_removal_that_is_killed_at_any_request_is_completed(aws, deploy, project, reads):
    number, code = 0, -signal.SIGKILL
    while code:
        deploy(*MODEL, "--for", "8h")
        code = Killer(aws, project, number, "endpoint", "rm", "digits", reads=reads).code
        left()
        if code:
            deploy("endpoint", "rm", "digits")
        assert left() == (set(), set())
        number += 1
    assert number >= (4 if reads else 3)
