"""`deploykit fetch`: from S3 by way of a moto server, and on this machine."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import tarfile
import threading
from functools import partial
from pathlib import Path
from urllib.parse import unquote

import boto3
import pytest

from deploykit.backends.sagemaker import aws as clients
from deploykit.cli import main as cli
from tests.aws_server import SECTION, BrokenOff
from tests.backends.slurm.slurm_helpers import wait_for

BUCKET = "my-bucket"
BIG = bytes(range(256)) * 40_000  # over 8 MiB: several parts
PLAIN = ("--backend", "local", "--set", "entrypoint.launcher=python")
"""Without torchrun, which would import torch."""
KILL_AT = str(Path(__file__).parents[1] / "kill_at.py")


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


def on(part, answer):
    """Give another answer to requests for paths with this part."""
    return lambda one, forward: answer(forward) if part in one.path else forward()


def error(status, code):
    text = f"<Error><Code>{code}</Code><Message>{code} was answered</Message></Error>".encode()
    return lambda _: (status, [], text)


def half(forward):
    status, headers, content = forward()
    return status, headers, BrokenOff(content)


FAULTS = {
    "no bucket": on("list-type", error(404, "NoSuchBucket")),
    "may not list": on("list-type", error(403, "AccessDenied")),
    "may not read": on("step-1/b", error(403, "AccessDenied")),
    "throttled": on("step-1/b", error(503, "SlowDown")),
    "dropped": on("step-1/b", lambda _: None),
    "dropped in the middle": on("step-1/b", half),
    "damaged": on("step-1/b", lambda forward: (*forward()[:2], b"sEcond")),
}
SENTENCES = {
    "no bucket": (76, "s3://my-bucket/ckpt/a: AWS .*NoSuchBucket was answered", ""),
    "may not list": (77, "ckpt/a: AWS .*AccessDenied", "grant s3:ListBucket to"),
    "may not read": (77, "step-1/b: AWS .*AccessDenied", "grant s3:GetObject to"),
    "throttled": (75, "step-1/b: AWS .*SlowDown", "AWS is busy; try again in a minute"),
    "dropped": (69, "step-1/b: cannot reach AWS in us-east-1: Connection", "check the network"),
    "dropped in the middle": (75, "step-1/b: the connection was lost: ", "run the same command"),
    "damaged": (75, "step-1/b: the object changed or was corrupted", "run the same command again"),
}
"""By the fault: the exit code, a pattern of what is said, and the next step."""


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
        requests = property(lambda _: aws.requests)

    return Bucket()


def _folder(deploykit):
    (row,) = deploykit("status", "digits-1")
    return row["folder"]


class Killing:
    """Answers for the server: `count` files, then it waits for `enough()` and kills the process."""

    def __init__(self, count, enough):
        self.count, self.enough, self.process = count, enough, None
        self.answered, self.killer = set(), None
        self.lock, self.killed = threading.Lock(), threading.Event()

    def __call__(self, one, forward):
        if one.method == "GET" and "/ckpt/a/" in one.path and not self._is_answered(one.path):
            if self.killer == one.path:
                wait_for(self.enough, 120)
                self.process.kill()
                self.killed.set()
            self.killed.wait(120)
            return None
        return forward()

    def _is_answered(self, path):
        """Whether the file is among the first; they may be requested again, and in parts."""
        with self.lock:
            if len(self.answered) < self.count:
                self.answered.add(path)
            elif path not in self.answered:
                self.killer = self.killer or path
            return path in self.answered


def fetched(aws):
    """The names of the checkpoints' files that were requested."""
    return {unquote(path).partition("/ckpt/a/")[2] for path in _downloads(aws) if "/ckpt/" in path}


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
        assert dry["price"].startswith("AWS charges up to 0.01 USD to download ")
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

    @pytest.mark.slow
    def test_after_ten_kills_no_file_is_half_and_none_was_copied_twice(self, job, tmp_path, aws):
        expected = {f"step-{n % 3}/{n:03}.bin": bytes([n]) * (50_000 + n) for n in range(90)}
        expected["step-3/big.distcp"] = BIG
        for name, content in expected.items():
            job.put_checkpoint(name, content)
        target, before = tmp_path / "to/checkpoints", set()
        argv = [sys.executable, "-m", "deploykit", "fetch", "digits-1", "--checkpoints"]
        argv += ["--to", str(target.parent)]

        def here():
            return {name for name in expected if (target / name).exists()}

        def kill(before):
            """Kill a fetch when a few more files have their names, and others are on their way."""
            aws.respond = killing = Killing(5, lambda: len(here() - before) >= 4)
            aws.requests.clear()
            killing.process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
            assert killing.process.wait(300) == -signal.SIGKILL
            assert fetched(aws).isdisjoint(before)
            return here()

        for _ in range(10):
            before = kill(before)
            assert all((target / name).read_bytes() == expected[name] for name in before)
        aws.respond = lambda _, forward: forward()
        aws.requests.clear()
        assert subprocess.run(argv, stdout=subprocess.DEVNULL, check=False).returncode == 0
        assert fetched(aws) == expected.keys() - before
        assert {name: (target / name).read_bytes() for name in here()} == expected
        assert len([path for path in target.rglob("*") if path.is_file()]) == len(expected)

    def test_a_killed_fetch_of_an_archive_unpacks_what_is_there(self, job, tmp_path, aws):
        job.put_result("model.tar.gz", archive({"model.pt": "weights"}))
        target = tmp_path / "to"
        words = ["fetch", "digits-1", "--to", str(target)]
        argv = [sys.executable, KILL_AT, "before", "deploykit.lib.untar:extract_all", "--", *words]
        assert subprocess.run(argv, check=False).returncode == -signal.SIGKILL
        aws.requests.clear()
        assert cli.main(words) == 0
        assert job.downloads == []
        assert (target / "model/model.pt").read_text() == "weights"
        assert not list(target.rglob("*.gz"))

    def test_a_file_that_was_changed_here_is_not_replaced(self, job, deploykit, tmp_path):
        job.put_checkpoint("notes.txt", b"from the job")
        wanted = ("fetch", "digits-1", "--checkpoints", "--to", str(tmp_path / "to"))
        deploykit(*wanted)
        mine = tmp_path / "to/checkpoints/notes.txt"
        mine.write_text("mine, longer than before")
        assert deploykit(*wanted)["files"] == []
        assert mine.read_text() == "mine, longer than before"

    def test_each_object_takes_one_request(self, job, deploykit, tmp_path):
        """The listing tells size and ETag, so s3transfer need not ask."""
        job.put_checkpoint("small", b"x" * 1000)
        job.put_checkpoint("step-1/big.distcp", BIG)
        before = len(job.requests)
        deploykit("fetch", "digits-1", "--checkpoints", "--to", str(tmp_path / "to"))
        asked = [one for one in job.requests[before:] if "list-type" not in one.path]
        assert {one.method for one in asked if "/ckpt/" in one.path} == {"GET"}
        assert len([one for one in asked if one.path.endswith("small")]) == 1
        ranges = [one.headers.get("range") for one in asked if one.path.endswith("distcp")]
        assert sorted(ranges) == ["bytes=0-8388607", "bytes=8388608-"]

    def test_hostile_archives_and_names(self, job, deploykit, tmp_path):
        job.put_result("output.tar.gz", archive({"ok": "1"}, name_of_link="out"))
        target = tmp_path / "to"
        refused = deploykit("fetch", "digits-1", "--to", str(target), code=73)
        assert "cannot unpack" in refused["message"]
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
        assert "its path leads outside the target folder" in escape["message"]

    @pytest.mark.parametrize("case", SENTENCES)
    def test_what_stops_a_fetch_is_a_sentence(self, job, tmp_path, aws, capsys, monkeypatch, case):
        """And the next fetch copies what is missing."""
        monkeypatch.setattr(clients, "client", partial(clients.client, attempts=1))
        code, said, next_step = SENTENCES[case]
        job.put_checkpoint("step-1/a", b"first")
        job.put_checkpoint("step-1/b", b"second")
        aws.respond = FAULTS[case]
        words = ["fetch", "digits-1", "--checkpoints", "--to", str(tmp_path / "to")]
        assert cli.main(words) == code
        shown = capsys.readouterr().err
        assert re.search(said, shown), shown
        assert next_step in shown
        assert not (tmp_path / "to/checkpoints/step-1/b").exists()
        aws.respond = lambda _, forward: forward()
        assert cli.main(words) == 0
        assert (tmp_path / "to/checkpoints/step-1/b").read_bytes() == b"second"

    def test_a_disk_that_is_full_is_a_sentence(self, job, tmp_path):
        """A limit on the size of files stands for it."""
        job.put_checkpoint("big.distcp", BIG)
        words = ["fetch", "digits-1", "--checkpoints", "--to", str(tmp_path / "to")]
        limit = ["bash", "-c", 'ulimit -f 4000; trap "" XFSZ; exec "$@"', "sh"]
        argv = [*limit, sys.executable, "-m", "deploykit", *words]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert done.returncode == 73
        assert f"error: cannot copy to {tmp_path / 'to'}: File too large" in done.stderr
        assert "free some space there or choose another folder with --to" in done.stderr
        assert [path.name for path in (tmp_path / "to").rglob("*") if path.is_file()] == [
            ".deploykit-fetched.json"
        ]
        assert cli.main(words) == 0
        assert (tmp_path / "to/checkpoints/big.distcp").read_bytes() == BIG

    def test_a_missing_permission_is_a_sentence(self, job, deploykit, tmp_path, aws):
        job.put_result("output.tar.gz", archive({"ok": "1"}))
        denied = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        aws.respond = lambda one, forward: (
            (403, [], denied) if one.method == "GET" and "output" in one.path else forward()
        )
        error = deploykit("fetch", "digits-1", "--to", str(tmp_path / "to"), code=77)
        assert "Access Denied" in error["message"]


