"""Checkpoints in a bucket, against a real S3 server: complete or not there, and sent once."""

from __future__ import annotations

import json
import os

import boto3
import pytest

from deploykit_node.bucket import Bucket, BucketError
from deploykit_node.restart import checkpoint_folder
from deploykit_node.restart.checkpoint_bucket import CheckpointBucket
from tests.backends.slurm.slurm_helpers import wait_for
from tests.node.test_checkpoint_folder import write

pytestmark = [pytest.mark.aws, pytest.mark.timeout(300)]

PREFIX = "s3://my-bucket/runs/a"


def of_node(node=0, count=1, attempt=0, run="one"):
    made = CheckpointBucket(PREFIX, run, attempt, node, count)
    made.refresh()
    return made


def save(bucket, folder, *names, **options):
    """Save these checkpoints, or all that are complete."""
    listed = checkpoint_folder.listed(folder, **options)
    for name in names or listed:
        assert bucket.save(folder, listed[name])


def restored(folder, **options):
    """What a node finds in an empty folder."""
    folder.mkdir()
    of_node(**options).restore(folder)
    return {file.path: (folder / file.path).read_text() for file in _files(folder)}


def _files(folder):
    return [
        f
        for one in checkpoint_folder.listed(folder, parts=True).values()
        for f in one.files.values()
    ]


def sent(aws):
    """The keys below the prefix that were written since the last call, but for manifests."""
    keys = [
        one.path.partition("?")[0].removeprefix("/my-bucket/runs/a/")
        for one in aws.requests
        if one.method == "PUT"
    ]
    aws.requests.clear()
    return sorted(key for key in keys if not key.startswith(".deploykit/checkpoints"))


@pytest.fixture
def folder(aws, tmp_path):
    folder = tmp_path / "here"
    write(folder, "step-1/a.pt", "step-1/b.pt", at=1)
    write(folder, "step-2/a.pt", "step-2/b.pt", at=2)
    write(folder, "last.pt", "latest", at=3)
    return folder


def test_an_empty_folder_gets_the_newest_and_what_has_no_step(folder, tmp_path):
    save(of_node(), folder)
    found = restored(tmp_path / "there")
    assert sorted(found) == ["last.pt", "latest", "step-2/a.pt", "step-2/b.pt"]
    assert (tmp_path / "there/last.pt").stat().st_mtime == 3
    again = of_node()
    listed = checkpoint_folder.listed(tmp_path / "there").values()
    assert all(again.is_stored(one) for one in listed)


@pytest.mark.slow
def test_files_without_a_manifest_are_not_used_and_not_sent_again(aws, folder, tmp_path):
    """As after a kill in the middle of an upload."""
    save(of_node(), folder, "step-1")
    aws.respond = lambda one, forward: (
        (500, [], b"") if one.method == "PUT" and "step-2/b.pt" in one.path else forward()
    )
    with pytest.raises(BucketError, match="could not be uploaded"):
        save(of_node(), folder, "step-2")
    aws.respond = lambda _, forward: forward()
    assert sorted(restored(tmp_path / "there")) == ["step-1/a.pt", "step-1/b.pt"]
    aws.requests.clear()
    save(of_node(), folder, "step-2")
    assert sent(aws) == ["step-2/b.pt"]
    assert "step-2/b.pt" in restored(tmp_path / "then")


@pytest.mark.slow
def test_what_a_script_writes_again_replaces_the_old_when_it_is_complete(aws, folder, tmp_path):
    save(of_node(), folder, "files")
    (folder / "last.pt").write_text("second")
    aws.respond = lambda one, forward: (
        (500, [], b"") if one.method == "PUT" and ".json" in one.path else forward()
    )
    with pytest.raises(BucketError):
        save(of_node(), folder, "files")
    aws.respond = lambda _, forward: forward()
    assert restored(tmp_path / "half") == {"last.pt": "tensors"}
    save(of_node(), folder, "files")
    assert restored(tmp_path / "whole") == {"last.pt": "second"}
    (folder / "last.pt").write_text("third")
    save(of_node(), folder, "files")
    assert restored(tmp_path / "again") == {"last.pt": "third"}
    copies = [one.name for one in Bucket(PREFIX).entries() if one.name.endswith("last.pt")]
    assert copies == ["last.pt"]


def test_a_new_file_of_a_stored_checkpoint_is_sent_alone(aws, folder):
    save(of_node(), folder, "step-2")
    write(folder, "step-2/trainer_state.json")
    sent(aws)
    save(of_node(), folder, "step-2")
    assert sent(aws) == ["step-2/trainer_state.json"]


