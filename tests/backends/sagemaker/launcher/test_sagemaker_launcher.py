"""The request that a moto server received, run by SageMaker's real launcher on two hosts."""

from __future__ import annotations

import io
import json
import tarfile
import textwrap

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import Entrypoint
from deploykit.observe import traces
from tests.backends.sagemaker.launcher.sagemaker_hosts import (
    LauncherFailedError,
    on_loopback,
    run_on_hosts,
)

pytestmark = [pytest.mark.aws, pytest.mark.torch, pytest.mark.xdist_group("port-7777")]

PROGRAM = textwrap.dedent(
    """\
    import json, os, sys
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    total = torch.tensor(rank + 1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    with open(os.environ["DEPLOYKIT_OUTPUT_DIR"] + f"/rank-{rank}.json", "w") as file:
        json.dump({"argv": sys.argv[1:], "total": total.item(), "env": dict(os.environ)}, file)
    print("printed by rank", rank)
    """
)
ARGUMENTS = (
    *("--flag", "a b", "--repeat=1", "--repeat=2", "", "-", "--", "ü😀", "$(exit 3)", "`id`"),
    *("'single'", '"double"', "back\\slash", "line\nend", "*", "{{ x }}", "#SBATCH", "x" * 5000),
)
PLAIN = {"nodes": 1, "processes_per_node": 1, "distribution": "none"}
PLAIN["entrypoint"] = Entrypoint("train.py", launcher="python")
"""A job that starts without importing torch."""


@pytest.fixture
def hosts(tmp_path):
    folder = tmp_path / "hosts"
    folder.mkdir()
    return folder


def test_four_ranks_on_two_hosts(aws, captured, program, hosts):
    env = {"NCCL_DEBUG": "INFO", "NCCL_PROTO": "LL", "FI_PROVIDER": "tcp", "OMP_NUM_THREADS": "3"}
    request = captured(program(PROGRAM), args=ARGUMENTS, env={**env, "PLAIN": "ü 'x'\n$y"})
    outputs = run_on_hosts(request, aws.endpoint, on_loopback(hosts, 2))
    recorded = {
        int(file.stem.removeprefix("rank-")): json.loads(file.read_text())
        for output in outputs
        for file in output.iterdir()
    }
    assert sorted(recorded) == [0, 1, 2, 3]
    for rank, given in recorded.items():
        assert tuple(given["argv"]) == ARGUMENTS
        assert given["total"] == 10
        assert {name: given["env"][name] for name in env} == env
        assert given["env"]["PLAIN"] == "ü 'x'\n$y"
        assert given["env"]["WORLD_SIZE"] == "4"
        assert given["env"]["LOCAL_RANK"] == str(rank % 2)
        assert given["env"]["DEPLOYKIT_BACKEND"] == "sagemaker"
    logs = "".join((hosts / f"host-{host}/log.txt").read_text() for host in (0, 1))
    for rank in range(4):
        assert f"Z [rank {rank}] printed by rank {rank}\n" in logs


def test_the_program_reads_the_data_of_a_channel(aws, captured, program, hosts):
    import boto3

    boto3.client("s3", "us-east-1").put_object(Bucket="my-bucket", Key="set/a/b.txt", Body=b"42")
    copy = (
        "import os, shutil\n"
        "from pathlib import Path\n"
        "data = Path(os.environ['DEPLOYKIT_DATA_TRAIN'])\n"
        "shutil.copy(data / 'a/b.txt', os.environ['DEPLOYKIT_OUTPUT_DIR'])\n"
    )
    request = captured(program(copy), data={"train": "s3://my-bucket/set"}, **PLAIN)
    (output,) = run_on_hosts(request, aws.endpoint, on_loopback(hosts, 1))
    assert (output / "b.txt").read_text() == "42"


@pytest.mark.nightly
def test_steps_of_both_ranks_are_profiled_into_the_output(aws, captured, program, hosts):
    text = (
        "import torch\n"
        "model = torch.nn.Linear(8, 8)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "for _ in range(4):\n"
        "    model(torch.randn(2, 8)).sum().backward()\n"
        "    optimizer.step()\n"
    )
    request = captured(program(text), nodes=1, job_profile="torch:2:3")
    (output,) = run_on_hosts(request, aws.endpoint, on_loopback(hosts, 1))
    found = [traces.read(path) for path in traces.files(output / "profile")]
    assert [one.rank for one in found] == [0, 1]
    assert all("aten::addmm" in one.operators for one in found)


