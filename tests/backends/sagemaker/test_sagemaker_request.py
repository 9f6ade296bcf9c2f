"""The rendered request, what each setting changes in it, and the problems that `check` finds.

`UPDATE_GOLDEN=1 pytest tests/backends/sagemaker/test_sagemaker_request.py -k every_setting`
rewrites golden/requests.json: the request of a job without settings, and for each setting the
values that differ from it, by their path; null for what is gone. `test_sagemaker_sdk.py` compares
requests with those of the SDK, which takes minutes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import estimator as sdk
from deploykit.backends.sagemaker import request as rendering
from deploykit.backends.sagemaker import rules as oracle
from deploykit.backends.sagemaker.options import (
    METRICS,
    Channel,
    InstanceGroup,
    InstancePreference,
    ModelParallel,
)
from deploykit.bundle import archive as bundles
from deploykit.bundle import node_plane
from deploykit.cli import main as cli
from deploykit.job.model import Entrypoint, InputChannel
from deploykit.lib.errors import JobFileError, UsageError
from deploykit.run import lifecycle
from tests.aws_server import SECTION
from tests.backends.sagemaker.sagemaker_jobs import vary


def problems(job, options):
    return {(problem.path, problem.severity) for problem in sagemaker.check(job, options)}


NO_PATCHES = ("sagemaker.framework_version", "warning")
"""AWS no longer patches the images that `framework_version` selects."""


def test_a_valid_job_has_no_problems(vary):
    image = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training:99.0.0-gpu-py399"
    assert problems(*vary(framework_version=None, image_uri=image)) == set()
    assert problems(*vary()) == {NO_PATCHES}


def test_the_plan_is_the_request(planned, bundle):
    plan = planned()
    request = json.loads(plan.text)
    assert plan.text == json.dumps(request, indent=2) + "\n"
    assert request == rendering.render(plan.job, plan.options, run=plan.run, bundle=bundle.hash)
    assert (plan.target, plan.language, plan.run) == ("us-east-1", "json", "digits-1")
    assert plan.output == "s3://my-bucket/deploykit/runs/digits-1/output/output.tar.gz"


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
    assert said == f"sagemaker: {machines}, role training in account 123456789012, us-east-1"


def test_submit_says_it_before_it_asks_aws(project, capsys, monkeypatch):
    """Nothing answers at the endpoint, so the line was printed before anything was sent."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    line = "sagemaker: 1 x ml.g5.xlarge, role training in account 123456789012, us-east-1"
    assert cli.main(["submit", "-b", "sagemaker", "--dry-run"]) == 0
    assert line not in capsys.readouterr().err
    assert cli.main(["submit", "-b", "sagemaker"]) != 0
    said = capsys.readouterr().err
    assert said.index(line) < said.index("error: cannot reach AWS")


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=40), max_size=20))
def test_the_argument_vector_is_exact_and_safe_in_a_shell(argv):
    chunks = rendering.argument_vector(argv).values()
    assert json.loads("".join(chunks)) == argv
    assert all(len(json.dumps(chunk)) <= 2500 and len(chunk) <= 2000 for chunk in chunks)
    assert set("".join(chunks)) <= rendering._SAFE | set('"[]\\')


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
    "a short wait for instances": (
        {"max_pending": 600},
        ("sagemaker.max_pending", "error"),
    ),
    "six preferred types": (
        {
            "instance_type": None,
            "instance_preferences": tuple(
                InstancePreference(f"ml.g5.{size}xlarge") for size in (2, 4, 8, 12, 16, 24)
            ),
        },
        ("sagemaker.instance_preferences", "error"),
    ),
    "an unknown preferred type": (
        {"instance_type": None, "instance_preferences": (InstancePreference("ml.g5.13xlarge"),)},
        ("sagemaker.instance_preferences", "error"),
    ),
    "a channel that the nodes would copy": (
        {"data": {"train": InputChannel("s3://b-b/c", "shard")}},
        ("data.train.stage", "error"),
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


@pytest.mark.parametrize(
    ("name", "region", "found"),
    [
        ("AWS_DEFAULT_REGION", "eu-west-1", set()),
        ("AWS_REGION", "us-east-1; true", {("sagemaker.region", "error")}),
    ],
)
def test_the_region_defaults_to_the_environment(vary, monkeypatch, name, region, found):
    job, options = vary(region=None, image_uri="public.ecr.aws/a/b:c", framework_version=None)
    monkeypatch.setenv(name, region)
    assert problems(job, options) == found


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
        "heavy = {'boto3', 'botocore', 'email', 'sagemaker', 'submitit', 'torch', 'urllib3'}\n"
        "print(loaded & heavy)\n"
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


def test_a_script_that_starts_its_own_processes_has_no_launcher_of_aws(vary):
    entry = Entrypoint(script="train.py", launcher="python")
    assert problems(*vary(entrypoint=entry, processes_per_node=1, gpus_per_node=4)) == {NO_PATCHES}
    changes = {"entrypoint": entry, "processes_per_node": 1, "preflight": True}
    found = problems(*vary(**changes, distribution="mpi"))
    assert {("sagemaker.distribution", "error"), ("preflight", "error")} <= found


GOLDEN = Path(__file__).with_name("golden") / "requests.json"
HASH = "0123456789abcdef" * 4
PLAN = "arn:aws:sagemaker:us-east-1:123456789012:training-plan/ours"
KEY = "arn:aws:kms:us-east-1:123456789012:key/1234abcd-12ab-34cd-56ef-1234567890ab"
RUNS = "s3://my-bucket/deploykit/runs"
GROUPS = (InstanceGroup("gpu", "ml.g5.12xlarge", 2), InstanceGroup("data", "ml.c5.xlarge", 1))
TRAIN = {"train": "s3://b-b/train"}
SMP = {"distribution": "smdistributed.modelparallel"}
LUSTRE = {"file_system_id": "fs-1", "directory_path": "/fsx/a"}
EVERYTHING = Channel(
    s3_data_type="AugmentedManifestFile",
    s3_distribution="ShardedByS3Key",
    input_mode="Pipe",
    attribute_names=("source-ref", "label"),
    content_type="text/csv",
    compression="Gzip",
    record_wrapping="RecordIO",
    shuffle_seed=0,
    instance_groups=("gpu",),
)
SETTINGS = {
    "no launcher": {"distribution": "none"},
    "processes of the script's own": {
        "entrypoint": Entrypoint(script="train.py", launcher="python"),
        "distribution": "none",
        "processes_per_node": 1,
    },
    "variables that AWS's launchers overwrite, which are sent twice": {
        "env": {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4", "FI_PROVIDER": "efa", "OTHER": "x"}
    },
    "a secret, which stays a reference": {"env": {"NCCL_KEY": "secret:ssm:/a/b"}},
    "mpirun": {"distribution": "mpi", "mpi_options": "-x A=b"},
    "mpirun without options": {"distribution": "mpi"},
    "SMDDP": {"distribution": "smdistributed.dataparallel", "mpi_options": "--verbose"},
    "SMDDP by its old name": {"distribution": "pytorchddp"},
    "the model parallel library": {
        **SMP,
        "framework_version": "2.4.1",
        "model_parallel": ModelParallel(tensor_parallel_degree=2),
    },
    "the model parallel library without parameters": {**SMP, "image_uri": "a/b:c"},
    "groups of instances, of which one trains": {
        "distribution": "mpi",
        "instance_type": None,
        "instance_groups": GROUPS,
        "distribution_group": "gpu",
    },
    "groups of instances under torchrun": {"instance_type": None, "instance_groups": GROUPS[::-1]},
    "groups of instances without GPUs": {"instance_type": None, "instance_groups": GROUPS[1:]},
    "an image of one's own": {"image_uri": "a/b:c", "framework_version": None},
    "a Python version": {"framework_version": "2.2.0", "py_version": "py39"},
    "an image's entrypoint": {"image_entrypoint": ("bash", "start.sh")},
    "network isolation": {"network_isolation": True, "data": TRAIN},
    "data": {"data": TRAIN},
    "the trainer's metrics, one replaced": {
        "metrics": "deploykit",
        "metric_definitions": {"test:accuracy": "acc (.)", "f1": "f1 (.)"},
    },
    "a metric": {"metric_definitions": {"loss": "loss (.)"}},
    "spot": {"spot": True, "max_wait": 3600, "checkpoints": "s3://b-b/saved"},
    "a warm pool": {"keep_alive": 600},
    "a training plan": {"training_plan": "arn"},
    "an encrypted disk": {"volume_size": 1, "volume_kms_key": KEY},
    "encrypted results": {"output_kms_key": KEY},
    "results as files": {"output_compression": "none"},
    "results elsewhere": {"output": "s3://b-b/results"},
    "encrypted traffic": {"encrypt_inter_container_traffic": True},
    "a VPC": {"subnets": ("subnet-1",), "security_group_ids": ("sg-1", "sg-2")},
    "retries": {"retries": 3},
    "tags": {"tags": {"team": "a"}},
    "the profiler": {"profiler_interval": 500},
    "the debugger": {"debugger": True},
    "TensorBoard": {"tensorboard_output": "s3://b-b/board"},
    "a remote shell": {"remote_debug": True},
    "a channel with all settings": {"data": TRAIN, "channels": {"train": EVERYTHING}},
    "channels beside data": {
        "data": {**TRAIN, "test": "s3://b-b/test"},
        "channels": {"extra": Channel(s3="s3://b-b/extra"), "test": Channel(s3="s3://b-b/other")},
    },
    "a file system": {"channels": {"train": Channel(**LUSTRE)}},
    "a file system with a type": {
        "channels": {"train": Channel(**LUSTRE, content_type="text/csv")}
    },
}


def rendered(**changes):
    """The request, with the hyperparameters as the program reads them."""
    job, options = vary(**changes)
    request = rendering.render(job, options, run="digits-1", bundle=HASH)
    sent = request["HyperParameters"]
    return request | {"HyperParameters": {name: json.loads(text) for name, text in sent.items()}}


def differences(before, after):
    """The values that differ, by their path; None for what is gone."""
    different = {}
    for name in before | after:
        old, new = before.get(name), after.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            different |= {f"{name}.{path}": each for path, each in differences(old, new).items()}
        elif old != new:
            different[name] = new
    return different


@pytest.fixture(autouse=True)
def _no_region(monkeypatch):
    monkeypatch.delenv("AWS_REGION", raising=False)
    monkeypatch.delenv("AWS_DEFAULT_REGION", raising=False)


def test_every_setting_changes_its_part_of_the_request():
    plain = rendered()
    assert list(plain["Environment"]) == sorted(plain["Environment"])
    requests = {name: differences(plain, rendered(**changes)) for name, changes in SETTINGS.items()}
    requests = {"no settings": plain, **requests}
    if os.environ.get("UPDATE_GOLDEN"):
        text = json.dumps(requests, indent=1, ensure_ascii=False)
        GOLDEN.write_text(f"{text}\n", encoding="utf-8")
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))
    assert list(requests) == list(golden)
    for name, request in requests.items():
        assert request == golden[name], name