@pytest.mark.aws
@pytest.mark.slow
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
    row = deploykit("submit", *PLAIN)
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
    assert cli.main(["submit", *PLAIN, "--run", "elsewhere", "--wait"]) == 0
    capsys.readouterr()
    assert cli.main(["fetch", "elsewhere"]) == 0
    shown = capsys.readouterr()
    assert "add this to the job file: outputs: [model.pt]" in shown.err
    assert "output: already on this machine, in " in shown.out


def test_a_run_that_wrote_only_checkpoints_says_how_to_copy_them(project, capsys, tmp_path):
    script = "import os; open(os.environ['DEPLOYKIT_CHECKPOINT_DIR'] + '/a.pt', 'w').write('w')\n"
    (project / "train.py").write_text(script)
    assert cli.main(["submit", *PLAIN, "--run", "kept", "--wait"]) == 0
    assert cli.main(["fetch", "kept"]) == 0
    assert "use --checkpoints --to FOLDER" in capsys.readouterr().err
    assert cli.main(["fetch", "kept", "--to", str(tmp_path / "to")]) == 0
    assert "kept: no files were found to copy\n" in capsys.readouterr().out
    assert cli.main(["fetch", "kept", "--checkpoints", "--to", str(tmp_path / "to")]) == 0
    assert (tmp_path / "to/checkpoints/a.pt").read_text() == "w"


@pytest.mark.aws
def test_wait_says_when_there_is_nothing_to_fetch(job, project, aws, capsys):
    assert cli.main(["wait", "digits-1", "--fetch"]) == 0
    assert "digits-1: no results were found to copy\n" in capsys.readouterr().err
    assert not (project / "digits-1").exists()
