"""The commit of a source folder, read from git's files: a hash or nothing."""

from __future__ import annotations

import subprocess

import pytest

from deploykit.bundle import archive as bundle
from deploykit.bundle import revision
from tests.bundle.test_bundle import tree

HASH = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def source(tmp_path):
    """A folder with the smallest repository that has a commit."""
    files = {".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{HASH}\n"}
    return tree(tmp_path / "source", {**files, "train.py": ""})


def test_the_smallest_repository(source):
    assert bundle.scan(source, 10**6).commit == HASH


@pytest.mark.parametrize("name", ["HEAD", "refs/heads/main"])
@pytest.mark.parametrize(
    "content",
    [
        *(b"words", HASH.upper().encode(), HASH[:-1].encode(), f"{HASH}0".encode(), b""),
        *(b"\xff\xfe\x80", f"{HASH} words".encode(), b"\0" * 100, b"ref: refs/heads/none"),
        *(b"ref: refs/heads/main\nrefs/heads/other", b"ref: ", b"ref: refs/heads", b"ref: \0"),
    ],
)
def test_only_a_hash_is_taken(source, name, content):
    (source / ".git" / name).write_bytes(content)
    assert revision.commit(source) is None


@pytest.mark.parametrize("text", ["gitdir: /nonexistent", "gitdir: ../..", "gitdir:", "", "words"])
def test_a_git_file_that_leads_nowhere(source, text):
    (source / ".git").rename(source.parent / "moved")
    (source / ".git").write_text(text)
    assert revision.commit(source) is None


def test_refs_that_point_to_others(source):
    tree(source, {".git/refs/heads/other": HASH, ".git/refs/heads/main": "ref: refs/heads/other"})
    assert revision.commit(source) == HASH
    tree(source, {".git/refs/heads/other": "ref: refs/heads/main"})
    assert revision.commit(source) is None


def test_what_git_itself_makes_is_read(tmp_path):
    source = tree(tmp_path / "repo", {"below/a": "1"})
    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(source)]

    def run(*argv):
        done = subprocess.run([*git, *argv], check=True, capture_output=True, text=True)
        return done.stdout.strip()

    for argv in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        run(*argv)
    head = run("rev-parse", "HEAD")
    run("checkout", "-q", "-b", "feature/ü-v1.0")
    assert revision.commit(source) == revision.commit(source / "below") == head
    run("pack-refs", "--all")
    assert revision.commit(source) == head
    run("worktree", "add", "-q", str(tmp_path / "tree"), "-b", "w")
    assert revision.commit(tmp_path / "tree") == head
    run("-c", "protocol.file.allow=always", "submodule", "add", "-q", str(source), "sub")
    assert revision.commit(source / "sub") == head
    (tmp_path / "link").symlink_to(source)
    assert revision.commit(tmp_path / "link") == head
    run("checkout", "-q", "--detach")
    assert revision.commit(source) == head
    assert revision.commit(tmp_path) is None
