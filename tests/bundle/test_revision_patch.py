"""`uncommitted.diff`: commit and patch give the bundle."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane, revision
from deploykit.job.model import JobSpec, Plan
from deploykit.lib import paths
from deploykit.run import lifecycle
from tests.bundle.test_bundle import KEY_BODY, tree

LIMIT = 10**9
GIT = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main"]


def git(folder, *argv, **more):
    """Git as the user runs it; its output."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **more.pop("env", {})}
    argv = [*GIT, *argv]
    return subprocess.run(argv, cwd=folder, env=env, check=True, capture_output=True, **more).stdout


@pytest.fixture
def repo(tmp_path):
    """A repository whose first commit has a few files, below a folder and at the top."""
    files = {"train.py": "one\ntwo\n", "src/a.py": "a\n" * 20, "src/data.bin": "x\0y", "top": "t"}
    folder = tree(tmp_path / "repo", files)
    git(folder, "init", "-q")
    save(folder)
    return folder


def save(folder):
    git(folder, "add", "-A", "-f")
    git(folder, "commit", "-q", "-m", "x")


def recorded(source):
    """The run's folder after a submit of `source` has recorded it."""
    scanned = bundle.scan(source, LIMIT)
    folder = paths.run_folder("one")
    folder.mkdir(parents=True, exist_ok=True)
    options = backend.find("local").Options()
    plan = Plan("local", "here", "one", "", "sh", JobSpec("x", None, None), options, scanned)
    lifecycle.record(plan, folder, None, lifecycle.source_record(scanned))
    return folder


def uncommitted(source):
    """Why the changes of `source` were not recorded."""
    return json.loads((recorded(source) / "source.json").read_text())["uncommitted"]


def content(folder):
    """Every file and link below a folder, with its mode and bytes."""
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name.startswith((".git/", f"{node_plane.FOLDER}/")) or name == ".git":
            continue
        if path.is_symlink():
            found[name] = path.readlink()
        elif path.is_file():
            found[name] = (path.stat().st_mode & 0o100, path.read_bytes())
    return found


def assert_commit_and_patch_are_the_bundle(source, tmp_path, below=""):
    """Check the commit out elsewhere, apply the patch, and compare with the unpacked bundle."""
    folder = recorded(source)
    fresh = tmp_path / "fresh"
    git(tmp_path, "clone", "-q", str(source.parent if below else source), str(fresh))
    patch = folder / "uncommitted.diff"
    if patch.stat().st_size:
        git(fresh, "apply", "--binary", str(patch))
    bundle.unpack(bundle.store(bundle.scan(source, LIMIT)), tmp_path / "unpacked")
    assert content(fresh / below) == content(tmp_path / "unpacked")
    return patch.read_bytes()


def test_commit_and_patch_are_the_bundle(repo, tmp_path):
    (repo / "train.py").write_text("one\nthree")
    (repo / "train.py").chmod(0o755)
    (repo / "top").unlink()
    (repo / "src/a.py").rename(repo / "src/renamed.py")
    (repo / "src/data.bin").write_bytes(bytes(range(256)) * 9)
    tree(repo, {"new.py": "n", 'deep/er/ü "q"\\ \n.txt': "odd name", "crlf": "a\r\nb\r\n"})
    (repo / "latin").write_bytes(b"\xe9t\xe9\n")
    (repo / "link").symlink_to("new.py")
    patch = assert_commit_and_patch_are_the_bundle(repo, tmp_path)
    assert b"rename from src/a.py" in patch
    assert b"deleted file mode 100644" in patch
    assert b"GIT binary patch" in patch


def test_a_source_below_the_top_of_the_repository(repo, tmp_path):
    (repo / "src/a.py").write_text("changed\n")
    (repo / "top").write_text("does not travel\n")
    patch = assert_commit_and_patch_are_the_bundle(repo / "src", tmp_path, "src")
    assert b"does not travel" not in patch


def test_files_and_folders_that_changed_places(repo, tmp_path):
    (repo / "top").unlink()
    (repo / "top").mkdir()
    (repo / "top/below").write_text("1")
    for path in (repo / "src/a.py", repo / "src/data.bin"):
        path.unlink()
    (repo / "src").rmdir()
    (repo / "src").symlink_to("top")
    assert_commit_and_patch_are_the_bundle(repo, tmp_path)


def test_nothing_changed_is_an_empty_patch(repo, tmp_path):
    assert assert_commit_and_patch_are_the_bundle(repo, tmp_path) == b""


def test_a_repository_with_sha256(tmp_path):
    folder = tree(tmp_path / "repo", {"train.py": "one\n"})
    git(folder, "init", "-q", "--object-format=sha256")
    save(folder)
    (folder / "train.py").write_text("two\n")
    patch = assert_commit_and_patch_are_the_bundle(folder, tmp_path)
    assert b"-one\n+two\n" in patch


BEHIND = {
    ".aws/credentials": "by-default",
    "sub/.ssh/config": "by-default-in-a-folder",
    "ignored.txt": "by-gitignore",
    "ours.txt": "by-deploykitignore",
    "deploy": f"-----BEGIN PRIVATE KEY-----\n{KEY_BODY}\n-----END PRIVATE KEY-----\n",
}


