"""The launcher's process that keeps checkpoints, beside real programs and a real S3 server."""

from __future__ import annotations

import json
import os
import random
import signal

import boto3
import pytest

from tests.backends.slurm.slurm_helpers import wait_for

pytestmark = [pytest.mark.aws, pytest.mark.timeout(900)]

PREFIX = "s3://my-bucket/runs"
PLAIN = ("python", "--nnodes=1", "--", "train.py")
SCRIPT = """
    import os, pathlib, sys, time

    folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
    parts = [f"__{part}_0.distcp" for part in range(4)]
    saved = sorted(folder.glob("step-*"))
    for one in saved:
        for name in (*parts, ".metadata"):
            content = (one / name).read_bytes()
            assert content == one.name.encode() * 20_000, (one, name, len(content))
    first = int(saved[-1].name.removeprefix("step-")) + 1 if saved else 0
    print("starts at", first, "of", len(saved), flush=True)
    for step in range(first, first + int(os.environ.get("STEPS", 2))):
        one = folder / f"step-{step:03d}"
        one.mkdir()
        for name in (*parts, ".metadata"):
            (one / name).write_bytes(one.name.encode() * 20_000)
    print("saved", flush=True)
    while "WAITS" in os.environ:
        time.sleep(0.1)
"""
"""Saves checkpoints as torch.distributed.checkpoint does, `.metadata` last."""
UNMARKED = SCRIPT.replace(".distcp", ".bin").replace(".metadata", "model.pt")


