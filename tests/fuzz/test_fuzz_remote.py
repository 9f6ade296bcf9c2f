"""Hostile answers of a login node: files are written only in the run's own folder."""

from __future__ import annotations

import shlex
import sys

import pytest

from deploykit.backends.slurm import arrays, remote
from deploykit.backends.slurm.remote import RemoteFolder
from deploykit.job.model import Handle
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable
from tests.fuzz.foreign import files, given, made, odd, outcome, soup, spoiled

REMOTE = RemoteFolder("login", "/remote/runs/one-1")
ENDS = (
    "\t/remote/runs/one-1\n"
    'exit_records/node-0.json:{"exit_code": 0, "reason": "", "rank": null}\n'
    'tasks/3/exit_records/node-1.json:{"exit_code": 1}\n'
    "claim:77\n"
)
LOGS = "logs/node-0.log 6\nhello\ntasks/12/logs/node-1.log 3\nab\n"


@pytest.fixture
def answers(monkeypatch):
    """A function that sets the answer of every command on the login node."""

    def answer(out, code=0, err=""):
        monkeypatch.setattr(remote, "run", lambda *_: (code, out, err))

    return answer


def written(folder):
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "one-1"


@given(
    text=spoiled(ENDS, ENDS * 2)
    | soup("exit_records/", "node-0.json", ":", "claim:", "\n", "7", "../")
)
def test_exit_records_of_a_login_node_stay_in_the_run_folder(tmp_path_factory, answers, text):
    folder = run_folder(tmp_path_factory)
    folder.mkdir()
    answers(text.encode(errors="replace"))
    handle = Handle("slurm", "login", "7", "one-1", str(folder))
    outcome(remote.fetch_exit_records, "login", [(handle, REMOTE)])
    for path in written(folder.parent):
        assert path.is_relative_to(folder), path
        assert path.name == "claim" or path.parent.name == "exit_records"
    claim = arrays.claimed_by(folder)
    assert claim is None or (claim.isascii() and claim.isdigit() and len(claim) < 20)


@given(text=spoiled(LOGS, LOGS * 2) | soup("logs/", "a.log", " ", "5", "\n", "../", "tasks/1/"))
def test_logs_of_a_login_node_stay_in_the_run_folder(tmp_path_factory, monkeypatch, text):
    folder = run_folder(tmp_path_factory)
    folder.mkdir()
    left = [text.encode(errors="replace"), b""]
    monkeypatch.setattr(remote, "run", lambda *_: (0, left.pop(0) if left else b"", ""))
    outcome(remote.fetch_logs, REMOTE, folder)
    for path in written(folder.parent):
        assert path.is_relative_to(folder), path
        assert path.parent.name == "logs"
        assert path.name.isprintable()


@given(text=spoiled("77\n", "Submitted batch job 77") | soup("7", "\n", "-"))
def test_a_job_id_is_a_number(answers, text):
    answers(text.encode(errors="replace"))
    job = remote.find_job(REMOTE)
    assert job is None or (job.isascii() and job.isdigit() and len(job) < 20)


@given(content=files({"exit_code": 0}), name=made(odd))
def test_output_before_the_mark_is_dropped(content, name):
    assert remote._after_mark(name.encode(errors="replace") + remote._MARK + content) in {
        content,
        content.partition(remote._MARK)[2],
    }


@pytest.mark.parametrize("answer", [b"logs/a.log one\nx", b"logs/a.log -1\nx", b"\xff", b"\n\n"])
def test_a_header_of_a_log_without_a_size_is_refused(tmp_path, answers, answer):
    """Regression: each ended with exit code 70."""
    answers(answer)
    with pytest.raises(BackendUnavailable, match="instead of a log"):
        remote.fetch_logs(REMOTE, tmp_path)


@pytest.mark.parametrize("name", ["a" * 300, "\0", "\x1b[2J", "../a", "a\r"])
def test_a_log_with_an_odd_name_is_skipped(tmp_path, answers, name):
    """Regression: the first two ended with exit code 70."""
    answers(f"logs/{name}.log 1\nx".encode())
    remote.fetch_logs(REMOTE, tmp_path)
    assert written(tmp_path) == []


@pytest.mark.parametrize("claim", ["", "/etc/passwd", "7; id", "9" * 5000])
def test_a_claim_that_is_not_a_number_is_dropped(tmp_path, answers, claim):
    answers(f"\t/remote/runs/one-1\nclaim:{claim}\n".encode())
    handle = Handle("slurm", "login", "7", "one-1", str(tmp_path))
    remote.fetch_exit_records("login", [(handle, REMOTE)])
    assert arrays.claimed_by(tmp_path) is None


@pytest.mark.parametrize("stream", [1, 2])
def test_a_program_with_endless_output_is_stopped(stream):
    """Regression: its output filled the memory until the timeout."""
    script = f"import os\nwhile True: os.write({stream}, b'x' * (1 << 20))"
    with pytest.raises(BackendUnavailable, match="more than"):
        shell.raw([sys.executable, "-c", script])


def test_a_program_that_does_not_read_or_end_is_stopped():
    with pytest.raises(BackendUnavailable, match="timed out after"):
        shell.raw(["sleep", "600"], timeout=0.2, data=b"x" * (1 << 20))


def test_megabytes_pass_in_both_directions():
    data = bytes(range(256)) * (1 << 13)
    script = "import sys; sys.stderr.write('e' * 70000); b = sys.stdin.buffer.read(); "
    script += "sys.stdout.buffer.write(b[::-1]); sys.exit(3)"
    assert shell.raw([sys.executable, "-c", script], data=data) == (3, data[::-1], "e" * 70000)


def test_a_program_may_exit_before_it_has_read_its_input():
    assert shell.raw(["true"], data=b"x" * (1 << 20)) == (0, b"", "")


def test_the_script_for_the_login_node_is_one_argument():
    words = remote.argv("-oProxyCommand=touch pwned", "echo $(id)")
    assert words[words.index("--") + 1] == "-oProxyCommand=touch pwned"
    assert shlex.split(words[-1])[:2] == ["sh", "-c"]


class Answer(bytes):
    """An answer of which no part may be copied by slicing."""

    def __getitem__(self, _):
        raise AssertionError("a part of the answer was copied")


@pytest.mark.slow
def test_a_million_empty_logs_are_read_without_copying_the_rest_each_time(tmp_path, monkeypatch):
    """Regression: the rest was copied for each log, which took minutes for eight megabytes."""
    answers = [Answer(b" 0\n" * (1 << 20))]
    monkeypatch.setattr(remote, "run", lambda *_: (0, answers.pop() if answers else b"", ""))
    remote.fetch_logs(REMOTE, tmp_path)
    assert answers == []
    assert written(tmp_path) == []
