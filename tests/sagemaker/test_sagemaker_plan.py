"""The request: what stands in it, what is refused before, and that planning asks nobody."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploykit import bundle as bundles
from deploykit import contract
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import request as rendering
from deploykit.errors import JobFileError


def found(job, options):
    return {(problem.path, problem.severity) for problem in sagemaker.check(job, options)}


def test_good_job_has_no_problem(vary):
    assert found(*vary()) == set()


def test_request_of_a_small_job(planned, bundle):
    plan = planned(env={"A": "b"}, nodes=2)
    request = json.loads(plan.text)
    assert plan.text == json.dumps(request, indent=2) + "\n"
    assert (plan.place, plan.language, plan.run) == ("us-east-1", "json", "digits-1")
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
    "pytorchddp is something else": (
        {
            "distribution": "pytorchddp",
            "framework_version": "2.2.0",
            "instance_type": "ml.p4d.24xlarge",
        },
        ("sagemaker.distribution", "warning"),
    ),
    "pytorchddp with a late version": (
        {"distribution": "pytorchddp", "instance_type": "ml.p4d.24xlarge"},
        ("sagemaker.framework_version", "error"),
    ),
    "smdistributed with a late version": (
        {"distribution": "smdistributed", "instance_type": "ml.p4d.24xlarge"},
        ("sagemaker.framework_version", "error"),
    ),
    "smdistributed on other GPUs": (
        {"distribution": "smdistributed", "framework_version": "2.2.0"},
        ("sagemaker.instance_type", "warning"),
    ),
    "smdistributed on p5": (
        {
            "distribution": "smdistributed",
            "framework_version": "2.2.0",
            "instance_type": "ml.p5.48xlarge",
        },
        ("sagemaker.instance_type", "error"),
    ),
    "smdistributed without GPUs": (
        {
            "distribution": "smdistributed",
            "framework_version": "2.2.0",
            "instance_type": "ml.m5.xlarge",
        },
        ("sagemaker.instance_type", "error"),
    ),
    "torchrun without GPUs and image": (
        {"instance_type": "ml.m5.xlarge"},
        ("sagemaker.instance_type", "error"),
    ),
    "torchrun with 2.4.0": (
        {"framework_version": "2.4.0"},
        ("sagemaker.framework_version", "error"),
    ),
    "version without an image": (
        {"framework_version": "2.10.0"},
        ("sagemaker.framework_version", "error"),
    ),
    "wrong Python": ({"py_version": "py39"}, ("sagemaker.py_version", "error")),
    "no container": ({"framework_version": None}, ("sagemaker.framework_version", "error")),
    "two containers": ({"image_uri": "a/b:c"}, ("sagemaker.image_uri", "error")),
    "Trainium without an image": (
        {"instance_type": "ml.trn1.32xlarge"},
        ("sagemaker.instance_type", "error"),
    ),
    "none with many ranks": ({"distribution": "none"}, ("sagemaker.distribution", "error")),
    "spot without max_wait": (
        {"spot": True, "checkpoints": "s3://b-b/c"},
        ("sagemaker.max_wait", "error"),
    ),
    "spot with a short max_wait": (
        {"spot": True, "max_wait": 1799, "checkpoints": "s3://b-b/c"},
        ("sagemaker.max_wait", "error"),
    ),
    "max_wait without spot": ({"max_wait": 3600}, ("sagemaker.max_wait", "error")),
    "spot without checkpoints": ({"spot": True, "max_wait": 1800}, ("checkpoints", "warning")),
    "retries without checkpoints": ({"retries": 1}, ("checkpoints", "warning")),
    "retries are the service's": (
        {"retries": 1, "checkpoints": "s3://b-b/c"},
        ("retries", "warning"),
    ),
    "spot and warm pool": (
        {"spot": True, "max_wait": 1800, "keep_alive": 60, "checkpoints": "s3://b-b/c"},
        ("sagemaker.keep_alive", "error"),
    ),
    "long warm pool": ({"keep_alive": 3601}, ("sagemaker.keep_alive", "error")),
    "subnets alone": ({"subnets": ("subnet-1",)}, ("sagemaker.security_group_ids", "error")),
    "groups alone": ({"security_group_ids": ("sg-1",)}, ("sagemaker.subnets", "error")),
    "six groups": (
        {"subnets": ("subnet-1",), "security_group_ids": tuple(f"sg-{n}" for n in range(6))},
        ("sagemaker.security_group_ids", "error"),
    ),
    "encryption on one machine": (
        {"nodes": 1, "encrypt_inter_container_traffic": True},
        ("sagemaker.encrypt_inter_container_traffic", "warning"),
    ),
    "secret of this machine": ({"env": {"TOKEN": "secret:env:TOKEN"}}, ("env.TOKEN", "error")),
    "local data": ({"data": {"train": "/data"}}, ("data.train", "error")),
    "local output": ({"output": "/out"}, ("output", "error")),
    "local checkpoints": ({"checkpoints": "/out"}, ("checkpoints", "error")),
    "line end in a place": ({"output": "s3://b-b/a\nb"}, ("output", "error")),
    "29 days": ({"time_limit": 29 * 86400}, ("resources.time_limit", "error")),
    "endless arguments": ({"args": ["x" * 60_000]}, ("entrypoint.args", "error")),
    "GPUs on a CPU type": (
        {
            "gpus_per_node": 1,
            "instance_type": "ml.m5.xlarge",
            "image_uri": "a/b:c",
            "framework_version": None,
        },
        ("sagemaker.instance_type", "error"),
    ),
    "memory": ({"memory": 1}, ("resources.memory", "warning")),
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
    "region without images": ({"region": "eusc-de-east-1"}, ("sagemaker.region", "error")),
    "no region": ({"region": None}, ("sagemaker.region", "error")),
}


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
    (problem,) = sagemaker.check(*vary(instance_type="ml.g5.12xlarg"))
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
    assert found(job, options) == set()


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
        "options = sagemaker.Options('arn:aws:iam::123456789012:role/r', 'ml.g5.xlarge', 'b-b',"
        " region='us-east-1', framework_version='2.8.0')\n"
        "bundle = types.SimpleNamespace(hash='0' * 64, entries=())\n"
        "assert not list(sagemaker.check(job, options))\n"
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
