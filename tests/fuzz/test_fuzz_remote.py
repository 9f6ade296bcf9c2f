"""Hostile answers of a login node: files are written only in the run's own folder."""

from __future__ import annotations

import io
import shlex
import sys
import tarfile

import pytest
from hypothesis import strategies as st

from deploykit.backends.slurm import arrays, remote
from deploykit.backends.slurm.remote import RemoteFolder
from deploykit.job.model import Handle
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable
from tests.fuzz.foreign import files, given, made, odd, outcome, soup, spoiled

REMOTE = RemoteFolder("login", "/remote/runs/one-1")
NAMES = (
    *("one-1/exit_records/node-0.json", "one-1/tasks/3/exit_records/node-1.json", "one-1/claim"),
    *("logs/node-0.log", "tasks/12/logs/node-1.log", "exit_records/history-0.jsonl"),
    *("../out.log", "/tmp/out.log", "logs/../../out.log", "tasks/../logs/a.log", "plan.sh"),
    *("logs/" + "a" * 300 + ".log", "logs/\x1b[2J.log", "logs/a\n.log", "remote.json", "logs"),
)


@pytest.fixture
def answers(monkeypatch):
    """A function that sets the answer of every command on the login node."""

    def answer(out, code=0, err=""):
        monkeypatch.setattr(remote, "run", lambda *_: (code, out, err))
        monkeypatch.setattr(remote, "_without_rsync", {"login"})

    return answer


def written(folder):
    return [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]


def run_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("run") / "one-1"


@st.composite
def archives(draw):
    """An archive of files, links and devices with odd names, perhaps damaged."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name in draw(st.lists(st.sampled_from(NAMES), max_size=6)):
            member = tarfile.TarInfo(name)
            kinds = [tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE]
            member.type = draw(st.sampled_from([*kinds, tarfile.FIFOTYPE, tarfile.CHRTYPE]))
            member.linkname = draw(
                st.sampled_from(["77", "/nowhere/at/all", "../../out", "9" * 5000])
            )
            content = b"hello\n" if member.type == tarfile.REGTYPE else b""
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    data = file.getvalue()
    cut = draw(st.integers(0, len(data)) | st.none())
    return data if cut is None else data[:cut] + draw(st.binary(max_size=20))


@given(data=archives())
def test_logs_of_a_login_node_stay_in_the_run_folder(tmp_path_factory, answers, data):
    folder = run_folder(tmp_path_factory)
    folder.mkdir()
    answers(data)
    handle = Handle("slurm", "login", "7", "one-1", str(folder))
    outcome(remote.fetch_exit_records, "login", [(handle, REMOTE)])
    outcome(remote.fetch_logs, REMOTE, folder)
    for path in written(folder.parent):
        assert path.is_relative_to(folder), path
        assert path.name.startswith("claim") or path.parent.name in {"exit_records", "logs"}
        assert path.name.isprintable()
        assert folder in path.resolve().parents
    claim = arrays.claimed_by(folder)
    assert claim is None or (claim.isascii() and claim.isdigit() and len(claim) < 20)


@given(text=spoiled("77\n", "Submitted batch job 77") | soup("7", "\n", "-"))
def test_a_job_id_is_a_number(answers, text):
    answers(text.encode(errors="replace"))
    job = remote.find_job(REMOTE)
    assert job is None or (job.isascii() and job.isdigit() and len(job) < 20)


@given(content=files({"exit_code": 0}), name=made(odd))
def test_output_before_the_mark_is_dropped(content, name):
    raw = name.encode(errors="replace") + remote._MARK + content
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shell, "raw", lambda *_, **__: (0, raw, ""))
        assert remote.run("login", "true")[1] in {content, content.partition(remote._MARK)[2]}


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
