"""Input channels that the node copies before the ranks start: real files, and S3 by moto."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import boto3
import pytest

from tests.node.conftest import ENTRYPOINTS

STAGE = """\
import json, os, sys
sys.path.insert(0, sys.argv[1])
from deploykit_node import staging
from deploykit_node.cluster import Cluster

env = {**os.environ, **json.loads(os.environ.get("RESOLVED", "{}"))}
hosts = ("here",) * int(env.get("COUNT", "1"))
try:
    staging.run(env, Cluster("emulated", int(env.get("NODE", "0")), hosts), elastic=False)
except staging.StagingError as error:
    sys.exit(str(error))
print(json.dumps({k: v for k, v in env.items() if k.startswith("DEPLOYKIT_DATA_")}))
"""
"""A node up to the start of its ranks, without torch."""


class Node:
    """The place of a run on this machine, and its nodes."""

    def __init__(self, tmp_path):
        self.disk, self.run_dir = tmp_path / "local disk", tmp_path / "run"
        self.disk.mkdir()
        (self.run_dir / "exit_records").mkdir(parents=True)

    def start(self, path, mode="node", prefix=(), **more):
        channel = {"path": str(path), "stage": mode}
        if mode != "shared":
            channel["stage_folder"] = str(self.disk)
        variables = {
            "DEPLOYKIT_RUN_DIR": str(self.run_dir),
            "DEPLOYKIT_STAGE": json.dumps({"train": channel}),
            **more,
        }
        return subprocess.Popen(
            [*prefix, sys.executable, "-c", STAGE, str(ENTRYPOINTS)],
            env={**os.environ, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def stage(self, path, mode="node", **more):
        """The folder of the channel, and what the node said; or None, and why not."""
        process = self.start(path, mode, **more)
        out, said = process.communicate(timeout=300)
        return (Path(json.loads(out)["DEPLOYKIT_DATA_TRAIN"]) if out else None), said

    def record(self, node=0):
        return json.loads((self.run_dir / f"exit_records/staging-{node}.json").read_text())


@pytest.fixture
def node(tmp_path):
    return Node(tmp_path)


@pytest.fixture
def bucket(aws):
    """An empty bucket's client; `.requests` of `aws` are the node's."""
    return boto3.client("s3", region_name="us-east-1")


def write(folder, count=20, size=1000):
    """Files of different sizes in folders; their content by name."""
    for number in range(count):
        path = folder / f"part {number % 3}" / f"{number:03}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes([number % 256]) * (size + number))
    return contents(folder)


def put(bucket, count=12, prefix="set/train"):
    expected = {f"part {n % 3}/{n:03}.bin": bytes([n]) * (1000 + n) for n in range(count)}
    for name, content in expected.items():
        bucket.put_object(Bucket="my-bucket", Key=f"{prefix}/{name}", Body=content)
    return expected


def contents(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_a_prefix_of_s3_is_copied_once_and_used_again(node, bucket, aws):
    expected = put(bucket)
    folder, said = node.stage("s3://my-bucket/set/train")
    assert contents(folder) == expected
    assert folder.is_relative_to(node.disk)
    assert "data.train: copying 12.1 kB in 12 files from s3://my-bucket/set/train to " in said
    assert node.record()["copied"] == node.record()["size"] == sum(map(len, expected.values()))
    aws.requests.clear()
    again, said = node.stage("s3://my-bucket/set/train")
    assert (again, contents(again)) == (folder, expected)
    assert "reusing the complete copy in" in said
    assert {request.path.partition("?")[0] for request in aws.requests} == {"/my-bucket"}


def test_a_changed_source_gets_another_folder(node, tmp_path):
    """A job that still reads the old copy is not disturbed."""
    source = tmp_path / "source"
    before = write(source)
    first, _ = node.stage(source)
    (source / "part 0/000.bin").write_bytes(b"new")
    second, _ = node.stage(source)
    assert contents(first) == before
    assert contents(second) == contents(source)


def test_each_node_of_three_gets_its_share(node, tmp_path):
    source = tmp_path / "source"
    expected = write(source)
    started = [node.start(source, "shard", NODE=str(n), COUNT="3") for n in range(3)]
    folders = [
        json.loads(one.communicate(timeout=300)[0])["DEPLOYKIT_DATA_TRAIN"] for one in started
    ]
    shares = [contents(Path(folder)) for folder in folders]
    assert [list(share) for share in shares] == [sorted(expected)[n::3] for n in range(3)]
    assert {**shares[0], **shares[1], **shares[2]} == expected


def test_fewer_files_than_nodes_have_no_shares(node, tmp_path):
    source = tmp_path / "source"
    write(source, 2)
    folder, said = node.stage(source, "shard", NODE="2", COUNT="3")
    assert folder is None
    assert "has 2 files, too few to give each of 3 nodes a share" in said


def test_node_0_copies_for_all(node, tmp_path):
    source = tmp_path / "source"
    expected = write(source)
    started = [node.start(source, "shared", NODE=str(n), COUNT="3") for n in (2, 1, 0)]
    ended = [one.communicate(timeout=300) for one in started]
    (folder,) = {json.loads(out)["DEPLOYKIT_DATA_TRAIN"] for out, _ in ended}
    assert contents(Path(folder)) == expected
    assert Path(folder).is_relative_to(node.run_dir)
    assert [said.count("copying") for _, said in ended] == [0, 0, 1]


def test_the_others_end_if_node_0_fails(node, tmp_path):
    record = {"exit_code": 78, "reason": "", "rank": None, "finished": "", "attempt": 0}
    (node.run_dir / "exit_records/node-0.json").write_text(json.dumps(record))
    folder, said = node.stage(tmp_path / "gone", "shared", NODE="1", COUNT="2")
    assert (folder, said.strip()) == (
        None,
        "data.train: node 0 did not copy the data; see its log.",
    )


def test_a_single_file_stays_one(node, tmp_path):
    (tmp_path / "train.csv").write_text("1,2\n")
    path, _ = node.stage(tmp_path / "train.csv")
    assert path.name == "train.csv"
    assert path.read_text() == "1,2\n"


def test_links_are_followed(node, tmp_path):
    source = tmp_path / "snapshots"
    blobs = tmp_path / "blobs"
    expected = write(blobs)
    source.mkdir()
    (source / "deep").symlink_to(blobs)
    (source / "one.bin").symlink_to(blobs / "part 0/000.bin")
    folder, _ = node.stage(source)
    named = {f"deep/{name}": content for name, content in expected.items()}
    assert contents(folder) == {**named, "one.bin": expected["part 0/000.bin"]}
    assert not any(path.is_symlink() for path in folder.rglob("*"))


@pytest.mark.parametrize("kind", ["folder", "s3"])
@pytest.mark.slow
def test_a_node_killed_ten_times_completes_the_copy(node, tmp_path, bucket, aws, kind):
    """Each kill comes later, somewhere in the copy; what is there is not copied again."""
    if kind == "folder":
        source = tmp_path / "source"
        expected = write(source, 400, 20_000)
    else:
        source, expected = "s3://my-bucket/set/train", put(bucket, 60)
    for number in range(10):
        process = node.start(source)
        assert "data.train: " in process.stderr.readline()  # the copy begins
        time.sleep(0.002 * number)
        process.kill()
        process.communicate(timeout=300)
        for folder in node.disk.glob("*/*[0-9a-f]"):
            assert contents(folder) == expected
    folder, _ = node.stage(source)
    assert contents(folder) == expected
    assert not list(folder.parent.glob("*.part-*"))


def test_what_an_interrupted_copy_has_left_is_not_copied_again(node, bucket, aws):
    expected = put(bucket)
    folder, _ = node.stage("s3://my-bucket/set/train")
    half = folder.rename(folder.with_name(f"{folder.name}.part-{os.uname().nodename}"))
    (half / "part 1/001.bin").unlink()
    (half / "part 2/002.bin").write_bytes(b"short")
    (half / "part 2/002.bin.1aB2cD3e").write_bytes(b"half")
    aws.requests.clear()
    folder, said = node.stage("s3://my-bucket/set/train")
    assert contents(folder) == expected
    assert "copying 2 kB in 2 files" in said
    got = {request.path for request in aws.requests if request.path.endswith(".bin")}
    assert got == {"/my-bucket/set/train/part%201/001.bin", "/my-bucket/set/train/part%202/002.bin"}


def test_files_that_a_cleaner_has_deleted_are_copied_again(node, tmp_path):
    source = tmp_path / "source"
    expected = write(source)
    folder, _ = node.stage(source)
    (folder / "part 1/001.bin").unlink()
    again, said = node.stage(source)
    assert (again, contents(again)) == (folder, expected)
    assert "in 1 file from" in said


def test_two_jobs_on_one_node_do_not_disturb_each_other(node, tmp_path):
    source = tmp_path / "source"
    expected = write(source, 300)
    started = [node.start(source) for _ in range(4)]
    ended = [one.communicate(timeout=300) for one in started]
    (folder,) = {json.loads(out)["DEPLOYKIT_DATA_TRAIN"] for out, _ in ended}
    assert contents(Path(folder)) == expected
    assert sum("copied in" in said for _, said in ended) == 1


def test_a_copy_waits_for_another_process_and_says_so(node, tmp_path):
    source = tmp_path / "source"
    write(source)
    folder, _ = node.stage(source)
    with Path(f"{folder}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        process = node.start(source)
        assert "waiting for another process to copy it to" in process.stderr.readline()
        assert process.poll() is None
    assert json.loads(process.communicate(timeout=300)[0])


def test_a_file_that_shrinks_meanwhile_is_named(node, tmp_path):
    """It is cut after it was listed, and before it is copied."""
    source = tmp_path / "source"
    write(source, 5)
    short = source / "part 1/001.bin"
    size = short.stat().st_size
    listed = STAGE.replace(
        "try:",
        "copy = staging.Folder.download\n"
        "def shrunk(*given):\n"
        f"    os.truncate({str(short)!r}, {size - 1})\n"
        "    copy(*given)\n"
        "staging.Folder.download = shrunk\n"
        "try:",
    )
    env = {
        **os.environ,
        "DEPLOYKIT_STAGE": json.dumps(
            {"train": {"path": str(source), "stage": "node", "stage_folder": str(node.disk)}}
        ),
    }
    argv = [sys.executable, "-c", listed, str(ENTRYPOINTS)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "part 1/001.bin is incomplete in" in done.stderr


def test_a_disk_that_is_too_small_is_found_before_the_copy(node, tmp_path):
    source = tmp_path / "source"
    write(source, 20, 40_000)
    small = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    small += [f'mount -t tmpfs -o size=500k none "{node.disk}" && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], check=False, capture_output=True).returncode:
        pytest.skip("optional: this machine does not let users mount")
    process = node.start(source, prefix=small)
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "data.train needs 819.2 kB in " in said
    assert "which has 512 kB free. Delete old copies there, or set stage_folder" in said


def test_a_disk_that_fills_up_meanwhile_is_named(node, tmp_path):
    """RLIMIT_FSIZE stands for it: the space was there when the copy began."""
    source = tmp_path / "source"
    write(source, 3, 100_000)
    process = node.start(
        source, prefix=["bash", "-c", 'ulimit -f 50; trap "" XFSZ; exec "$@"', "sh"]
    )
    _, said = process.communicate(timeout=300)
    assert process.returncode == 1
    assert "data.train could not be copied to this node: File too large (" in said
    assert ".bin)." in said


SENTENCES = {
    "no bucket": ("s3://no-such-bucket/x", "The specified bucket does not exist"),
    "no files": ("s3://my-bucket/nothing", "there are no files in s3://my-bucket/nothing."),
    "no folder": ("/no/such/folder", "No such file or directory (/no/such/folder)."),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_what_is_missing_is_said_in_a_sentence(node, bucket, case):
    path, why = SENTENCES[case]
    folder, said = node.stage(path)
    assert folder is None
    assert why in said
    assert "Traceback" not in said


def test_without_permission_it_is_said_in_a_sentence(node, bucket, enforced):
    put(bucket, 1)
    enforced()
    folder, said = node.stage("s3://my-bucket/set/train")
    assert folder is None
    assert "data.train could not be copied to this node: s3://my-bucket/set/train could not" in said
    assert "Traceback" not in said


def test_a_secret_key_of_the_job_opens_the_bucket(node, bucket, enforced):
    """As resolved on the node: in the variables of the ranks, not in those of the launcher."""
    iam = boto3.client("iam", region_name="us-east-1")
    iam.create_user(UserName="reader")
    key = iam.create_access_key(UserName="reader")["AccessKey"]
    rule = {"Effect": "Allow", "Action": "s3:*", "Resource": "*"}
    text = json.dumps({"Version": "2012-10-17", "Statement": [rule]})
    iam.put_user_policy(UserName="reader", PolicyName="read", PolicyDocument=text)
    put(bucket, 1)
    enforced()
    keys = {
        "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
        "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
    }
    folder, said = node.stage("s3://my-bucket/set/train", RESOLVED=json.dumps(keys))
    assert folder is not None, said


@pytest.mark.slow
def test_a_connection_that_drops_names_the_object(node, bucket, aws):
    put(bucket, 3)
    refused = "/my-bucket/set/train/part%201/001.bin"
    aws.respond = lambda one, forward: None if one.path == refused else forward()
    folder, said = node.stage("s3://my-bucket/set/train", AWS_MAX_ATTEMPTS="2")
    assert folder is None
    assert "s3://my-bucket/set/train/part 1/001.bin could not be downloaded: " in said
    assert "Traceback" not in said


@pytest.mark.slow
def test_throttled_requests_are_repeated(node, bucket, aws):
    expected = put(bucket, 3)
    slow = (503, [], b"<Error><Code>SlowDown</Code><Message>Slow down</Message></Error>")
    refused = set()

    def respond(one, forward):
        if one.path in refused:
            return forward()
        refused.add(one.path)
        return slow

    aws.respond = respond
    folder, _ = node.stage("s3://my-bucket/set/train")
    assert contents(folder) == expected
    assert len(refused) == 4  # the list and three objects


def test_an_object_cannot_leave_the_folder(node, bucket):
    bucket.put_object(Bucket="my-bucket", Key="set/train/../../escaped", Body=b"x")
    folder, said = node.stage("s3://my-bucket/set/train")
    assert folder is None
    assert "is not valid on the node" in said
    assert not list(node.disk.rglob("escaped"))


def test_a_folder_of_another_user_is_not_used(node, tmp_path):
    source = tmp_path / "source"
    write(source)
    (tmp_path / "elsewhere").mkdir()
    (node.disk / f"deploykit-{os.getuid()}").symlink_to(tmp_path / "elsewhere")
    folder, said = node.stage(source)
    assert folder is None
    assert "belongs to another user, or other users can change it" in said
    assert "set stage_folder" in said


def test_the_default_folder_is_the_first_that_is_writable(node, tmp_path):
    source = tmp_path / "source"
    write(source)
    (tmp_path / "of the job").mkdir()
    variables = {
        "DEPLOYKIT_STAGE": json.dumps({"train": {"path": str(source), "stage": "node"}}),
        "SLURM_TMPDIR": str(tmp_path / "of the job"),
    }
    folder, _ = node.stage(source, **variables)
    assert folder.is_relative_to(tmp_path / "of the job")
    assert folder.parent.stat().st_mode & 0o777 == 0o700


def test_a_variable_that_the_node_lacks_is_named(node, tmp_path):
    channel = {"path": str(tmp_path), "stage": "node", "stage_folder": "$NO_SUCH_DISK/x"}
    write(tmp_path / "source")
    folder, said = node.stage(tmp_path, DEPLOYKIT_STAGE=json.dumps({"train": channel}))
    assert folder is None
    assert "data.train.stage_folder is $NO_SUCH_DISK/x, which is not an absolute path" in said


def test_data_that_the_node_does_not_see(node, tmp_path):
    """All of them at once, with what was probably meant; an address is not a folder."""
    (tmp_path / "imagenet").mkdir()
    seen = {"DEPLOYKIT_DATA_THERE": str(tmp_path), "DEPLOYKIT_DATA_FAR": "s3://bucket/train"}
    missing = {"LEFT": f"{tmp_path}/imagnet/", "RIGHT": f"{tmp_path}/x/y/z"}
    named = {f"DEPLOYKIT_DATA_{name}": location for name, location in missing.items()}
    folder, said = node.stage(tmp_path / "imagenet", **seen, **named)
    assert folder is None
    assert said.startswith(
        f"data.left: {missing['LEFT']} was not found on this node. Did you mean "
        f"{tmp_path}/imagenet? data.right: {missing['RIGHT']} was not found on this node. "
        f"Only {tmp_path} exists here"
    )
    assert "data.there" not in said
    assert "data.far" not in said