@pytest.mark.parametrize("what", ["changed", "deleted", "new"])
def test_what_stays_behind_is_not_in_the_patch(repo, what):
    tree(repo, {".gitignore": "ignored.txt\n", ".deploykitignore": "ours.txt\n"})
    if what != "new":
        tree(repo, BEHIND)
    save(repo)
    (repo / "train.py").write_text("travels\n")
    for name, text in BEHIND.items():
        if what == "deleted":
            (repo / name).unlink()
        else:
            tree(repo, {name: f"{text}{what}\n"})
    patch = (recorded(repo) / "uncommitted.diff").read_bytes()
    assert b"+travels" in patch
    assert [name for name in BEHIND if name.encode() in patch] == []
    assert b"PRIVATE KEY" not in patch


def test_a_key_that_was_committed_and_taken_out_is_named_but_not_shown(repo):
    tree(repo, {"settings.py": f"KEY = '''-----BEGIN PRIVATE KEY-----\n{KEY_BODY}\n'''\n"})
    save(repo)
    (repo / "settings.py").write_text("KEY = None\n")
    folder = recorded(repo)
    assert KEY_BODY.encode()[:40] not in (folder / "uncommitted.diff").read_bytes()
    assert json.loads((folder / "source.json").read_text())["left_out"] == ["settings.py"]


def test_a_submodule_does_not_break_the_patch(repo, tmp_path):
    lib = tree(tmp_path / "lib", {"lib.py": "l"})
    git(lib, "init", "-q")
    save(lib)
    git(repo, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(lib), "lib")
    save(repo)
    (repo / "train.py").write_text("travels\n")
    folder = recorded(repo)
    fresh = tmp_path / "fresh"
    git(tmp_path, "clone", "-q", str(repo), str(fresh))
    git(fresh, "apply", str(folder / "uncommitted.diff"))
    assert (fresh / "lib/lib.py").read_text() == "l"
    assert (fresh / "train.py").read_text() == "travels\n"


def test_without_git_the_run_says_that_nothing_was_recorded(repo, monkeypatch):
    (repo / "train.py").write_text("travels\n")
    monkeypatch.setenv("PATH", "/nonexistent")
    folder = recorded(repo)
    assert not (folder / "uncommitted.diff").exists()
    assert "the program 'git' is not on PATH" in uncommitted(repo)


def test_a_commit_whose_objects_are_missing_is_no_obstacle(repo):
    for path in (repo / ".git/objects").rglob("*"):
        if path.is_file():
            path.unlink()
    assert "not recorded: git ls-tree" in uncommitted(repo)


def test_attributes_and_filters_are_those_of_git(repo, tmp_path):
    """A further work tree with line ends of its own has not changed; git-lfs is such a filter."""
    (repo / ".gitattributes").write_text("*.py text eol=crlf\n*.bin filter=half\n")
    git(repo, "config", "filter.half.clean", "cut -c 1")
    git(repo, "config", "filter.half.smudge", "sed s/$/y/")
    tree(repo, {"src/data.bin": "xy\n"})
    save(repo)
    git(repo, "worktree", "add", "-q", str(tmp_path / "tree"), "-b", "w")
    assert (tmp_path / "tree/train.py").read_bytes() == b"one\r\ntwo\r\n"
    assert (recorded(tmp_path / "tree") / "uncommitted.diff").read_bytes() == b""
    (tmp_path / "tree/src/data.bin").write_text("zy\n")
    patch = (recorded(tmp_path / "tree") / "uncommitted.diff").read_bytes()
    assert patch.endswith(b"-x\n+z\n")


def test_a_large_change_is_not_recorded(repo, monkeypatch):
    monkeypatch.setattr(revision, "_MAX_CHANGED", 1 << 20)
    tree(repo, {"new": "x" * (2 << 20)})
    assert "the new files exceed 1 MiB" in uncommitted(repo)
    tree(repo, {"new": ""})
    (repo / "top").write_text("".join(f"{n}\n" for n in range(300_000)))
    assert "the changes exceed 1 MiB" in uncommitted(repo)


def test_no_program_of_the_configuration_is_started(repo, tmp_path, monkeypatch):
    """A monitor, a viewer of differences or a hook might wait for its user, or print something."""
    script = tmp_path / "script"
    script.write_text(f'#!/bin/sh\necho "$0 $@" >> "{tmp_path}/canary"\ncat\n')
    script.chmod(0o755)
    (tmp_path / "hooks").mkdir()
    (tmp_path / "hooks/post-index-change").symlink_to(script)
    (repo / ".gitattributes").write_text("*.py diff=viewer\n")
    save(repo)
    for key in ("diff.external", "core.fsmonitor", "diff.viewer.command", "diff.viewer.textconv"):
        git(repo, "config", key, str(script))
    git(repo, "config", "core.hooksPath", str(tmp_path / "hooks"))
    monkeypatch.setenv("GIT_EXTERNAL_DIFF", str(script))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    (repo / "train.py").write_text("changed\n")
    assert b"+changed\n" in (recorded(repo) / "uncommitted.diff").read_bytes()
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()


def test_the_repository_stays_as_it_is(repo):
    def objects():
        return sorted(path.relative_to(repo) for path in (repo / ".git").rglob("*"))

    (repo / "top").unlink()
    tree(repo, {"new.py": "n", "train.py": "changed\n"})
    before = objects(), (repo / ".git/index").read_bytes()
    recorded(repo)
    assert (objects(), (repo / ".git/index").read_bytes()) == before