def test_a_region_of_the_environment_selects_the_image(monkeypatch):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    host = "763104351884.dkr.ecr.eu-west-1.amazonaws.com"
    assert differences(rendered(region="us-east-1"), rendered(region=None)) == {
        "AlgorithmSpecification.TrainingImage": f"{host}/pytorch-training:2.8.0-gpu-py312",
        "HyperParameters.sagemaker_region": "eu-west-1",
    }


@pytest.mark.parametrize(
    ("changes", "location"),
    [
        ({}, f"{RUNS}/digits-1/output/output.tar.gz"),
        ({"output": "s3://b-b/a/"}, "s3://b-b/a/digits-1/output/output.tar.gz"),
        ({"output_compression": "none"}, f"{RUNS}/digits-1/output/"),
    ],
)
def test_where_the_results_are(changes, location):
    assert rendering.results(rendered(**changes)) == location


@pytest.mark.parametrize(
    ("quotes", "sizes"),
    [(0, [2000, 400]), (498, [2000, 400]), (499, [1900, 500]), (1500, [1200, 1200])],
)
def test_a_chunk_is_within_the_services_limit_once_it_is_json(quotes, sizes):
    """2500 characters with the quotes around it; each quote in it takes two."""
    chunks = list(rendering._chunks('"' * quotes + "x" * (2400 - quotes)))
    assert [len(chunk) for chunk in chunks] == sizes
    assert max(len(json.dumps(chunk)) for chunk in chunks) <= 2500