def test_only_the_newest_stay_in_the_bucket(folder, tmp_path):
    write(folder, "step-3/a.pt", at=5)
    bucket = of_node()
    save(bucket, folder)
    assert bucket.keep_newest(2, since=0) == ["step-1"]
    names = {one.name for one in Bucket(PREFIX).entries()}
    assert not any("step-1" in name for name in names)
    assert {"step-2/a.pt", "step-3/a.pt", "last.pt", "latest"} <= names


def test_what_another_live_run_saves_stays_in_the_bucket(folder):
    save(of_node(run="other"), folder)
    mine = of_node(run="one")
    write(folder, "step-9/a.pt", at=9)
    save(mine, folder, "step-9")
    assert mine.keep_newest(1, since=0) == []
    later = 2**40
    assert sorted(mine.keep_newest(1, since=later)) == ["step-1", "step-2"]


def test_what_is_newer_in_the_folder_stays(folder, tmp_path):
    save(of_node(), folder)
    there = tmp_path / "there"
    write(there, "step-3/a.pt", at=10)
    write(there, "last.pt", at=11)
    of_node().restore(there)
    assert sorted(file.path for file in _files(there)) == ["last.pt", "latest", "step-3/a.pt"]
    assert (there / "last.pt").stat().st_mtime == 11


def test_a_checkpoint_of_two_nodes_counts_when_both_have_saved_it(folder, tmp_path):
    other = tmp_path / "other"
    write(folder, "step-3/__0_0.distcp", "step-3/.metadata", "step-3/state.json", at=8)
    write(other, "step-3/__1_0.distcp", "step-3/state.json", at=8)
    (other / "step-3/state.json").write_text("of the second")
    save(of_node(0, 2), folder, "step-3")
    assert restored(tmp_path / "early", node=1, count=2) == {}
    save(of_node(1, 2), other, "step-3", parts=True)
    for node in (0, 1):
        found = restored(tmp_path / f"node-{node}", node=node, count=2)
        assert sorted(found) == [
            *("step-3/.metadata", "step-3/__0_0.distcp", "step-3/__1_0.distcp"),
            "step-3/state.json",
        ]
        assert found["step-3/state.json"] == "tensors"
    second = of_node(1, 2)
    foreign = second.foreign_files()
    assert "step-3/__0_0.distcp" in foreign
    assert "step-3/__1_0.distcp" not in foreign
    assert sorted(restored(tmp_path / "alone")) == sorted(found)  # a later run on one node


def test_a_node_without_a_part_says_so(folder, tmp_path):
    first, second = of_node(0, 2), of_node(1, 2)
    save(first, folder, "step-2")
    second.refresh()
    assert second.answers_due({}) == ["step-2"]
    assert restored(tmp_path / "early", node=1, count=2) == {}
    second.answer("step-2", None)
    assert sorted(restored(tmp_path / "then", node=1, count=2)) == ["step-2/a.pt", "step-2/b.pt"]
    save(first, folder, "step-1")
    second.end()  # or all that it had has been copied
    assert "step-1" in of_node(0, 2).complete()


def test_parts_of_two_attempts_do_not_mix(folder, tmp_path):
    save(of_node(1, 2, attempt=0), folder, "step-2")
    save(of_node(0, 2, attempt=1), folder, "step-2")
    assert of_node(0, 2, attempt=1).complete() == {}


def test_what_the_other_nodes_do_not_have_is_set_aside(folder, tmp_path):
    save(of_node(0, 2), folder, "step-1")
    second = of_node(1, 2)
    second.answer("step-1", None)
    of_node(0, 2).restore(folder)
    found = checkpoint_folder.listed(folder)
    assert "step-1" in found
    assert "step-2" not in found
    assert (folder / "step-2.incomplete/a.pt").exists()


@pytest.mark.parametrize(
    "files",
    [
        [["../outside.pt", 7, 1, "step-1/a.pt"]],
        [["/outside.pt", 7, 1, "step-1/a.pt"]],
        [["step-1/a.pt", 7, 1, "../../elsewhere/a.pt"]],
        [["step-1/a.pt", -7, 1, "step-1/a.pt"]],
        [["step-1/a.pt", "7", 1, "step-1/a.pt"]],
        "no list",
        [7],
    ],
)
def test_a_manifest_that_does_not_make_sense_is_none(files, folder, tmp_path):
    save(of_node(), folder, "step-1")
    name = ".deploykit/checkpoints/step-1/node-0-of-1.json"
    Bucket(PREFIX).write(name, json.dumps({"run": "x", "attempt": 0, "files": files}).encode())
    assert of_node().complete() == {}


