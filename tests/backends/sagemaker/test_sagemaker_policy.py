"""`infra render --submitter`: its policy allows each request that is really sent, and no other."""

from __future__ import annotations

import fnmatch
import json
import re
from urllib.parse import parse_qs, urlsplit

import boto3
import pytest
from botocore.exceptions import ClientError

from deploykit.cli import main as cli
from tests.aws_server import SECTION
from tests.model_package import package

pytestmark = pytest.mark.aws
ROLE = "arn:aws:iam::123456789012:role/training"
JOB = "arn:aws:sagemaker:us-east-1:123456789012:training-job/digits-1"
LOGS = "arn:aws:logs:us-east-1:123456789012:log-group:/aws/sagemaker/TrainingJobs"
TAGS = "  tags: {team: vision}\n"
PLACES = "checkpoints: s3://my-bucket/ckpt/a\n"


@pytest.fixture
def deploykit(project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / "home"))
    with (project / "job.yaml").open("a") as file:
        file.write(PLACES + SECTION + TAGS)

    def run(*argv):
        code = cli.main(list(argv))
        shown = capsys.readouterr()
        assert code == 0, shown.out + shown.err
        return shown.out

    return run


@pytest.fixture
def policy(deploykit, tmp_path):
    deploykit("infra", "render", "--submitter", "--out", str(tmp_path / "made"))
    return json.loads((tmp_path / "made/submitter.json").read_text())


def needed(one):
    """The IAM action, resource and condition key of a request that was sent; None: needs none."""
    target = one.headers.get("x-amz-target", "")
    if target.startswith("SageMaker."):
        return f"sagemaker:{one.action}", JOB, {}
    if target.startswith("Logs_"):
        return f"logs:{one.action}", f"{LOGS}:log-stream:x", {}
    url = urlsplit(one.path)
    query = parse_qs(url.query)
    if b"Action=GetCallerIdentity" in one.body:
        return None
    bucket, _, key = url.path.lstrip("/").partition("/")
    if "list-type" in query:
        return "s3:ListBucket", f"arn:aws:s3:::{bucket}", {"s3:prefix": query["prefix"][0]}
    action = {"PUT": "s3:PutObject", "HEAD": "s3:GetObject", "GET": "s3:GetObject"}[one.method]
    return action, f"arn:aws:s3:::{bucket}/{key}", {}


def allows(statement, action, resource, context):
    named = any(fnmatch.fnmatchcase(resource, pattern) for pattern in statement["Resource"])
    conditions = statement.get("Condition", {})
    wanted = {**conditions.get("StringLike", {}), **conditions.get("StringEquals", {})}
    met = all(fnmatch.fnmatchcase(context.get(key, ""), text) for key, text in wanted.items())
    return action in statement["Action"] and named and met


@pytest.mark.parametrize("keys", ["", "  prefix: other/place\n", "data: {train: images}\n"])
def test_the_policy_allows_each_request_and_nothing_more(
    aws, deploykit, streams, project, tmp_path, keys
):
    (project / "images").mkdir()
    (project / "images/1.png").write_bytes(b"x")
    with (project / "job.yaml").open("a") as file:
        file.write(keys)
    out = tmp_path / "again"
    deploykit("infra", "render", "--submitter", "job.yaml", "--out", str(out))
    policy = json.loads((out / "submitter.json").read_text())
    bucket = boto3.client("s3", "us-east-1")
    streams("digits-1/algo-1-1", [(0, "hello")])
    aws.answers["StopTrainingJob"] = lambda _: {}
    aws.requests.clear()
    deploykit("submit", "--backend", "sagemaker", "--run", "digits-1")
    sent = json.loads(next(o.body for o in aws.requests if o.action == "CreateTrainingJob"))
    before = list(aws.requests)
    results = sent["OutputDataConfig"]["S3OutputPath"].removeprefix("s3://my-bucket/")
    bucket.put_object(Bucket="my-bucket", Key=f"{results}/digits-1/output/model.pt", Body=b"x")
    bucket.put_object(Bucket="my-bucket", Key="ckpt/a/step-1/weights.pt", Body=b"x")
    aws.requests[:] = before
    running = {"TrainingJobArn": JOB, "TrainingJobStatus": "InProgress"}
    aws.answers["DescribeTrainingJob"] = lambda _: running
    deploykit("cancel", "digits-1")
    del aws.answers["DescribeTrainingJob"]
    deploykit("status", "digits-1")
    deploykit("logs", "digits-1")
    deploykit("fetch", "digits-1", "--to", str(tmp_path / "results"))
    more = ("--checkpoints", "--to", str(tmp_path / "checkpoints"))
    deploykit("fetch", "digits-1", *more)

    requests = {str(found): found for one in aws.requests if (found := needed(one))}.values()
    statements = policy["Statement"]
    for request in requests:
        assert any(allows(statement, *request) for statement in statements), request
    allowed = {(s["Sid"], action) for s in statements for action in s["Action"]}
    used = {
        (s["Sid"], action)
        for s in statements
        for action in s["Action"]
        if any(request[0] == action and allows(s, *request) for request in requests)
    }
    # of CreateTrainingJob, which IAM asks for the role that it passes and for its tags
    assert allowed - used == {("Role", "iam:PassRole"), ("Jobs", "sagemaker:AddTags")}
    assert sent["RoleArn"] == ROLE
    assert sent["Tags"] == [{"Key": "team", "Value": "vision"}]