@pytest.fixture
def environ(aws, tmp_path):
    """Variables of a launcher whose checkpoints go to the bucket."""
    return {
        **{name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        "DEPLOYKIT_BACKEND": "local",
        "DEPLOYKIT_CHECKPOINT_BUCKET": PREFIX,
        "DEPLOYKIT_CHECKPOINT_DIR": tmp_path / "checkpoints",
    }


def complete():
    """The names of the checkpoints that have a manifest."""
    listed = boto3.client("s3").list_objects_v2(Bucket="my-bucket", Prefix="runs/.deploykit/ch")
    return {each["Key"].split("/")[-2] for each in listed.get("Contents", ())}


def data_keys(requests):
    """The keys of checkpoints' files among requests that write."""
    paths = [one.path.partition("?")[0] for one in requests if one.method == "PUT"]
    return [path for path in paths if "/step-" in path and ".deploykit" not in path]


def record(bundle):
    return json.loads((bundle.run_dir / "exit_records/checkpoints-0.json").read_text())


@pytest.mark.slow
def test_killed_while_it_copies_a_half_checkpoint_is_never_used(bundle, environ, aws, tmp_path):
    bundle.write("train.py", SCRIPT)
    rng, before, starts = random.Random(7), 0, []
    for attempt in range(10):
        aws.requests.clear()
        whole = complete()
        folder = tmp_path / f"empty-{attempt}"
        launcher = bundle.start(
            *PLAIN, **environ | {"DEPLOYKIT_CHECKPOINT_DIR": folder, "WAITS": 1}
        )
        enough = rng.randint(1, 10)
        launcher.wait_for("starts at")
        wait_for(lambda enough=enough: len(data_keys(aws.requests)) >= enough)
        os.killpg(launcher.process.pid, signal.SIGKILL)
        launcher.process.wait()
        line = next(line for line in launcher.log.split("\n") if "starts at" in line)
        starts.append(int(line.split("starts at ")[1].split()[0]))
        assert "Error" not in launcher.log
        assert starts[-1] >= before, launcher.log
        before = starts[-1]
        again = [key for key in data_keys(aws.requests) if key.split("/")[-2] in whole]
        assert again == []
    final = bundle.run(*PLAIN, **environ)
    assert final.code == 0, final.log
    assert f"starts at {len(complete()) - 2}" in final.log
    assert starts[-1] > 0


def test_what_is_complete_at_the_end_is_copied_before_the_launcher_ends(bundle, environ):
    """Also what was not there long enough to count as complete while the program ran."""
    bundle.write("train.py", UNMARKED)
    done = bundle.run(*PLAIN, **environ)
    assert done.code == 0, done.log
    assert complete() == {"step-000", "step-001"}
    assert record(bundle)["newest"] == "step-001"


def test_a_stop_signal_does_not_stop_the_copy(bundle, environ):
    bundle.write("train.py", UNMARKED)
    launcher = bundle.start(*PLAIN, **environ | {"WAITS": 1})
    launcher.wait_for("saved")
    os.killpg(launcher.process.pid, signal.SIGTERM)  # as Slurm, to all processes
    done = launcher.finish()
    assert done.code == 143, done.log
    assert complete() == {"step-000", "step-001"}


def test_a_failing_copy_does_not_fail_the_training_and_is_said(bundle, environ, aws):
    bundle.write("train.py", SCRIPT)
    denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
    aws.respond = lambda one, forward: (
        (403, [], denied) if one.method == "PUT" and "/step-001" in one.path else forward()
    )
    done = bundle.run(*PLAIN, **environ)
    assert done.code == 0
    warning = "warning: s3://my-bucket/runs could not be uploaded: "
    assert sum(warning in line for line in done.said["node 0"]) == 1
    assert "not all checkpoints are in s3://my-bucket/runs" in done.log
    assert "AccessDenied" in record(bundle)["error"]
    assert record(bundle)["newest"] == "step-000"
    assert complete() == {"step-000"}


@pytest.mark.parametrize("location", ["s3://no-such-bucket/x", "s3://my-bucket/x"])
@pytest.mark.slow
def test_a_bucket_out_of_reach_ends_the_job_before_it_trains(location, bundle, environ, aws):
    bundle.write("train.py", SCRIPT)
    if "my-bucket" in location:
        environ |= {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_MAX_ATTEMPTS": "1"}
    done = bundle.run(*PLAIN, **environ | {"DEPLOYKIT_CHECKPOINT_BUCKET": location})
    assert done.code == 78, done.log
    assert f"{location} could not be written: " in bundle.end("node-0")["reason"]
    assert "starts at" not in done.log
    assert "Traceback" not in done.log


def test_only_the_newest_stay_in_the_folder_of_any_script(bundle, tmp_path, aws):
    bundle.write("train.py", SCRIPT)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    (folder / "notes-5.txt").write_text("mine")
    keep = {"DEPLOYKIT_CHECKPOINT_DIR": folder, "DEPLOYKIT_KEEP_CHECKPOINTS": 2, "STEPS": 5}
    done = bundle.run(*PLAIN, DEPLOYKIT_BACKEND="local", **keep)
    assert done.code == 0, done.log
    left = sorted(path.name for path in folder.glob("[!.]*"))
    assert left == ["notes-5.txt", "step-003", "step-004"]
    assert "step-000 deleted: keep_checkpoints is 2" in done.log
    written = json.loads((bundle.run_dir / "exit_records/written.json").read_text())
    assert written["checkpoints"]["count"] == 11  # the notes, and five files of each that is left
    assert aws.requests == []


def test_nothing_is_deleted_while_another_run_uses_the_folder(bundle, tmp_path):
    bundle.write("train.py", SCRIPT)
    folder = tmp_path / "checkpoints"
    env = {"DEPLOYKIT_BACKEND": "local", "DEPLOYKIT_CHECKPOINT_DIR": folder}
    keeps_all = {"DEPLOYKIT_RUN": "other", "DEPLOYKIT_KEEP_CHECKPOINTS": 9, "STEPS": 1}
    other = bundle.start(*PLAIN, node=1, WAITS=1, **env | keeps_all)
    other.wait_for("saved")
    done = bundle.run(*PLAIN, **env, DEPLOYKIT_KEEP_CHECKPOINTS=1, STEPS=3)
    assert done.code == 0, done.log
    assert len(list(folder.glob("step-*"))) == 4
    other.process.send_signal(signal.SIGTERM)
    other.finish()
    done = bundle.run(*PLAIN, **env, DEPLOYKIT_KEEP_CHECKPOINTS=1, STEPS=0)
    assert done.code == 0, done.log
    assert [path.name for path in folder.glob("step-*")] == ["step-003"]


def test_only_the_newest_stay_in_the_bucket_and_the_resumed_one_until_then(bundle, environ):
    bundle.write("train.py", SCRIPT)
    keep = environ | {"DEPLOYKIT_KEEP_CHECKPOINTS": 1}
    assert bundle.run(*PLAIN, **keep).code == 0
    assert complete() == {"step-001"}
    done = bundle.run(*PLAIN, **keep | {"STEPS": 0})
    assert "starts at 2 of 1" in done.log
    assert complete() == {"step-001"}
    assert bundle.run(*PLAIN, **keep | {"STEPS": 1}).code == 0
    assert complete() == {"step-002"}
