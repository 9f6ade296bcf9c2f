"""The commit of a source folder: a hash or nothing, whatever ``.git`` contains."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import contextmanager

import pytest

from deploykit.bundle import archive as bundle
from deploykit.bundle import revision
from tests.bundle.test_bundle import tree

HASH = "0123456789abcdef0123456789abcdef01234567"
SECRET = "the-words-of-another-file"


@contextmanager
def within(seconds):
    """Seconds after which a read from a pipe is interrupted."""

    def late(*_):
        raise AssertionError("it waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def source(tmp_path):
    """A folder with the smallest repository that has a commit, and a file outside of it."""
    tree(tmp_path, {"secret.txt": SECRET, "hash.txt": HASH})
    return tree(
        tmp_path / "a/b/source",
        {
            ".git/HEAD": "ref: refs/heads/main\n",
            ".git/refs/heads/main": f"{HASH}\n",
            "train.py": "",
        },
    )


def commit(source):
    with within(10):
        return bundle.scan(source, 10**6).commit


def replace(path, content):
    path.unlink()
    path.write_bytes(content)


def test_the_smallest_repository(source):
    assert commit(source) == HASH


@pytest.mark.parametrize(
    "ref",
    [
        *("../../../../secret.txt", "../../../../hash.txt", "refs/../../../../../hash.txt"),
        *("/etc/hostname", "refs/heads/", "refs/heads/.main", "refs/heads/main.lock"),
        *("refs//heads/main", "refs/heads/a..b", "refs/heads/a b", "refs/heads/a\0b", "config"),
        *("refs/heads/main\nrefs/heads/other", "refs/heads/\x1b]52;c;x", "", "HEAD"),
    ],
)
def test_a_ref_that_git_would_not_take(source, ref):
    (source / ".git/HEAD").write_text(f"ref: {ref}\n")
    assert commit(source) is None


@pytest.mark.parametrize(
    "head",
    [
        *(SECRET.encode(), HASH.upper().encode(), HASH[:-1].encode(), f"{HASH}0".encode(), b""),
        *(b"\xff\xfe\x80", b"ref: refs/heads/\xff\xfe", f"{HASH} {SECRET}".encode(), b"\0" * 100),
    ],
)
@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main"])
def test_only_a_hash_is_taken(source, name, head):
    replace(source / ".git" / name, head)
    assert commit(source) is None


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main", "packed-refs", "commondir"])
def test_a_pipe_is_not_waited_for(source, name):
    (source / ".git/refs/heads/main").unlink()
    path = source / ".git" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert commit(source) is None


def test_a_pipe_as_git_and_as_ignore_file(tmp_path):
    source = tree(tmp_path / "source", {"a": ""})
    os.mkfifo(source / ".git")
    assert commit(source) is None


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main", "packed-refs"])
def test_no_link_is_followed_out_of_the_repository(source, tmp_path, name):
    (source / ".git/refs/heads/main").unlink()
    tree(tmp_path, {"packed": f"{HASH} refs/heads/main\n"})
    path = source / ".git" / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / ("packed" if name == "packed-refs" else "hash.txt"))
    assert commit(source) is None


def test_no_linked_folder_of_refs_is_followed(source, tmp_path):
    (source / ".git/refs/heads/main").unlink()
    (source / ".git/refs/heads").rmdir()
    tree(tmp_path, {"elsewhere/main": HASH})
    (source / ".git/refs/heads").symlink_to(tmp_path / "elsewhere")
    assert commit(source) is None


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main", "packed-refs"])
def test_a_file_of_gigabytes_is_not_read(source, name):
    (source / ".git/refs/heads/main").unlink()
    with (source / ".git" / name).open("ab") as file:
        file.truncate(8 << 30)
    assert commit(source) is None


@pytest.mark.parametrize(
    "text",
    [
        *("gitdir: ../../../secret.txt", "gitdir: ../../..", "gitdir: /nonexistent", "gitdir:"),
        *("gitdir: \0", "gitdir: a\nb", "gitdir: " + "x" * 5000, SECRET, "\udcff"),
    ],
)
def test_a_git_file_that_leads_nowhere(source, text):
    (source / ".git").rename(source.parent / "moved")
    (source / ".git").write_text(text, errors="surrogateescape")
    assert commit(source) is None


@pytest.mark.parametrize(
    "common", ["../../..", "../hidden", "/", "\0", "x" * 5000, "../../secret.txt"]
)
def test_a_common_folder_that_is_not_the_repositorys(source, tmp_path, common):
    """A work tree lies in `worktrees` of the repository that it names, and nowhere else."""
    tree(tmp_path / "a/b/hidden", {"refs/heads/main": HASH})
    (source / ".git").rename(source.parent / "git")
    (source.parent / "git/commondir").write_text(common)
    (source / ".git").write_text("gitdir: ../git\n")
    assert commit(source) is None


def test_refs_that_point_in_a_circle(source):
    (source / ".git/refs/heads/main").write_text("ref: refs/heads/main\n")
    assert commit(source) is None


def test_a_branch_that_points_to_another(source):
    tree(source, {".git/refs/heads/other": HASH, ".git/refs/heads/main": "ref: refs/heads/other"})
    assert commit(source) == HASH


def test_what_git_itself_makes_is_read(tmp_path):
    source = tree(tmp_path / "repo", {"a": "1"})
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(source)]

    def run(*argv):
        done = subprocess.run([*git, *argv], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    for argv in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        run(*argv)
    head = run("rev-parse", "HEAD")
    run("checkout", "-q", "-b", "feature/ü-v1.0")
    assert revision.commit(source) == head
    run("pack-refs", "--all")
    assert revision.commit(source) == head
    run("worktree", "add", "-q", str(tmp_path / "tree"), "-b", "w")
    assert revision.commit(tmp_path / "tree") == head
    run("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(source), "sub")
    assert revision.commit(source / "sub") == head
    (tmp_path / "link").symlink_to(source)
    assert revision.commit(tmp_path / "link") == head
