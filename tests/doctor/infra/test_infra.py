"""`deploykit infra`: answers, the rendered files, and cfn-lint and moto on them."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import yaml
from botocore.exceptions import ClientError

from deploykit.cli import main as cli
from deploykit.doctor import infra
from tests.programs import need

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
GIVEN = ROOT / "infra/aws/infra.yaml"
"""The repository's own answers."""
REGION = "us-east-1"


def run(capsys, *words):
    code = cli.main(["infra", *map(str, words)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def linter(monkeypatch):
    """cfn-lint, as it stands beside this Python."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")


def test_the_files_of_the_repository_are_made_of_its_answers():
    made = infra.files(infra.load(GIVEN))
    assert set(made) == {path.name for path in GIVEN.parent.iterdir()} - {GIVEN.name}
    for name, text in made.items():
        assert (GIVEN.parent / name).read_text() == text, f"render {name} again: see {GIVEN.name}"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cluster": None, "log_group": False, "name": "no", "block": "172.31.0.0/28"},
        {"region": "cn-north-1", "zone": "cn-north-1b", "prefix": "true", "keep_sources": 1},
        {"notify": True},
    ],
    ids=["all", "least", "China", "notify"],
)
def test_cfn_lint_finds_nothing(answers, capsys, linter, changes):
    code, out, err = run(capsys, "check", answers(changes), "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["linted"]


def test_what_cfn_lint_finds_is_said(answers, capsys, monkeypatch, linter):
    good = infra.files(infra.load(answers()))
    bad = good["stack.yaml"].replace("BucketName:", "BucketNam:")
    monkeypatch.setattr(infra, "files", lambda _: {**good, "stack.yaml": bad})
    code, _, err = run(capsys, "check", answers())
    assert code == 65
    assert "cfn-lint" in err
    assert "BucketNam" in err


WRONG = {
    "zone": ("eu-west-1a", "is not in us-east-1"),
    "block": ("10.0.0.1/16", "host bits set"),
    "cluster.instance_type": ("p4d.24xlarg", "did you mean 'p4d.24xlarge'?"),
    "cluster.head_type": ("m5.enormous", "does not know the EC2 instance type m5.enormous"),
    "cluster.min_nodes": (5, "must be at most max_nodes, which is 4"),
    "cluster.storage": (1300, "1200 or 2400"),
}


def test_every_wrong_answer_is_said_at_once(answers, capsys):
    code, _, err = run(capsys, "render", answers({key: value for key, (value, _) in WRONG.items()}))
    assert code == 65
    for key, (_, words) in WRONG.items():
        assert re.search(rf"line \d+: {re.escape(key)}: .*{re.escape(words)}", err), err


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bloc": "10.0.0.0/16"}, "did you mean 'block'?"),
        ({"block": "10.0.0.0/8"}, "between /16 and /28"),
        ({"block": "10.0.0.256/24"}, "Octet 256 (> 255) not permitted"),
        ({"email": "nobody"}, "an e-mail address"),
        ({"monthly_budget": 0}, "at least 1"),
        ({"cluster.subnet": "my-subnet"}, "subnet-0123456789abcdef0"),
    ],
)
def test_a_wrong_answer(answers, capsys, changes, words):
    code, _, err = run(capsys, "check", answers(changes))
    assert code == 65
    assert words in err


def test_files_are_written_and_not_replaced_unasked(answers, capsys, tmp_path):
    folder = tmp_path / "out"
    code, out, _ = run(capsys, "render", answers(), "--out", folder)
    assert code == 0
    assert {path.name for path in folder.iterdir()} == {"stack.yaml", "cluster.yaml", "Dockerfile"}
    assert "aws cloudformation deploy" in out
    code, _, err = run(capsys, "render", answers(), "--out", folder)
    assert (code, "--force overwrites" in err) == (64, True)
    assert run(capsys, "render", answers({"name": "other"}), "--out", folder, "--force")[0] == 0
    assert "other-execution" in (folder / "stack.yaml").read_text()


def test_the_image_holds_what_the_tests_run_with(answers):
    pins = {}
    for file in ("constraints.txt", "tests/backends/sagemaker/launcher/requirements.txt"):
        lines = (ROOT / file).read_text().splitlines()
        pins |= dict(line.split("==") for line in lines if not line.startswith("#"))
    recipe = infra.files(infra.load(answers()))["Dockerfile"]
    pinned = dict(re.findall(r"^    (\w+)==(\S+)", recipe, re.MULTILINE))
    assert len(pinned) >= 6
    assert {name: pins[name] for name in pinned} == pinned


def test_the_image_holds_no_private_key(answers):
    """Whoever can pull an image has what is in its layers; Debian makes host keys too."""
    recipe = infra.files(infra.load(answers()))["Dockerfile"]
    layers = [step for step in re.split(r"\n(?=[A-Z]+ )", recipe) if step.startswith("RUN ")]
    assert not any("ssh-keygen" in step for step in layers)
    (packages,) = (step for step in layers if "openssh-server" in step)
    assert "rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*" in packages


def test_the_containers_of_a_job_make_the_same_ssh_key(answers, tmp_path):
    """The script of the recipe; each container has a home, and host keys there."""
    need("ssh")
    recipe = infra.files(infra.load(answers()))["Dockerfile"]
    script = tmp_path / "with-ssh-keys"
    script.write_text(recipe.partition("with-ssh-keys\n")[2].partition("\nEOF\n")[0])
    programs = tmp_path / "bin"
    programs.mkdir()
    keygen = shutil.which("ssh-keygen")
    (programs / "ssh-keygen").write_text(f'#!/bin/sh\nexec {keygen} -A -f "$HOME"\n')
    (programs / "ssh-keygen").chmod(0o755)

    def start(container, job, sent):
        home = tmp_path / container
        (home / "input/config").mkdir(parents=True)
        (home / "etc/ssh").mkdir(parents=True)
        (home / "input/config/hyperparameters.json").write_text(sent)
        env = {"HOME": str(home), "SAGEMAKER_BASE_DIR": str(home), "TRAINING_JOB_ARN": job}
        env["PATH"] = f"{programs}:{os.environ['PATH']}"
        argv = [sys.executable, script, "echo", "train"]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
        assert done.stdout.endswith("train\n")
        assert (home / "etc/ssh/ssh_host_ed25519_key").exists()
        key = home / ".ssh/id_ed25519"
        assert stat.S_IMODE(key.stat().st_mode) == 0o600
        argv = [keygen, "-y", "-f", key]
        public = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
        assert (home / ".ssh/authorized_keys").read_text() == public
        return public

    first = start("algo-1", "arn:digits-1", '{"a": "1", "b": "2"}')
    assert start("algo-2", "arn:digits-1", '{"b": "2", "a": "1"}') == first
    assert start("other", "arn:digits-2", '{"a": "1", "b": "2"}') != first
    assert start("another", "arn:digits-1", '{"a": "1", "b": "3"}') != first


@pytest.fixture
def stack(aws, answers):
    """The outputs of the stack, as moto makes it."""
    text = infra.files(infra.load(answers()))["stack.yaml"]
    formation = boto3.client("cloudformation", REGION)
    formation.create_stack(
        StackName="training", TemplateBody=text, Capabilities=["CAPABILITY_NAMED_IAM"]
    )
    (made,) = formation.describe_stacks(StackName="training")["Stacks"]
    assert made["StackStatus"] == "CREATE_COMPLETE"
    return {one["OutputKey"]: one["OutputValue"] for one in made["Outputs"]}


KEYS = ("bundles/0123/sourcedir.tar.gz", "runs/digits-1/output/output.tar.gz")


@pytest.mark.aws
def test_the_stack_on_moto(stack):
    """Only what moto really makes: no lifecycle, public access, route, egress or budget."""
    assert re.fullmatch(r"arn:aws:iam::\d+:role/training-execution", stack["RoleArn"])
    iam, s3, network = (boto3.client(name, REGION) for name in ("iam", "s3", "ec2"))
    role = iam.get_role(RoleName="training-execution")["Role"]
    (trust,) = _statements(role["AssumeRolePolicyDocument"])
    assert trust["Principal"] == {"Service": "sagemaker.amazonaws.com"}
    policy = iam.get_role_policy(RoleName="training-execution", PolicyName="training")
    rights = {one["Sid"]: one for one in _statements(policy["PolicyDocument"])}
    assert rights["Objects"]["Resource"] == "arn:aws:s3:::my-training-bucket/*"
    allowed = [one for one in rights.values() if one["Effect"] == "Allow"]
    actions = [action for one in allowed for action in _list(one["Action"])]
    assert not [action for action in actions if "*" in action]

    assert stack["BucketName"] == "my-training-bucket"
    encrypted = s3.get_bucket_encryption(Bucket="my-training-bucket")
    (rule,) = encrypted["ServerSideEncryptionConfiguration"]["Rules"]
    assert rule["ApplyServerSideEncryptionByDefault"]["SSEAlgorithm"] == "AES256"

    (subnet,) = network.describe_subnets(SubnetIds=[stack["SubnetId"]])["Subnets"]
    assert (subnet["AvailabilityZone"], subnet["MapPublicIpOnLaunch"]) == ("us-east-1a", False)
    (group,) = network.describe_security_groups(GroupIds=[stack["SecurityGroupId"]])[
        "SecurityGroups"
    ]
    ((own,),) = [one["UserIdGroupPairs"] for one in group["IpPermissions"]]
    assert own["GroupId"] == stack["SecurityGroupId"]
    (endpoint,) = network.describe_vpc_endpoints()["VpcEndpoints"]
    (table,) = network.describe_route_tables(RouteTableIds=endpoint["RouteTableIds"])["RouteTables"]
    assert table["VpcId"] == subnet["VpcId"]
    assert endpoint["ServiceName"] == "com.amazonaws.us-east-1.s3"


@pytest.mark.aws
def test_the_scheduler_may_only_delete_endpoints(stack):
    assert re.fullmatch(r"arn:aws:iam::\d+:role/training-scheduler", stack["SchedulerRoleArn"])
    iam = boto3.client("iam", REGION)
    role = iam.get_role(RoleName="training-scheduler")["Role"]
    (trust,) = _statements(role["AssumeRolePolicyDocument"])
    assert trust["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert set(trust["Condition"]["StringEquals"]) == {"aws:SourceAccount"}
    policy = iam.get_role_policy(RoleName="training-scheduler", PolicyName="endpoints")
    (right,) = _statements(policy["PolicyDocument"])
    assert right["Action"] == "sagemaker:DeleteEndpoint"
    assert right["Resource"].endswith(":endpoint/*")


@pytest.mark.aws
def test_the_end_of_the_stacks_own_jobs_is_mailed(answers, aws):
    """moto matches events, but sends no mail: a queue gets them here."""
    text = infra.files(infra.load(answers({"notify": True})))["stack.yaml"]
    formation, events, sns, sqs = (
        boto3.client(name, REGION) for name in ("cloudformation", "events", "sns", "sqs")
    )
    formation.create_stack(
        StackName="training", TemplateBody=text, Capabilities=["CAPABILITY_NAMED_IAM"]
    )
    (outputs,) = (one["Outputs"] for one in formation.describe_stacks()["Stacks"])
    role = next(one["OutputValue"] for one in outputs if one["OutputKey"] == "RoleArn")
    (topic,) = sns.list_topics()["Topics"]
    (subscription,) = sns.list_subscriptions()["Subscriptions"]
    assert (subscription["Protocol"], subscription["Endpoint"]) == ("email", "me@example.com")
    (target,) = events.list_targets_by_rule(Rule="training-runs")["Targets"]
    assert target["Arn"] == topic["TopicArn"]
    mail = target["InputTransformer"]

    queue = sqs.create_queue(QueueName="mail")["QueueUrl"]
    attributes = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])
    arn = attributes["Attributes"]["QueueArn"]
    events.remove_targets(Rule="training-runs", Ids=["mail"])
    events.put_targets(Rule="training-runs", Targets=[{"Id": "queue", "Arn": arn}])
    kind = {"Source": "aws.sagemaker", "DetailType": "SageMaker Training Job State Change"}
    jobs = [
        ("fails", "Failed", "Failed", role),
        ("lasts", "Stopped", "MaxRuntimeExceeded", role),
        ("works", "Completed", "Completed", role),
        ("stalls", "InProgress", "Training", role),
        ("spot", "InProgress", "Interrupted", role),
        ("other", "Failed", "Failed", f"{role}2"),
    ]
    keys = ("TrainingJobName", "TrainingJobStatus", "SecondaryStatus", "RoleArn")
    details = [dict(zip(keys, job, strict=True)) for job in jobs]
    details[0]["FailureReason"] = 'AlgorithmError: ExitCode 1 ErrorMessage "ValueError: no"'
    events.put_events(Entries=[{**kind, "Detail": json.dumps(one)} for one in details])
    messages = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10)["Messages"]
    texts = [_mailed(mail, json.loads(one["Body"])) for one in messages]
    assert sorted(texts) == [
        f"fails: Failed (Failed). {details[0]['FailureReason']}\nNext: deploykit status fails",
        "lasts: Stopped (MaxRuntimeExceeded). \nNext: deploykit status lasts",
        "works: Completed (Completed). \nNext: deploykit status works",
    ]


def _mailed(transformer, event):
    """The text that EventBridge makes of an event: each line of the template is a JSON string.

    https://docs.aws.amazon.com/eventbridge/latest/userguide/eb-transform-target-input.html
    """
    values = {
        name: event["detail"].get(path.removeprefix("$.detail."), "")
        for name, path in transformer["InputPathsMap"].items()
    }
    lines = [json.loads(line) for line in transformer["InputTemplate"].split("\n")]
    return "\n".join(re.sub("<(.*?)>", lambda name: values[name[1]], line) for line in lines)


@pytest.mark.aws
def test_a_job_cannot_replace_the_source_of_another(stack, enforced, monkeypatch):
    """A program of one job, with the role's rights, plants an archive for the next one."""
    iam, s3 = boto3.client("iam", REGION), boto3.client("s3", REGION)
    bundle, result = ({"Bucket": "my-training-bucket", "Key": f"deploykit/{key}"} for key in KEYS)
    s3.put_object(**bundle, Body=b"good")
    policy = iam.get_role_policy(RoleName="training-execution", PolicyName="training")
    rights = _statements(policy["PolicyDocument"])
    rights = [one for one in rights if one["Sid"] != "OwnBucketOnly"]  # moto reads no condition
    iam.create_user(UserName="job")
    document = json.dumps({"Version": "2012-10-17", "Statement": rights})
    iam.put_user_policy(UserName="job", PolicyName="training", PolicyDocument=document)
    key = iam.create_access_key(UserName="job")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    enforced()
    s3 = boto3.session.Session().client("s3", REGION)
    for attack in (
        lambda: s3.put_object(**bundle, Body=b"evil"),
        lambda: s3.delete_object(**bundle),
    ):
        with pytest.raises(ClientError, match="AccessDenied"):
            attack()
    assert s3.get_object(**bundle)["Body"].read() == b"good"
    s3.put_object(**result, Body=b"weights")


def _statements(document):
    """moto gives some documents as text: Python's, which YAML is too."""
    return (yaml.safe_load(document) if isinstance(document, str) else document)["Statement"]


def _list(value):
    return value if isinstance(value, list) else [value]