MORE_FIELDS = {
    "AlgorithmSpecification": {
        "TrainingImageConfig": {"TrainingRepositoryAccessMode": "Vpc"},
    },
    "ExperimentConfig": {"ExperimentName": "vision", "TrialName": "first"},
    "SessionChainingConfig": {"EnableSessionTagChaining": True},
    "MlflowConfig": {"MlflowResourceArn": "arn:aws:sagemaker:us-east-1:123456789012:mlflow-app/a"},
    "DebugRuleConfigurations": [
        {"RuleConfigurationName": "loss", "RuleEvaluatorImage": "image", "VolumeSizeInGB": 1}
    ],
    "ProfilerRuleConfigurations": [{"RuleConfigurationName": "gpu", "RuleEvaluatorImage": "image"}],
    "ResourceConfig": {
        "InstancePlacementConfig": {
            "EnableMultipleJobs": True,
            "PlacementSpecifications": [{"UltraServerId": "ultra-1", "InstanceCount": 2}],
        }
    },
}


def test_fields_of_the_api_beyond_deploykits_keys_are_sent():
    job, options = vary(request=MORE_FIELDS)
    assert [one.message for one in sagemaker.check(job, options) if one.severity == "error"] == []
    plain = rendering.render(*vary(), run="digits-1", bundle="0" * 64)
    sent = rendering.render(job, options, run="digits-1", bundle="0" * 64)
    for name, value in MORE_FIELDS.items():
        if isinstance(value, dict):
            assert sent[name] == {**plain.get(name, {}), **value}
        else:
            assert sent[name] == value
    assert {name: sent[name] for name in plain if name not in MORE_FIELDS} == {
        name: value for name, value in plain.items() if name not in MORE_FIELDS
    }


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ({"StoppingCondition": {"MaxRuntimeInSeconds": 5}}, "use resources.time_limit"),
        ({"RoleArn": "other"}, "use sagemaker.role"),
        ({"Environment": {"A": "1"}}, "use env"),
        ({"CheckpointConfig": {"LocalPath": "/opt"}}, "use checkpoints"),
        ({"TrainingJobName": "mine"}, "use --run"),
        (
            {"AlgorithmSpecification": {"TrainingInputMode": "Pipe"}},
            "is set by deploykit to 'File'",
        ),
        ({"StopingCondition": {"A": 1}}, "is not supported by the installed botocore"),
        ({"StoppingCondition": {"MaxPendingTimeInSeconds": 7200}}, "use sagemaker.max_pending"),
        ({"InfraCheckConfig": {"EnableInfraCheck": True}}, "use sagemaker.infra_check"),
        (
            {"ResourceConfig": {"InstancePreferences": [{"InstanceType": "ml.g5.xlarge"}]}},
            "use sagemaker.instance_preferences",
        ),
        (
            {"AlgorithmSpecification": {"EnableSageMakerMetricsTimeSeries": False}},
            "use sagemaker.metrics_time_series",
        ),
        ({"ExperimentConfig": {"TrialName": 5}}, "Invalid type"),
        ({"ExperimentConfig": {"TrialName": ""}}, "the minimum is 1"),
        ({"DebugRuleConfigurations": [{"RuleEvaluatorImage": "x"}]}, "Missing required parameter"),
        ({"ExperimentConfig": {}}, "is empty"),
    ],
)
def test_fields_that_another_key_sets_or_the_api_refuses_are_problems(request_, message):
    found = [one.message for one in sagemaker.check(*vary(request=request_))]
    assert any(message in one for one in found), found