def test_a_disk_that_is_too_small_is_named_before_anything_is_copied(folder, tmp_path):
    save(of_node(), folder, "step-1")
    name = ".deploykit/checkpoints/step-1/node-0-of-1.json"
    files = [["step-1/a.pt", 10**18, 1, "step-1/a.pt"]]
    Bucket(PREFIX).write(name, json.dumps({"run": "x", "attempt": 0, "files": files}).encode())
    (tmp_path / "there").mkdir()
    with pytest.raises(BucketError, match=r"free, but the checkpoint to resume from needs 1000000"):
        of_node().restore(tmp_path / "there")


def test_an_object_that_has_changed_is_not_used(folder, tmp_path):
    save(of_node(), folder, "step-1")
    Bucket(PREFIX).write("step-1/a.pt", b"longer than before")
    (tmp_path / "there").mkdir()
    with pytest.raises(BucketError, match=r"step-1/a.pt changed while being copied"):
        of_node().restore(tmp_path / "there")
    assert checkpoint_folder.listed(tmp_path / "there") == {}


def test_what_an_interrupted_download_has_left_is_not_copied_again(aws, folder, tmp_path):
    """Not used before all of it is there, either."""
    save(of_node(), folder, "step-2")
    there = tmp_path / "there"
    there.mkdir()

    def respond(one, forward):
        if one.method != "GET" or not one.path.endswith("/step-2/b.pt"):
            return forward()
        wait_for(lambda: list(there.glob(".deploykit/arriving/*/step-2/a.pt")))
        return 403, [], b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"

    aws.respond = respond
    with pytest.raises(BucketError, match=r"step-2/b\.pt could not be downloaded: "):
        of_node().restore(there)
    assert checkpoint_folder.listed(there) == {}
    aws.respond = lambda _, forward: forward()
    aws.requests.clear()
    of_node().restore(there)
    paths = [one.path for one in aws.requests if one.method == "GET" and ".pt" in one.path]
    assert paths == ["/my-bucket/runs/a/step-2/b.pt"]
    assert (there / "step-2/a.pt").exists()
    assert not list(there.glob(".deploykit/arriving*"))


def test_a_bucket_that_does_not_exist(aws):
    with pytest.raises(BucketError, match=r"no-such-bucket/a could not be written: .*NoSuchBucket"):
        CheckpointBucket("s3://no-such-bucket/a").probe()


def test_a_user_who_may_not_write(aws, enforced, monkeypatch):
    iam = boto3.client("iam", region_name="us-east-1")
    iam.create_user(UserName="reader")
    policy = {
        "Version": "2012-10-17",
        "Statement": {
            "Effect": "Allow",
            "Action": ["s3:ListBucket", "s3:GetObject"],
            "Resource": "*",
        },
    }
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=json.dumps(policy))
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    enforced()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    monkeypatch.setattr(boto3, "DEFAULT_SESSION", None)  # it keeps the credentials
    reader = CheckpointBucket(PREFIX)
    reader.refresh()
    with pytest.raises(BucketError, match=r"my-bucket/runs/a could not be written: .*AccessDenied"):
        reader.probe()


@pytest.mark.parametrize("failure", ["throttled", "dropped"])
@pytest.mark.slow
def test_requests_that_fail_at_first_are_repeated(failure, aws, folder, tmp_path):
    failed = set()
    slow = (503, [], b"<Error><Code>SlowDown</Code><Message>Slow down</Message></Error>")

    def respond(one, forward):
        key = one.method, one.path
        if key in failed or "step-1" not in one.path:
            return forward()
        failed.add(key)
        return slow if failure == "throttled" else None

    aws.respond = respond
    save(of_node(), folder, "step-1")
    assert sorted(restored(tmp_path / "there")) == ["step-1/a.pt", "step-1/b.pt"]
    assert {method for method, _ in failed} >= {"PUT", "GET"}


def test_a_node_without_boto3_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(BucketError, match="requires boto3"):
        Bucket(PREFIX)


def test_a_prefix_is_written_read_listed_and_deleted(aws, tmp_path):
    bucket = Bucket("s3://my-bucket/some/")
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(20 << 20))  # in several parts
    arrived = []
    bucket.upload([(path, "x/a.bin")], arrived.append)
    assert sum(arrived) == 20 << 20
    bucket.write("y", b"small")
    assert [entry.name for entry in bucket.entries()] == ["x/a.bin", "y"]
    assert [entry.name for entry in bucket.entries("x/")] == ["x/a.bin"]
    assert bucket.read("y") == b"small"
    assert bucket.read("z") is None
    bucket.download(bucket.entries(), tmp_path / "there")
    assert (tmp_path / "there/x/a.bin").read_bytes() == path.read_bytes()
    bucket.delete(["x/a.bin", "y", "gone"])
    assert bucket.entries() == []
