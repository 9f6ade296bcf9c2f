"""What a login node answers that means harm: nothing is written but in the run's own folder."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest
from foreign import files, given, made, odd, outcome, soup, spoiled

from deploykit import shell
from deploykit.backends.slurm import machine, remote, watching
from deploykit.backends.slurm.sent import Place
from deploykit.errors import BackendUnavailable
from deploykit.model import Handle

PLACE = Place("login", "/there/runs/one-1")
ENDS = (
    "\t/there/runs/one-1\n"
    'ends/node-0.json:{"exit_code": 0, "reason": "", "rank": null}\n'
    'tasks/3/ends/node-1.json:{"exit_code": 1}\n'
    "claim:77\n"
)
LOGS = "logs/node-0.log 6\nhello\ntasks/12/logs/node-1.log 3\nab\n"


@pytest.fixture
def answers(monkeypatch):
    """Let every command on the login node answer so."""

    def answer(out, code=0, err=""):
        monkeypatch.setattr(machine, "run", lambda *_: (code, out, err))

    return answer


def written(folder):
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "one-1"


@given(text=spoiled(ENDS, ENDS * 2) | soup("ends/", "node-0.json", ":", "claim:", "\n", "7", "../"))
def test_ends_of_a_login_node_stay_in_the_run_s_folder(tmp_path_factory, answers, text):
    folder = run_folder(tmp_path_factory)
    folder.mkdir()
    answers(text.encode(errors="replace"))
    handle = Handle("slurm", "login", "7", "one-1", str(folder))
    outcome(remote.fetch_ends, "login", [(handle, PLACE)])
    for path in written(folder.parent):
        assert path.is_relative_to(folder), path
        assert path.name == "claim" or path.parent.name == "ends"
    claim = watching.claimed(folder)
    assert claim is None or (claim.isascii() and claim.isdigit() and len(claim) < 20)


@given(text=spoiled(LOGS, LOGS * 2) | soup("logs/", "a.log", " ", "5", "\n", "../", "tasks/1/"))
def test_logs_of_a_login_node_stay_in_the_run_s_folder(tmp_path_factory, monkeypatch, text):
    folder = run_folder(tmp_path_factory)
    folder.mkdir()
    left = [text.encode(errors="replace"), b""]
    monkeypatch.setattr(machine, "run", lambda *_: (0, left.pop(0) if left else b"", ""))
    outcome(remote.fetch_logs, PLACE, folder)
    for path in written(folder.parent):
        assert path.is_relative_to(folder), path
        assert path.parent.name == "logs"
        assert path.name.isprintable()


@given(text=spoiled("77\n", "Submitted batch job 77") | soup("7", "\n", "-"))
def test_a_job_s_number_is_a_number(answers, text):
    answers(text.encode(errors="replace"))
    job = remote.job(PLACE)
    assert job is None or (job.isascii() and job.isdigit() and len(job) < 20)


@given(content=files({"exit_code": 0}), name=made(odd))
def test_the_mark_ends_what_start_up_files_print(content, name):
    assert machine.after_mark(name.encode(errors="replace") + machine._MARK + content) in {
        content,
        content.partition(machine._MARK)[2],
    }


@pytest.mark.parametrize("answer", [b"logs/a.log one\nx", b"logs/a.log -1\nx", b"\xff", b"\n\n"])
def test_a_header_of_a_log_without_a_size_is_refused(tmp_path, answers, answer):
    """Before, each of these ended with exit code 70."""
    answers(answer)
    with pytest.raises(BackendUnavailable, match="does not send logs"):
        remote.fetch_logs(PLACE, tmp_path)


@pytest.mark.parametrize("name", ["a" * 300, "\0", "\x1b[2J", "../a", "a\r"])
def test_a_log_with_an_odd_name_is_left_there(tmp_path, answers, name):
    """Before, the first two ended with exit code 70."""
    answers(f"logs/{name}.log 1\nx".encode())
    remote.fetch_logs(PLACE, tmp_path)
    assert written(tmp_path) == []


@pytest.mark.parametrize("claim", ["", "/etc/passwd", "7; id", "9" * 5000])
def test_a_claim_that_is_no_number_is_not_kept(tmp_path, answers, claim):
    answers(f"\t/there/runs/one-1\nclaim:{claim}\n".encode())
    handle = Handle("slurm", "login", "7", "one-1", str(tmp_path))
    remote.fetch_ends("login", [(handle, PLACE)])
    assert watching.claimed(tmp_path) is None


@pytest.mark.parametrize("stream", [1, 2])
def test_a_program_that_never_stops_talking_is_stopped(stream):
    """Before, its words filled the memory until the time-out, whatever their number."""
    script = f"import os\nwhile True: os.write({stream}, b'x' * (1 << 20))"
    with pytest.raises(BackendUnavailable, match="more than"):
        shell.raw([sys.executable, "-c", script])


def test_a_program_that_does_not_read_or_end_is_stopped():
    with pytest.raises(BackendUnavailable, match="timed out after"):
        shell.raw(["sleep", "600"], timeout=0.2, data=b"x" * (1 << 20))


def test_a_program_gets_and_gives_megabytes():
    data = bytes(range(256)) * (1 << 13)
    script = "import sys; sys.stderr.write('e' * 70000); b = sys.stdin.buffer.read(); "
    script += "sys.stdout.buffer.write(b[::-1]); sys.exit(3)"
    assert shell.raw([sys.executable, "-c", script], data=data) == (3, data[::-1], "e" * 70000)


def test_a_program_may_end_before_it_has_read_all():
    assert shell.raw(["true"], data=b"x" * (1 << 20)) == (0, b"", "")


def test_words_for_the_login_node_are_one_word():
    words = machine.argv("-oProxyCommand=touch pwned", "echo $(id)")
    assert words[words.index("--") + 1] == "-oProxyCommand=touch pwned"
    assert shlex.split(words[-1])[:2] == ["sh", "-c"]
    assert Path("pwned").exists() is False


def test_a_million_empty_logs_take_no_more_than_their_bytes(tmp_path, monkeypatch):
    """Before, the rest of the answer was copied for each: minutes for eight megabytes."""
    left = [b" 0\n" * (1 << 20)]
    monkeypatch.setattr(machine, "run", lambda *_: (0, left.pop() if left else b"", ""))
    began = time.process_time()
    remote.fetch_logs(PLACE, tmp_path)
    assert time.process_time() - began < 60
    assert left == []