def test_the_sdk_cannot_send_more_fields():
    found = sagemaker.check(*vary(request={"ExperimentConfig": {"TrialName": "a"}}, sender="sdk"))
    hints = [one.hint for one in found if one.path == "sagemaker.request"]
    assert hints == ["remove it, or set sender: boto3"]


def test_an_estimator_refuses_fields_that_it_would_drop():
    with pytest.raises(UsageError, match=r"sagemaker\.request"):
        sdk.estimator(*vary(request={"ExperimentConfig": {"TrialName": "a"}}), {}, None, print)


def test_fields_are_read_from_a_job_file(project, capsys):
    more = """\
  request:
    SessionChainingConfig: {EnableSessionTagChaining: yes}
    ExperimentConfig: {TrialName: "5"}
"""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION + more)
    assert cli.main(["submit", "--backend", "sagemaker", "--dry-run", "--json"]) == 0
    plan = json.loads(json.loads(capsys.readouterr().out)["text"])
    assert plan["SessionChainingConfig"] == {"EnableSessionTagChaining": True}
    assert plan["ExperimentConfig"] == {"TrialName": "5"}


PREFERRED = (
    InstancePreference("ml.p5.48xlarge", PLAN),
    InstancePreference("ml.p4d.24xlarge"),
)


def test_preferred_types_are_sent_in_order_with_one_number_of_nodes():
    changes = {"instance_type": None, "instance_preferences": PREFERRED, "max_pending": 7200}
    job, options = vary(**changes)
    assert [one.message for one in sagemaker.check(job, options) if one.severity == "error"] == []
    sent = rendering.render(job, options, run="digits-1", bundle=HASH)
    assert sent["ResourceConfig"] == {
        "VolumeSizeInGB": 30,
        "InstanceCount": 2,
        "InstancePreferences": [
            {"InstanceType": "ml.p5.48xlarge", "TrainingPlanArns": [PLAN]},
            {"InstanceType": "ml.p4d.24xlarge"},
        ],
    }
    assert sent["StoppingCondition"]["MaxPendingTimeInSeconds"] == 7200


