"""`deploykit fetch`: from S3 by way of a moto server, and on this machine."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import boto3
import pytest

from deploykit.cli import main as cli
from tests.aws_server import SECTION

BUCKET = "my-bucket"
BIG = bytes(range(256)) * 40_000  # over 8 MiB: several parts


def archive(files, name_of_link=None):
    """A gzipped tar archive of texts by name, with a link that leads out if asked for."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as opened:
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            opened.addfile(member, io.BytesIO(text.encode()))
        if name_of_link:
            link = tarfile.TarInfo(name_of_link)
            link.type, link.linkname = tarfile.SYMTYPE, "/nowhere/at/all"
            opened.addfile(link)
    return made.getvalue()


@pytest.fixture
def deploykit(capsys):
    """Run a command; returns its JSON. With a code other than 0, what it printed."""

    def run(*argv, code=0):
        capsys.readouterr()
        ended = cli.main([*argv, "--json"])
        shown = capsys.readouterr()
        assert ended == code, shown.out + shown.err
        data = json.loads(shown.out)
        return data["error"] if code else data

    return run


@pytest.fixture
def job(aws, project, deploykit):
    """A job on SageMaker with results and checkpoints in S3; returns functions on its objects."""
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION + f"checkpoints: s3://{BUCKET}/ckpt/a\n")
    deploykit("submit", "--backend", "sagemaker", "--run", "digits-1")
    client = boto3.client("s3", "us-east-1")
    plan = json.loads(Path(_folder(deploykit), "plan.json").read_text())
    results = f"{plan['OutputDataConfig']['S3OutputPath']}/digits-1/output/"

    class Bucket:
        def put(self, location, content):
            key = location.removeprefix(f"s3://{BUCKET}/")
            client.put_object(Bucket=BUCKET, Key=key, Body=content)

        def put_result(self, name, content):
            self.put(results + name, content)

        def put_checkpoint(self, name, content):
            self.put(f"s3://{BUCKET}/ckpt/a/{name}", content)

        downloads = property(lambda _: _downloads(aws))

    return Bucket()


def _folder(deploykit):
    (row,) = deploykit("status", "digits-1")
    return row["folder"]


def _downloads(aws):
    """Paths of the objects whose content was requested."""
    return [one.path for one in aws.requests if one.method == "GET" and "list-type" not in one.path]


@pytest.mark.aws
class TestFromS3:
    def test_results_are_unpacked_and_not_downloaded_twice(self, job, deploykit, tmp_path):
        job.put_result("output.tar.gz", archive({"metrics.jsonl": "{}", "deep/er/a.txt": "x"}))
        job.put_result("model.tar.gz", archive({"model.pt": "weights"}))
        target = tmp_path / "here"
        dry = deploykit("fetch", "digits-1", "--to", str(target), "--dry-run")
        assert [one["path"] for one in dry["files"]] == [
            "output/model.tar.gz",
            "output/output.tar.gz",
        ]
        assert dry["price"].startswith("AWS bills up to 0.01 USD to download ")
        assert not target.exists()
        before = len(job.downloads)

        done = deploykit("fetch", "digits-1", "--to", str(target))
        assert done["bytes"] == dry["bytes"] > 0
        assert (target / "model/model.pt").read_text() == "weights"
        assert (target / "output/deep/er/a.txt").read_text() == "x"
        assert not list(target.rglob("*.gz"))
        asked = len(job.downloads)
        assert asked > before

        again = deploykit("fetch", "digits-1", "--to", str(target))
        assert (again["files"], again["unchanged"]) == ([], 2)
        assert len(job.downloads) == asked
        job.put_result("model.tar.gz", archive({"model.pt": "newer weights"}))
        deploykit("fetch", "digits-1", "--to", str(target))
        assert (target / "model/model.pt").read_text() == "newer weights"

    def test_checkpoints_by_pattern_and_large_files(self, job, deploykit, tmp_path):
        job.put_checkpoint("step-1/a.distcp", b"one")
        job.put_checkpoint("step-2/a.distcp", BIG)
        job.put_checkpoint("step-2/.metadata", b"m")
        wanted = (
            "fetch",
            "digits-1",
            "-p",
            "step-2",
            "--checkpoints",
            "--to",
            str(tmp_path / "to"),
        )
        assert deploykit(*wanted)["bytes"] == len(BIG) + 1
        found = {one.name for one in (tmp_path / "to/checkpoints").rglob("*") if one.is_file()}
        assert found == {"a.distcp", ".metadata"}
        assert (tmp_path / "to/checkpoints/step-2/a.distcp").read_bytes() == BIG

        none = deploykit("fetch", "digits-1", "-p", "step-9", "--checkpoints", code=66)
        assert "no file of digits-1 matches step-9" in none["message"]
        assert "checkpoints/step-1/a.distcp" in none["hint"]

    def test_a_fetch_that_breaks_off_continues(self, job, deploykit, tmp_path, aws):
        for number in range(5):
            job.put_checkpoint(f"step-{number}/a.distcp", b"x" * 1000)

        def broken(one, forward):
            return None if one.method == "GET" and "step-3" in one.path else forward()

        aws.respond = broken
        target = tmp_path / "to"
        wanted = ("fetch", "digits-1", "--checkpoints", "--to", str(target))
        failed = deploykit(*wanted, code=69)
        assert "step-3" in failed["message"]
        assert not (target / "checkpoints/step-3/a.distcp").exists()
        assert not [
            one
            for one in target.rglob("*")
            if one.stat().st_size != 1000 and one.suffix == ".distcp"
        ]
        aws.respond = lambda one, forward: forward()
        left = deploykit(*wanted)
        assert [one["path"] for one in left["files"]] == ["checkpoints/step-3/a.distcp"]
        assert (target / "checkpoints/step-3/a.distcp").read_bytes() == b"x" * 1000

    def test_hostile_archives_and_names(self, job, deploykit, tmp_path):
        job.put_result("output.tar.gz", archive({"ok": "1"}, name_of_link="out"))
        target = tmp_path / "to"
        refused = deploykit("fetch", "digits-1", "--to", str(target), code=73)
        assert "was not unpacked" in refused["message"]
        deploykit("fetch", "digits-1", "--to", str(target), code=73)  # it is not complete
        assert not (target / "output/out").is_symlink()
        job.put_result("output.tar.gz", b"no archive at all")
        damaged = deploykit("fetch", "digits-1", "--to", str(target), code=75)
        assert "is damaged" in damaged["message"]
        job.put_result("output.tar.gz", archive({"ok": "2"}))
        deploykit("fetch", "digits-1", "--to", str(target))
        assert (target / "output/ok").read_text() == "2"
        job.put_checkpoint("../../escape", b"x")
        escape = deploykit("fetch", "digits-1", "--checkpoints", "--to", str(target), code=73)
        assert "its name leaves the target folder" in escape["message"]

    def test_a_missing_permission_is_a_sentence(self, job, deploykit, tmp_path, aws):
        job.put_result("output.tar.gz", archive({"ok": "1"}))
        denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        aws.respond = lambda one, forward: (
            (403, [], denied) if one.method == "GET" and "output" in one.path else forward()
        )
        error = deploykit("fetch", "digits-1", "--to", str(tmp_path / "to"), code=77)
        assert "Access Denied" in error["message"]