def test_a_failing_program_fails_the_job_and_is_diagnosed(aws, captured, program, hosts, capsys):
    request = captured(program("raise ValueError('label 7 is not below 5')"), nodes=1)
    with pytest.raises(LauncherFailedError, match=r"exit codes are \[[1-9]"):
        run_on_hosts(request, aws.endpoint, on_loopback(hosts, 1))
    assert "ExecuteUserScriptError" in (hosts / "host-0/output/failure").read_text()
    log = hosts / "host-0/log.txt"
    assert cli.main(["diagnose", str(log), "--json"]) == 79
    first, *_ = json.loads(capsys.readouterr().out)["causes"]
    assert first["cause"] == "user_code_error", log.read_text()
    assert "ValueError: label 7 is not below 5" in first["evidence"][0]["text"]


def test_instance_groups_that_train_alone_are_stopped(aws, captured, program, hosts):
    """The SDK accepts such a job, and each group would silently form a separate process group."""
    groups = [
        {"InstanceGroupName": name, "InstanceType": kind, "InstanceCount": 1}
        for name, kind in (("a", "ml.g5.12xlarge"), ("b", "ml.g5.24xlarge"))
    ]
    resources = {"InstanceGroups": groups, "VolumeSizeInGB": 30}
    request = captured(program(PROGRAM), lambda request: {**request, "ResourceConfig": resources})
    with pytest.raises(LauncherFailedError, match="4 ranks, but torchrun started 2: training"):
        run_on_hosts(request, aws.endpoint, on_loopback(hosts, 2))


def repacked(archive, name, content):
    """A source archive with one file changed, as an attacker would upload it."""
    changed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive)) as old,
        tarfile.open(fileobj=changed, mode="w:gz") as new,
    ):
        for member in old:
            text = old.extractfile(member).read()
            if member.name == name:
                text, member.size = content, len(content)
            new.addfile(member, io.BytesIO(text))
    return changed.getvalue()


def replace_in_bucket(request, name, content):
    """Change one file of the source in the bucket after the submit."""
    import boto3

    key = f"deploykit/bundles/{planned_hash(request)}/sourcedir.tar.gz"
    source = {"Bucket": "my-bucket", "Key": key}
    s3 = boto3.client("s3", "us-east-1")
    s3.put_object(**source, Body=repacked(s3.get_object(**source)["Body"].read(), name, content))


def planned_hash(request):
    return request["Environment"]["DEPLOYKIT_BUNDLE"]


@pytest.mark.parametrize("distribution", ["torch_distributed", "none"])
def test_a_source_that_is_replaced_after_submit_is_not_run(
    aws, captured, program, hosts, distribution, capsys
):
    alone = {"nodes": 1, "processes_per_node": 1} if distribution == "none" else {"nodes": 1}
    request = captured(program("print('mine')"), distribution=distribution, **alone)
    replace_in_bucket(request, "train.py", b"print('evil')")
    with pytest.raises(LauncherFailedError):
        run_on_hosts(request, aws.endpoint, on_loopback(hosts, 1))
    log = (hosts / "host-0/log.txt").read_text()
    assert f"not the one that was submitted ({planned_hash(request)}): its SHA-256 is " in log
    assert "evil" not in log
    assert "Traceback" not in log.partition("not the one that")[0]
    assert cli.main(["diagnose", str(hosts / "host-0/log.txt"), "--json"]) == 79
    first, *_ = json.loads(capsys.readouterr().out)["causes"]
    assert first["cause"] == "source_replaced"
    if distribution == "none":
        assert "ExitCode 78" in (hosts / "host-0/output/failure").read_text()


WITH_ENTRYPOINT = {**PLAIN, "image_entrypoint": ("env", "IMAGE=1")}


def test_with_image_entrypoint_a_replaced_launcher_is_not_run(aws, captured, program, hosts):
    """A replaced launcher would check nothing. Packages of the source are not installed either."""
    request = captured(program("print('mine')"), **WITH_ENTRYPOINT)
    replace_in_bucket(request, ".deploykit/launch.py", b"print('evil')")
    with pytest.raises(LauncherFailedError, match=r"exit codes are \[78\]"):
        run_on_hosts(request, aws.endpoint, on_loopback(hosts, 1))
    log = (hosts / "host-0/log.txt").read_text()
    message = f"sourcedir.tar.gz is not the source that was submitted ({planned_hash(request)})\n"
    assert log.startswith("deploykit: ")
    assert log.endswith(message)
    assert (hosts / "host-0/output/failure").read_text().endswith(message)
    assert not list((hosts / "host-0/code").iterdir())


def test_with_image_entrypoint_a_valid_source_runs(aws, captured, program, hosts):
    text = "import os; open(os.environ['DEPLOYKIT_OUTPUT_DIR'] + '/' + os.environ['IMAGE'], 'w')"
    request = captured(program(text), **WITH_ENTRYPOINT)
    (output,) = run_on_hosts(request, aws.endpoint, on_loopback(hosts, 1))
    assert (output / "1").exists()
