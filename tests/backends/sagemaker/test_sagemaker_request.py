"""The rendered request, the problems that `check` finds, and that planning imports no SDK."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker import rules as oracle
from deploykit.backends.sagemaker.options import METRICS, InstanceGroup
from deploykit.bundle import archive as bundles
from deploykit.bundle import node_plane
from deploykit.cli import main as cli
from deploykit.job.model import Entrypoint
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle
from tests.aws_server import SECTION


def problems(job, options):
    return {(problem.path, problem.severity) for problem in sagemaker.check(job, options)}


NO_PATCHES = ("sagemaker.framework_version", "warning")
"""AWS no longer patches the images that `framework_version` selects."""


def test_a_valid_job_has_no_problems(vary):
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:99.0.0-gpu-py399"
    assert problems(*vary(framework_version=None, image_uri=image)) == set()
    assert problems(*vary()) == {NO_PATCHES}


def test_the_plan_is_the_request(planned, bundle):
    plan = planned(env={"A": "b"}, nodes=2)
    request = json.loads(plan.text)
    assert plan.text == json.dumps(request, indent=2) + "\n"
    assert (plan.target, plan.language, plan.run) == ("us-east-1", "json", "digits-1")
    assert plan.output == "s3://my-bucket/deploykit/runs/digits-1/output/output.tar.gz"
    assert request["TrainingJobName"] == "digits-1"
    assert request["ResourceConfig"]["InstanceCount"] == 2
    assert request["StoppingCondition"] == {"MaxRuntimeInSeconds": 1800}
    assert request["Environment"]["A"] == "b"
    assert request["Environment"]["DEPLOYKIT_OUTPUT_DIR"] == "/opt/ml/output/data"
    hyperparameters = {
        name: json.loads(value) for name, value in request["HyperParameters"].items()
    }
    assert hyperparameters["sagemaker_program"] == ".deploykit/launch.py"
    assert bundle.hash in hyperparameters["sagemaker_submit_directory"]
    assert hyperparameters["sagemaker_mpi_num_of_processes_per_host"] == 2
    assert json.loads(hyperparameters["deploykit_argv_0"]) == [
        *("torchrun", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=0", "--"),
        *("train.py", "--epochs", "5"),
    ]


def test_a_request_names_no_metrics_of_deploykits_trainer_unless_asked(planned):
    algorithm = json.loads(planned().text)["AlgorithmSpecification"]
    assert "MetricDefinitions" not in algorithm
    asked = json.loads(planned(metrics="deploykit").text)["AlgorithmSpecification"]
    assert [each["Name"] for each in asked["MetricDefinitions"]] == list(METRICS)


@pytest.mark.parametrize(
    ("changes", "machines"),
    [
        ({}, "2 x ml.g5.12xlarge"),
        ({"spot": True, "max_wait": 3600}, "2 x ml.g5.12xlarge, spot"),
        (
            {
                "instance_type": None,
                "instance_groups": (
                    InstanceGroup("gpu", "ml.g5.12xlarge", 2),
                    InstanceGroup("data", "ml.c5.xlarge", 1),
                ),
                "distribution_group": "gpu",
                "distribution": "mpi",
            },
            "2 x ml.g5.12xlarge + 1 x ml.c5.xlarge",
        ),
    ],
)
def test_the_plan_says_in_one_line_what_runs_and_in_which_account(planned, changes, machines):
    role = "arn:aws:iam::123456789012:role/teams/vision/training"
    said = planned(role=role, **changes).summary
    assert said == f"sagemaker: {machines}, role training of account 123456789012, us-east-1"


def test_submit_says_it_before_it_asks_aws(project, capsys, monkeypatch):
    """Nothing answers at the endpoint, so the line was printed before anything was sent."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    line = "sagemaker: 1 x ml.g5.xlarge, role training of account 123456789012, us-east-1"
    assert cli.main(["submit", "-b", "sagemaker", "--dry-run"]) == 0
    assert line not in capsys.readouterr().err
    assert cli.main(["submit", "-b", "sagemaker"]) != 0
    said = capsys.readouterr().err
    assert said.index(line) < said.index("error: cannot reach AWS")


def test_overwritten_variables_are_sent_a_second_time(planned):
    env = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "FI_PROVIDER": "efa", "OTHER": "x"}
    sent = json.loads(planned(env=env).text)["Environment"]
    assert json.loads(sent["DEPLOYKIT_ENV"]) == {k: v for k, v in env.items() if k != "OTHER"}


