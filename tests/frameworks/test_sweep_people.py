"""A sweep over a third-party script, unmodified, on all three backends: two learning rates each."""

from __future__ import annotations

import json
import re
import subprocess
import threading

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from tests.aws_server import SECTION, as_json
from tests.backends.sagemaker.launcher.sagemaker_hosts import on_loopback, run_on_hosts
from tests.frameworks.people import PYTHON, people

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(2400),
    pytest.mark.xdist_group("frameworks"),
]
RATES = ["0.001", "0.01"]


@pytest.fixture(params=["run_clm", "trl-sft"])
def person(request):
    (one,) = [one for one in people() if one.name == request.param]
    if not one.is_here():
        pytest.skip("optional: python -m tests.frameworks.people fetch")
    return one


@pytest.fixture
def searched(person, tmp_path, monkeypatch, capsys):
    """Sweep over the script on a backend; what came out, and the arguments of each trial's run."""

    def run(backend, keys):
        folder = person.make(tmp_path / "project")
        monkeypatch.chdir(folder)
        start = {"module": person.module} if person.module else {"script": person.script}
        job = {
            "name": "third-party",
            "backend": backend,
            "entrypoint": {**start, "args": list(person.args)},
            "resources": {"time_limit": "1h"},
            "env": person.env,
        }
        (folder / "job.yaml").write_text(json.dumps({**job, **keys}))
        grid = f"learning_rate={','.join(RATES)}"
        capsys.readouterr()
        words = ["--grid", grid, "--metric", "train_loss", "--sweep", "s", "--json"]
        code = cli.main(["sweep", "start", *words])
        shown = capsys.readouterr()
        assert code == 0, shown
        return json.loads(shown.out)

    return run


def found_both(found):
    assert found["counts"] == {"succeeded": 2}
    values = [one["value"] for one in found["trials"]]
    assert values[0] != values[1]
    assert found["best"]["value"] == min(values)


def test_on_this_machine(searched):
    found_both(searched("local", {"environment": {"venv": str(PYTHON.parents[1])}}))
    job = json.loads((paths.run_folder("s-1") / "job.json").read_text())
    assert job["entrypoint"]["args"][-2:] == ["--learning_rate", RATES[1]]


@pytest.mark.slurm
def test_on_slurm(cluster, searched):
    found_both(searched("slurm", {"environment": {"venv": str(PYTHON.parents[1])}}))


@pytest.mark.aws
def test_on_sagemaker(aws, searched, tmp_path):
    """Each job runs under SageMaker's launcher once it is created; the service reads its log."""
    site = [PYTHON, "-c", 'import sysconfig; print(sysconfig.get_path("purelib"))']
    packages = subprocess.run(site, check=True, capture_output=True, text=True).stdout.strip()
    jobs = {}

    def start(body):
        name = body["TrainingJobName"]
        (tmp_path / name).mkdir()
        hosts = on_loopback(tmp_path / name, 1)
        words = (body, aws.endpoint, hosts)
        keys = {"timeout": 1800, "image": {"PYTHONPATH": packages}}
        jobs[name] = (threading.Thread(target=run_on_hosts, args=words, kwargs=keys), hosts[0])
        jobs[name][0].start()

    def respond(one, forward):
        status, headers, content = forward()
        if one.action == "CreateTrainingJob" and status == 200:
            start(json.loads(one.body))
        if one.action != "DescribeTrainingJob" or status != 200:
            return status, headers, content
        job = json.loads(content)
        running, host = jobs[job["TrainingJobName"]]
        if running.is_alive():
            state = {"TrainingJobStatus": "InProgress", "SecondaryStatus": "Training"}
            return as_json(200, {**job, **state})
        log = (host.folder / "log.txt").read_text()
        losses = re.findall(r"train_loss\W+([0-9.]+)", log)
        if not losses:
            failed = {"TrainingJobStatus": "Failed", "SecondaryStatus": "Failed"}
            return as_json(200, {**job, **failed, "FailureReason": log[-500:]})
        metric = {"MetricName": "train_loss", "Value": float(losses[-1]), "Timestamp": 1.0}
        ended = {"TrainingJobStatus": "Completed", "SecondaryStatus": "Completed"}
        return as_json(200, {**job, **ended, "FinalMetricDataList": [metric]})

    aws.respond = respond
    section = dict(line.strip().split(": ", 1) for line in SECTION.splitlines()[1:])
    found_both(searched("sagemaker", {"sagemaker": section}))
