"""Messages about jobs that SageMaker's real launcher runs, sent by the follower of `submit`.

The test is the service: it answers for the state of a job what the launcher's end and its file
`failure` say, and copies the log to CloudWatch. moto answers all else.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from pathlib import Path

import boto3
import pytest

from deploykit.backends.sagemaker import jobs
from deploykit.cli import main as cli
from deploykit.cost import cap
from tests.aws_server import SECTION, as_json, sent_requests
from tests.backends.sagemaker.launcher.sagemaker_hosts import (
    LauncherFailedError,
    on_loopback,
    run_on_hosts,
)
from tests.backends.slurm.slurm_helpers import wait_for
from tests.receivers import SAVES

pytestmark = [
    pytest.mark.aws,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.xdist_group("port-7777"),
]
RECLAIMED = """\
import os, signal, time
kept = os.environ["DEPLOYKIT_CHECKPOINT_DIR"] + "/step-7.pt"
if not os.path.exists(kept):
    open(kept, "w").write("weights")
    while not os.path.exists(kept + ".reclaimed"):
        time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)
print("resumed", flush=True)
"""
PRICE = 1.408
"""USD for an hour of SECTION's instance."""


class Service:
    """One training job."""

    def __init__(self, aws, folder):
        self._aws, self._folder, self.began = aws, folder, time.time()
        self.described = {}
        self.enter("InProgress", "Starting")
        aws.respond = self._respond
        boto3.client("logs", "us-east-1").create_log_group(logGroupName=jobs.LOG_GROUP)

    def enter(self, primary, secondary, reason=""):
        """Enter a state."""
        self.described["TrainingJobStatus"], self.described["SecondaryStatus"] = primary, secondary
        if reason:
            self.described["FailureReason"] = f"AlgorithmError: {reason}"[:1024]
        if primary != "InProgress":
            self.described["TrainingEndTime"] = time.time()
            self.described["BillableTimeInSeconds"] = int(time.time() - self.began)
            self.described["TrainingTimeInSeconds"] = int(time.time() - self.began)

    def _respond(self, one, forward):
        status, headers, content = forward()
        if one.action != "DescribeTrainingJob" or status != 200:
            return status, headers, content
        job = {k: v for k, v in json.loads(content).items() if k != "FailureReason"}
        for key in ("TrainingEndTime", "BillableTimeInSeconds", "TrainingTimeInSeconds"):
            job.pop(key, None)
        (request,) = sent_requests(self._aws)
        job |= {"Environment": request["Environment"], "TrainingStartTime": self.began}
        return as_json(200, {**job, **self.described})

    def run(self, name="host", earlier=()):
        """Run the job to its end, in a thread; returns the thread and the host."""
        (self._folder / name).mkdir()
        (host,) = on_loopback(self._folder / name, 1)
        (request,) = sent_requests(self._aws)
        self.enter("InProgress", "Training")
        thread = threading.Thread(target=self._run, args=(request, host, earlier))
        thread.start()
        return thread, host

    def _run(self, request, host, earlier):
        with contextlib.suppress(LauncherFailedError):
            run_on_hosts(request, self._aws.endpoint, [host], earlier=earlier)
        self._copy_log(request["TrainingJobName"], host)
        failure = host.folder / "output/failure"
        if self.described["SecondaryStatus"] == "Interrupted":
            return
        if failure.exists():
            self.enter("Failed", "Failed", failure.read_text())
        elif (host.folder / "output/success").exists():
            self.enter("Completed", "Completed")

    def _copy_log(self, job, host):
        stream = {"logGroupName": jobs.LOG_GROUP, "logStreamName": f"{job}/algo-1-{time.time_ns()}"}
        logs = boto3.client("logs", "us-east-1")
        logs.create_log_stream(**stream)
        lines = (host.folder / "log.txt").read_text().splitlines()
        now = int(time.time() * 1000)
        events = [{"timestamp": now, "message": line} for line in lines if line]
        logs.put_log_events(**stream, logEvents=events)


@pytest.fixture
def service(aws, tmp_path):
    return Service(aws, tmp_path)


@pytest.fixture
def submit(project, hook):
    """A function that submits a job with the text of its script."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)

    def send(run, text, events, *settings, code=0):
        (project / "train.py").write_text(text)
        notify = json.dumps({"to": [hook.url], "events": events})
        words = [word for one in (f"notify={notify}", *settings) for word in ("--set", one)]
        assert cli.main(["submit", "--backend", "sagemaker", "--run", run, *words]) == code

    return send


def test_a_job_that_fails(service, submit, hook, tmp_path, capsys):
    seen = tmp_path / "seen"
    waits = f"import os, time\nwhile not os.path.exists({str(seen)!r}): time.sleep(0.1)\n"
    text = f"{waits}raise ValueError('label 7 is not below 5')"
    submit("fails-1", text, ["started", "failed"])
    thread, _ = service.run()
    hook.wait_for(1)
    seen.touch()
    thread.join()
    hook.wait_for(2)
    started, failed = hook.messages
    assert (started["event"], started["cause"]) == ("started", "")
    assert (failed["event"], failed["state"]) == ("failed", "failed")
    assert failed["cause"].endswith(": ValueError: label 7 is not below 5")
    assert "/code/train.py:3: raise ValueError(" in failed["where"]
    assert failed["fix"]


@pytest.mark.nightly
def test_a_job_whose_spot_instances_are_reclaimed(service, submit, hook, capsys):
    spot = ("sagemaker.spot=true", "sagemaker.max_wait=1h")
    submit("spot-1", RECLAIMED, ["preempted", "succeeded"], *spot)
    thread, host = service.run("first")
    wait_for((host.folder / "checkpoints/step-7.pt").exists)
    service.enter("InProgress", "Interrupted")
    (host.folder / "checkpoints/step-7.pt.reclaimed").touch()
    thread.join()
    hook.wait_for(1)
    thread, _ = service.run("second", earlier=[host])
    thread.join()
    hook.wait_for(2)
    assert cli.main(["wait", "spot-1"]) == 0
    assert hook.events == ["preempted", "succeeded"]
    assert hook.messages[0]["cause"] == "interrupted: the spot instances were reclaimed"


def test_a_job_that_is_stopped_at_its_cap(service, submit, hook, monkeypatch, capsys):
    """A second job does not fit into the budget."""
    monkeypatch.setattr(cap, "_MIN_SECONDS", 20)
    up = float(Path("/proc/uptime").read_text().split()[0])
    seconds = 60 + (up if up < 3500 else 0)  # of a machine that was just started, all count
    most, overrun = (PRICE * time / 3600 for time in (seconds, 60))
    settings = (f"max_cost={most:.4f} USD", "stop_at_cap=true", "resources.time_limit=4h")
    settings += (f"budget={1.5 * (most + overrun):.4f} USD for tests",)
    submit("capped-1", SAVES, ["cap", "budget", "failed"], *settings)
    submit("capped-2", SAVES, ["budget"], *settings, code=64)
    thread, _ = service.run()
    thread.join()
    hook.wait_for(2)
    assert cli.main(["wait", "capped-1"]) == 1
    (message,), (refused,) = hook.of("capped-1"), hook.of("capped-2")
    assert (message["event"], message["state"]) == ("cap", "failed")
    assert message["cause"].startswith("stopped at its cost cap (")
    assert (refused["event"], refused["state"]) == ("budget", "unsent")