SCHEDULER = "arn:aws:iam::123456789012:role/training-scheduler"
SCHEDULES = {"POST": "Create", "PUT": "Update", "GET": "Get", "DELETE": "Delete"}


def action(one):
    """The IAM action of a request of the verbs for endpoints; None: needs none."""
    service = one.headers["authorization"].split("/")[3]
    if service == "sts":
        return None
    if service == "scheduler":
        return f"scheduler:{SCHEDULES[one.method]}Schedule"
    if service == "monitoring":
        return "cloudwatch:GetMetricData"
    if service == "s3":
        return {"PUT": "s3:PutObject", "HEAD": "s3:GetObject"}[one.method]
    return f"{service}:{one.action}"


@pytest.mark.slow
def test_the_policy_of_a_job_with_an_endpoint_allows_what_its_verbs_send(
    aws, deploykit, project, tmp_path, monkeypatch
):
    with (project / "job.yaml").open("a") as file:
        deploy = f"name: e, instance_type: ml.m5.xlarge, scheduler_role: '{SCHEDULER}'"
        file.write(f"  deploy: {{{deploy}, autoscaling: {{max: 2, target: 9}}}}\n")
    out = tmp_path / "made"
    deploykit("infra", "render", "--submitter", "job.yaml", "--out", str(out))
    statements = json.loads((out / "submitter.json").read_text())["Statement"]
    package(project / "model", "exp-1")
    package(project / "better", "exp-1", b"other")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    aws.requests.clear()
    there = ("-b", "sagemaker")
    deploykit("deploy", "model", *there, "--for", "8h", "--wait")
    deploykit("list", "--endpoints")
    deploykit("register", "model", *there, "--name", "m")
    deploykit("register", "model", *there, "--name", "m", "--approval", "approved")
    deploykit("endpoint", "rm", "e")
    sent = {found for one in aws.requests if (found := action(one))}
    allowed = {action for one in statements for action in one["Action"]}
    assert {"scheduler:CreateSchedule", "sagemaker:CreateModelPackage"} <= sent
    assert sent - allowed == set()
    (passed,) = [one for one in statements if one["Sid"] == "SchedulerRole"]
    assert (passed["Action"], passed["Resource"]) == (["iam:PassRole"], [SCHEDULER])
    assert passed["Condition"]["StringEquals"] == {"iam:PassedToService": "scheduler.amazonaws.com"}


def test_the_policy_of_a_batch_job_allows_its_logs(deploykit, project, tmp_path):
    with (project / "job.yaml").open("a") as file:
        file.write("  deploy: {instance_type: ml.m5.xlarge, batch: {input: 's3://my-bucket/in'}}\n")
    out = tmp_path / "made"
    deploykit("infra", "render", "--submitter", "job.yaml", "--out", str(out))
    statements = json.loads((out / "submitter.json").read_text())["Statement"]
    stream = LOGS.replace("TrainingJobs", "TransformJobs:log-stream:e-1/x")
    for name in ("logs:DescribeLogStreams", "logs:GetLogEvents"):
        assert any(allows(one, name, stream, {}) for one in statements)


def test_only_this_role_may_be_passed_and_only_to_sagemaker(aws, policy):
    (role,) = [one for one in policy["Statement"] if "iam:PassRole" in one["Action"]]
    assert role["Resource"] == [ROLE]
    assert role["Condition"]["StringEquals"] == {"iam:PassedToService": "sagemaker.amazonaws.com"}
    for statement in policy["Statement"]:
        assert "*" not in statement["Resource"]
        assert not [action for action in statement["Action"] if "*" in action]


def test_iam_lets_a_user_with_these_actions_submit_and_nothing_else(
    aws, enforced, deploykit, policy, monkeypatch
):
    iam = boto3.client("iam", "us-east-1")
    iam.create_user(UserName="anna")
    key = iam.create_access_key(UserName="anna")["AccessKey"]
    for statement in policy["Statement"]:  # moto compares actions, and not resources
        statement["Resource"] = "*"
    text = json.dumps(policy)
    iam.put_user_policy(UserName="anna", PolicyName="submit", PolicyDocument=text)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    enforced()
    deploykit("submit", "--backend", "sagemaker", "--run", "digits-1")
    deploykit("status", "digits-1")
    with pytest.raises(ClientError, match="AccessDenied"):
        boto3.Session(region_name="us-east-1").client("s3").list_buckets()


def test_the_policy_of_an_assumed_role_is_attached_to_the_role(deploykit, project, tmp_path):
    with (project / "job.yaml").open("a") as file:
        file.write("  assume_role: arn:aws:iam::123456789012:role/submitter\n")
    out = str(tmp_path / "made")
    shown = deploykit("infra", "render", "--submitter", "job.yaml", "--out", out)
    assert re.search(r"aws iam put-role-policy --role-name submitter .*submitter\.json", shown)