@pytest.mark.aws
def test_wait_fetches_and_rm_removes_what_is_far_away(job, deploykit, project, aws):
    for number in range(1001):  # more than one request can delete
        job.put_result(f"data/{number}", b"x")
    job.put_checkpoint("step-1/a", b"of other runs, too")
    deploykit("wait", "digits-1", "--fetch")
    assert len(list((project / "digits-1/output/data").iterdir())) == 1001

    refused = deploykit("rm", "digits-1", "--remote", code=64)
    assert "--yes" in refused["hint"]
    assert deploykit("status", "digits-1")[0]["state"] == "succeeded"
    (removed,) = deploykit("rm", "digits-1", "--remote", "--yes")
    assert removed["left"] == [{"location": "s3://my-bucket/ckpt/a", "command": None}]
    client = boto3.client("s3", "us-east-1")
    left = [one["Key"] for one in client.list_objects_v2(Bucket=BUCKET)["Contents"]]
    assert [key for key in left if "digits-1" in key] == []
    assert "ckpt/a/step-1/a" in left


def test_files_on_this_machine_are_named_and_copied_only_where_asked(project, deploykit, tmp_path):
    script = "import os; open(os.environ['DEPLOYKIT_OUTPUT_DIR'] + '/model.txt', 'w').write('w')"
    (project / "train.py").write_text(script + "\nprint('said')\n")
    row = deploykit("submit", "--backend", "local")
    deploykit("wait", row["run"])
    named = deploykit("fetch", row["run"])
    assert Path(named["on_this_machine"]["output"], "model.txt").read_text() == "w"
    target = tmp_path / "copy"
    deploykit("fetch", row["run"], "--output", "--logs", "--to", str(target))
    assert (target / "output/model.txt").read_text() == "w"
    assert "said" in (target / "logs.txt").read_text()
    assert deploykit("fetch", row["run"], "--to", str(target))["unchanged"] == 1


def test_results_in_the_working_folder_are_named(project, capsys):
    """A fetch copies nothing then, and the job file needs `outputs`."""
    (project / "train.py").write_text("open('model.pt', 'w').write('w')\n")
    assert cli.main(["submit", "--backend", "local", "--run", "elsewhere", "--wait"]) == 0
    capsys.readouterr()
    assert cli.main(["fetch", "elsewhere"]) == 0
    shown = capsys.readouterr()
    assert "add this to the job file: outputs: [model.pt]" in shown.err
    assert "output: on this machine, in " in shown.out