def test_a_secret_stays_a_reference_and_is_not_sent_a_second_time(planned):
    sent = json.loads(planned(env={"NCCL_KEY": "secret:ssm:/a/b"}).text)["Environment"]
    assert json.loads(sent["DEPLOYKIT_SECRETS"]) == {"NCCL_KEY": "secret:ssm:/a/b"}
    assert "NCCL_KEY" not in sent
    assert "DEPLOYKIT_ENV" not in sent


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=20))
def test_the_argument_vector_is_exact_and_safe_in_a_shell(argv):
    chunks = rendering.argument_vector(argv).values()
    assert json.loads("".join(chunks)) == argv
    assert all(len(json.dumps(chunk)) <= 2500 and len(chunk) <= 2000 for chunk in chunks)
    assert set("".join(chunks)) <= rendering._SAFE | set('"[]\\')


def test_long_arguments_are_split_into_chunks():
    argv = ["word $HOME" * 300, '"' * 900, "", "-m"]
    chunks = rendering.argument_vector(argv)
    assert list(chunks) == [f"deploykit_argv_{number}" for number in range(len(chunks))]
    assert len(chunks) > 3
    assert json.loads("".join(chunks.values())) == argv


def test_a_shell_does_not_interpret_the_chunks(tmp_path):
    """Toolkits up to 5.1.1 put every hyperparameter on a command line; most images have one."""
    canary = tmp_path / "canary"
    argv = [f"$(touch {canary})", f"`touch {canary}`", f"; touch {canary} #", f"' & touch {canary}"]
    argv += ["\\", '"', "~", "{a,b}", "> x", "\n", "!x", "*", "x" * 3000]
    words = ["true"]
    for name, chunk in sorted(rendering.argument_vector(argv).items()):
        words += [f"--{name}", chunk]
    ran = subprocess.run(
        " ".join(words), shell=True, cwd=tmp_path, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert list(tmp_path.iterdir()) == []


PROBLEMS = {
    "six security groups": (
        {"subnets": ("subnet-1",), "security_group_ids": tuple(f"sg-{n}" for n in range(6))},
        ("sagemaker.security_group_ids", "error"),
    ),
    "six instance groups": (
        {
            "distribution": "mpi",
            "instance_type": None,
            "instance_groups": tuple(InstanceGroup(f"g{n}", "ml.g5.xlarge", 2) for n in range(6)),
            "distribution_group": "g0",
        },
        ("sagemaker.instance_groups", "error"),
    ),
    "line break in a location": ({"output": "s3://b-b/a\nb"}, ("output", "error")),
    "instance type that does not exist": (
        {"instance_type": "ml.g5.13xlarge"},
        ("sagemaker.instance_type", "error"),
    ),
    "long variable": ({"env": {"LONG": "x" * 513}}, ("env.LONG", "error")),
    "a hundred variables": ({"env": {f"V{n}": "" for n in range(100)}}, ("env", "error")),
    "many secrets": (
        {"env": {f"SECRET_{n}": f"secret:ssm:/team/project/{n}" for n in range(15)}},
        ("env", "error"),
    ),
    "twenty-one channels": (
        {"data": {f"c{n}": "s3://b-b/c" for n in range(21)}},
        ("data", "error"),
    ),
    "forty-one metrics": (
        {"metric_definitions": {f"m{n}": "(.)" for n in range(41)}},
        ("sagemaker.metric_definitions", "error"),
    ),
    "no region": ({"region": None}, ("sagemaker.region", "error")),
}
"""Violations of the service's description. The oracle's rules are in test_sagemaker_oracle.py."""


@pytest.mark.parametrize(("changes", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_check_reports_what_the_service_would_refuse(vary, changes, problem):
    assert problem in problems(*vary(**changes))


@pytest.mark.parametrize(
    "setting", ["volume_size: 0", "framework_version: 1.0.0", "tags: {'!': a}"]
)
def test_a_job_with_errors_is_not_planned(project, monkeypatch, setting):
    """`plan` does not check: it relies on the lifecycle, which checks before it plans."""
    monkeypatch.setattr(sagemaker, "plan", lambda *_, **__: pytest.fail("was planned"))
    with (project / "job.yaml").open("a") as file:
        file.write(f"{SECTION}  {setting}\n")
    with pytest.raises(JobFileError) as caught:
        lifecycle.prepare(Path("job.yaml"), [], "sagemaker", None)
    assert caught.value.problems


def test_check_and_plan_agree_for_the_longest_run_id(planned):
    """`check` validates a request with placeholders; one for any run must be as valid."""
    for run in ("a", "r" * 63):
        assert oracle.request_problems(json.loads(planned(run).text)) == []


def test_the_nearest_instance_type_is_suggested(vary):
    _, problem = sagemaker.check(*vary(instance_type="ml.g5.12xlarg"))
    assert problem.hint == "did you mean 'ml.g5.12xlarge'?"


def test_setup_py_is_refused_with_torchrun(vary, source):
    (source / "setup.py").write_text("")
    job, options = vary()
    with pytest.raises(JobFileError) as caught:
        sagemaker.plan(job, options, run="digits-1", bundle=bundles.scan(source, 10**6))
    assert [problem.path for problem in caught.value.problems] == ["source"]


def test_the_region_defaults_to_the_environment(vary, monkeypatch):
    job, options = vary(region=None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert problems(job, options) == {NO_PATCHES}


def test_an_invalid_region_in_the_environment_is_refused(vary, monkeypatch):
    job, options = vary(region=None, image_uri="public.ecr.aws/a/b:c", framework_version=None)
    monkeypatch.setenv("AWS_REGION", "us-east-1; true")
    assert problems(job, options) == {("sagemaker.region", "error")}


def test_planning_imports_no_sdk():
    code = (
        "import sys, types\n"
        "from deploykit.backends import sagemaker\n"
        "from deploykit.job.model import *\n"
        "job = JobSpec('a', Entrypoint(script='t.py'), Resources(time_limit=60))\n"
        "options = sagemaker.Options('arn:aws:iam::123456789012:role/r', 'b-b', 'ml.g5.xlarge',"
        " region='us-east-1', framework_version='2.8.0')\n"
        "bundle = types.SimpleNamespace(hash='0' * 64, entries=())\n"
        "assert all(p.severity == 'warning' for p in sagemaker.check(job, options))\n"
        "print(sagemaker.plan(job, options, run='a-1', bundle=bundle).target)\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(loaded & {'boto3', 'botocore', 'sagemaker', 'urllib3', 'torch', 'submitit'})\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n") == ["us-east-1", "set()", ""]


def test_the_node_plane_reads_what_the_request_sends():
    sources = b"".join(node_plane.node_plane().values())
    assert rendering.ARGUMENT.encode() in sources
    assert b"DEPLOYKIT_ENV" in sources


@pytest.mark.torch
@pytest.mark.quick
def test_the_default_metrics_match_what_the_trainer_prints():
    """Fills numbers into the format of each line that the trainer's source prints."""
    import train
    from trainer.metrics import in_words

    words = {
        "{epoch}": "3",
        "{in_words(self.validation)}": in_words({"loss": 0.1234, "accuracy": 0.95}),
        "{name} {words}": f"test {in_words({'accuracy': 0.94})}",
    }
    lines = re.findall(r'log\(f"([^"]*)"\)', Path(train.__file__).read_text())
    for shown, filled in words.items():
        lines = [line.replace(shown, filled) for line in lines]
    values = {
        name: [match[1] for line in lines if (match := re.search(regex, line))]
        for name, regex in METRICS.items()
    }
    assert values == {
        "validation:loss": ["0.1234"],
        "validation:accuracy": ["0.9500"],
        "test:accuracy": ["0.9400"],
    }


def test_a_script_that_starts_its_own_processes_has_no_launcher_of_aws(vary, planned):
    entry = Entrypoint(script="train.py", launcher="python")
    assert problems(*vary(entrypoint=entry, processes_per_node=1, gpus_per_node=4)) == {NO_PATCHES}
    request = json.loads(planned(entrypoint=entry, nodes=2, processes_per_node=1).text)
    words = {name: json.loads(value) for name, value in request["HyperParameters"].items()}
    assert json.loads(words["deploykit_argv_0"]) == ["python", "--nnodes=2", "--", "train.py"]
    assert not [name for name in words if name.endswith("_enabled")]


def test_a_launcher_of_aws_beside_one_of_the_script_is_refused(vary):
    entry = Entrypoint(script="train.py", launcher="python")
    changes = {"entrypoint": entry, "processes_per_node": 1, "preflight": True}
    found = problems(*vary(**changes, distribution="mpi"))
    assert {("sagemaker.distribution", "error"), ("preflight", "error")} <= found