def test_every_preferred_type_must_suit_the_job(vary):
    """Which one the job gets is decided by AWS."""
    types = (InstancePreference("ml.g5.12xlarge"), InstancePreference("ml.g5.xlarge"))
    changes = {"instance_type": None, "instance_preferences": types, "gpus_per_node": 4}
    messages = [one.message for one in sagemaker.check(*vary(**changes))]
    assert "ml.g5.xlarge has 1 GPU(s), but the job requests 4 per node" in messages


def test_the_cost_of_preferred_types_is_that_of_the_most_expensive(vary):
    types = (InstancePreference("ml.g5.xlarge"), InstancePreference("ml.g5.12xlarge"))
    several = vary(instance_type=None, instance_preferences=types)
    assert sagemaker.cost(*several) == sagemaker.cost(*vary(instance_type="ml.g5.12xlarge"))


@pytest.mark.parametrize("key", ["instance_preferences", "max_pending"])
def test_keys_that_the_sdk_lacks_are_refused_with_it(key):
    value = {"instance_preferences": PREFERRED, "max_pending": 7200}[key]
    changes = {key: value} | ({"instance_type": None} if key == "instance_preferences" else {})
    job, options = vary(**changes, sender="sdk")
    found = {one.path: one.hint for one in sagemaker.check(job, options)}
    assert found[f"sagemaker.{key}"] == "remove it, or set sender: boto3"
    with pytest.raises(UsageError, match=f"no argument for sagemaker.{key}"):
        sdk.estimator(job, options, {}, None, print)


def test_health_check_and_history_of_metrics_are_sent_if_asked_for(vary):
    plain, asked = vary(), vary(infra_check=True, metrics_time_series=False)
    first, second = (
        rendering.render(*each, run="digits-1", bundle=HASH) for each in (plain, asked)
    )
    assert "InfraCheckConfig" not in first
    assert second["InfraCheckConfig"] == {"EnableInfraCheck": True}
    assert first["AlgorithmSpecification"]["EnableSageMakerMetricsTimeSeries"] is True
    assert second["AlgorithmSpecification"]["EnableSageMakerMetricsTimeSeries"] is False
