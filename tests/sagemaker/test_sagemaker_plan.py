"""The request: what stands in it, what is refused before, and that planning asks nobody."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploykit import bundle as bundles
from deploykit import contract
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker.options import METRICS
from deploykit.backends.sagemaker.sections import InstanceGroup
from deploykit.errors import JobFileError


def found(job, options):
    return {(problem.path, problem.severity) for problem in sagemaker.check(job, options)}


NO_PATCHES = ("sagemaker.framework_version", "warning")
"""AWS's images that `framework_version` reaches get no patches any more."""


def test_good_job_has_no_problem(vary):
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:99.0.0-gpu-py399"
    assert found(*vary(framework_version=None, image_uri=image)) == set()
    assert found(*vary()) == {NO_PATCHES}


def test_request_of_a_small_job(planned, bundle):
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


def test_variables_that_the_container_overwrites_travel_twice(planned):
    env = {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "FI_PROVIDER": "efa", "OTHER": "x"}
    sent = json.loads(planned(env=env).text)["Environment"]
    assert json.loads(sent["DEPLOYKIT_ENV"]) == {k: v for k, v in env.items() if k != "OTHER"}


def test_secret_stays_a_reference_and_out_of_the_second_copy(planned):
    sent = json.loads(planned(env={"NCCL_KEY": "secret:ssm:/a/b"}).text)["Environment"]
    assert json.loads(sent["DEPLOYKIT_SECRETS"]) == {"NCCL_KEY": "secret:ssm:/a/b"}
    assert "NCCL_KEY" not in sent
    assert "DEPLOYKIT_ENV" not in sent


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=20))
def test_argument_vector_survives_and_no_shell_would_act_on_it(argv):
    pieces = rendering.pieces(argv)
    assert json.loads("".join(pieces.values())) == argv
    assert all(len(json.dumps(piece)) <= 2500 and len(piece) <= 2000 for piece in pieces.values())
    assert set("".join(pieces.values())) <= rendering._SAFE | set('"[]\\')


def test_long_arguments_are_cut_into_pieces():
    argv = ["word $HOME" * 300, '"' * 900, "", "-m"]
    pieces = rendering.pieces(argv)
    assert list(pieces) == [f"deploykit_argv_{number}" for number in range(len(pieces))]
    assert len(pieces) > 3
    assert json.loads("".join(pieces.values())) == argv


def test_a_shell_that_joins_the_pieces_runs_nothing(tmp_path):
    """Toolkits up to 5.1.1 do that with every hyperparameter; most images hold one of them."""
    canary = tmp_path / "canary"
    argv = [f"$(touch {canary})", f"`touch {canary}`", f"; touch {canary} #", f"' & touch {canary}"]
    argv += ["\\", '"', "~", "{a,b}", "> x", "\n", "!x", "*", "x" * 3000]
    words = ["true"]
    for name, piece in sorted(rendering.pieces(argv).items()):
        words += [f"--{name}", piece]
    ran = subprocess.run(
        " ".join(words), shell=True, cwd=tmp_path, capture_output=True, check=False
    )
    assert (ran.returncode, ran.stderr) == (0, b"")
    assert list(tmp_path.iterdir()) == []


PROBLEMS = {
    "six groups": (
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
    "line end in a place": ({"output": "s3://b-b/a\nb"}, ("output", "error")),
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
"""What the service's own description says. What settings do is in test_sagemaker_oracle.py."""


@pytest.mark.parametrize(("changes", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_problem_is_named(vary, changes, problem):
    assert problem in found(*vary(**changes))


@pytest.mark.parametrize(
    "changes",
    [changes for changes, (_, severity) in PROBLEMS.values() if severity == "error"],
    ids=[name for name, (_, (_, severity)) in PROBLEMS.items() if severity == "error"],
)
def test_no_plan_is_made_of_a_wrong_job(planned, changes, monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)
    with pytest.raises(JobFileError) as caught:
        planned(**changes)
    assert caught.value.problems


def test_nearest_instance_type_is_suggested(vary):
    _, problem = sagemaker.check(*vary(instance_type="ml.g5.12xlarg"))
    assert problem.hint == "did you mean 'ml.g5.12xlarge'?"


def test_setup_py_is_refused_where_the_container_would_install_it(vary, source):
    (source / "setup.py").write_text("")
    job, options = vary()
    with pytest.raises(JobFileError) as caught:
        sagemaker.plan(job, options, run="digits-1", bundle=bundles.scan(source, 10**6))
    assert [problem.path for problem in caught.value.problems] == ["source"]


def test_region_comes_from_the_environment(vary, monkeypatch):
    job, options = vary(region=None)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    assert found(job, options) == {NO_PATCHES}


def test_region_of_the_environment_must_be_one(vary, monkeypatch):
    job, options = vary(region=None, image_uri="a/b:c", framework_version=None)
    monkeypatch.setenv("AWS_REGION", "us-east-1; true")
    assert found(job, options) == {("sagemaker.region", "error")}


def test_backend_and_plan_import_no_sdk():
    code = (
        "import sys, types\n"
        "from deploykit.backends import sagemaker\n"
        "from deploykit.model import *\n"
        "job = JobSpec('a', Entrypoint(script='t.py'), Resources(time_limit=60))\n"
        "options = sagemaker.Options('arn:aws:iam::123456789012:role/r', 'b-b', 'ml.g5.xlarge',"
        " region='us-east-1', framework_version='2.8.0')\n"
        "bundle = types.SimpleNamespace(hash='0' * 64, entries=())\n"
        "assert all(p.severity == 'warning' for p in sagemaker.check(job, options))\n"
        "print(sagemaker.plan(job, options, run='a-1', bundle=bundle).place)\n"
        "loaded = {name.split('.')[0] for name in sys.modules}\n"
        "print(loaded & {'boto3', 'botocore', 'sagemaker', 'urllib3', 'torch', 'submitit'})\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split("\n") == ["us-east-1", "set()", ""]


def test_node_plane_knows_the_name_of_the_pieces():
    sources = b"".join(contract.node_plane().values())
    assert rendering.ARGUMENT.encode() in sources
    assert b"DEPLOYKIT_ENV" in sources


def test_the_usual_metrics_are_what_our_trainer_prints():
    """Each format of a line in the trainer's source, with numbers in its places."""
    source = (Path(__file__).parents[2] / "entrypoints/train.py").read_text()
    lines = [
        re.sub(r"\{epoch\}", "3", line).replace("{loss:.4f}", "0.1234")
        for line in re.findall(r'log\(f"([^"]*)"\)', source)
    ]
    lines = [line.replace("{accuracy:.4f}", "0.9500").replace("{name}", "test") for line in lines]
    lines = [line.replace("{value:.4f}", "0.9400") for line in lines]
    found = {
        name: [match[1] for line in lines if (match := re.search(regex, line))]
        for name, regex in METRICS.items()
    }
    assert found == {
        "validation:loss": ["0.1234"],
        "validation:accuracy": ["0.9500"],
        "test:accuracy": ["0.9400"],
    }
