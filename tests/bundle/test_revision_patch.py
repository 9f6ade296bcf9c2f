"""`uncommitted.diff`: commit and patch give the bundle, and git runs no configured program."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
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
    lifecycle.record(plan, folder, None)
    return folder


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


def test_a_further_work_tree_and_attributes_make_no_difference(repo, tmp_path):
    (repo / ".gitattributes").write_text("* text=auto eol=crlf\n")
    git(repo, "add", ".gitattributes")
    git(repo, "commit", "-q", "-m", "attributes")
    git(repo, "worktree", "add", "-q", "--no-checkout", str(tmp_path / "tree"), "-b", "w")
    tree(tmp_path / "tree", {"train.py": "one\r\ntwo\r\n"})
    patch = (recorded(tmp_path / "tree") / "uncommitted.diff").read_bytes()
    assert b"+one\r\n+two\r\n" in patch


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


def test_a_file_of_git_lfs_is_unchanged(repo):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 5\n"
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
    tree(repo, {"same.bin": pointer.format(digest), "other.bin": pointer.format("0" * 64)})
    save(repo)
    tree(repo, {"same.bin": "hello", "other.bin": "hello"})
    patch = (recorded(repo) / "uncommitted.diff").read_bytes()
    assert b"other.bin" in patch
    assert b"same.bin" not in patch


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
    record = json.loads((folder / "source.json").read_text())
    assert "the program 'git' is not on PATH" in record["uncommitted"]


def test_a_commit_whose_objects_are_missing_is_no_obstacle(repo):
    for path in (repo / ".git/objects").rglob("*"):
        if path.is_file():
            path.unlink()
    folder = recorded(repo)
    assert (
        "not recorded: git ls-tree"
        in json.loads((folder / "source.json").read_text())["uncommitted"]
    )


KEYS = {
    **dict.fromkeys(
        [
            *("diff.external", "core.fsmonitor", "core.pager", "pager.diff", "pager.diff-tree"),
            *("core.editor", "sequence.editor", "core.sshCommand", "core.askPass", "core.gitProxy"),
            *("core.alternateRefsCommand", "credential.helper", "uploadpack.packObjectsHook"),
            *("gpg.program", "gpg.ssh.program", "gpg.ssh.defaultKeyCommand", "gpg.x509.program"),
            *("interactive.diffFilter", "diff.evil.command", "diff.evil.textconv"),
            *("difftool.evil.cmd", "mergetool.evil.cmd", "merge.evil.driver", "browser.evil.cmd"),
            *("filter.evil.clean", "filter.evil.smudge", "filter.evil.process"),
            *("trailer.evil.command", "trailer.evil.cmd", "web.browser", "man.evil.cmd"),
            *("remote.origin.uploadpack", "remote.origin.vcs", "sendemail.sendmailCmd"),
            *("guitool.evil.cmd", "instaweb.httpd", "core.virtualFilesystem", "tar.evil.command"),
            *("fetch.bundleURI", "init.templateDir", "receive.procReceiveRefs"),
        ],
        "{evil}",
    ),
    "core.hooksPath": "{hooks}",
    "include.path": "{include}",
    "includeIf.gitdir:**.path": "{include}",
    "alias.diff": "!{evil}",
    "alias.diff-tree": "!{evil}",
    "submodule.lib.update": "!{evil}",
}


@pytest.fixture
def hostile(repo, tmp_path):
    """A changed work tree whose attributes ask for a filter and a diff driver everywhere."""
    tree(repo, {".gitattributes": "* filter=evil diff=evil merge=evil\n"})
    save(repo)
    (repo / "train.py").write_text("changed\n")
    tree(repo, {"new.py": "n"})
    return repo


def evil(tmp_path):
    """A program that creates a file, under whatever name it is started."""
    script = tmp_path / "evil"
    script.write_text(f'#!/bin/sh\necho "$0 $@" >> "{tmp_path}/canary"\ncat\n')
    script.chmod(0o755)
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for name in (
        "post-index-change",
        "fsmonitor-watchman",
        "post-checkout",
        "pre-auto-gc",
        "reference-transaction",
        "post-commit",
        "pre-commit",
    ):
        (hooks / name).symlink_to(script)
    include = tmp_path / "include"
    include.write_text(f"[diff]\nexternal = {script}\n[core]\nfsmonitor = {script}\n")
    return {"evil": str(script), "hooks": str(hooks), "include": str(include)}


@pytest.mark.parametrize("key", KEYS)
def test_no_key_of_the_repository_starts_a_program(hostile, tmp_path, key):
    git(hostile, "config", key, KEYS[key].format(**evil(tmp_path)))
    patch = (recorded(hostile) / "uncommitted.diff").read_bytes()
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    assert b"+changed\n" in patch


def test_all_keys_together_start_no_program(hostile, tmp_path):
    programs = evil(tmp_path)
    for key, value in KEYS.items():
        git(hostile, "config", key, value.format(**programs))
    git(hostile, "config", "--local", "core.worktree", str(tmp_path))
    (hostile / ".git/config.worktree").write_text(f"[diff]\nexternal = {programs['evil']}\n")
    git(hostile, "config", "extensions.worktreeConfig", "true")
    patch = (recorded(hostile) / "uncommitted.diff").read_bytes()
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    assert b"+changed\n" in patch


VARIABLES = (
    *("GIT_EXTERNAL_DIFF", "GIT_PAGER", "PAGER", "GIT_SSH", "GIT_SSH_COMMAND", "GIT_ASKPASS"),
    *("GIT_EDITOR", "EDITOR", "GIT_PROXY_COMMAND", "SSH_ASKPASS", "GIT_SEQUENCE_EDITOR"),
)


def test_no_variable_starts_a_program_or_leads_elsewhere(hostile, tmp_path, monkeypatch):
    programs = evil(tmp_path)
    for name in VARIABLES:
        monkeypatch.setenv(name, programs["evil"])
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", "diff.external")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", programs["evil"])
    monkeypatch.setenv("GIT_CONFIG_PARAMETERS", f"'core.fsmonitor={programs['evil']}'")
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_OBJECT_DIRECTORY", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("GIT_EXEC_PATH", str(tmp_path))
    monkeypatch.setenv("GIT_TRACE", str(tmp_path / "canary"))
    patch = (recorded(hostile) / "uncommitted.diff").read_bytes()
    assert not (tmp_path / "canary").exists()
    assert b"+changed\n" in patch


def test_a_missing_object_is_fetched_from_nowhere(hostile, tmp_path):
    """A partial clone fetches what is missing, by whatever program its remote names."""
    programs = evil(tmp_path)
    blob = git(hostile, "rev-parse", "HEAD:train.py", text=True).strip()
    (hostile / f".git/objects/{blob[:2]}/{blob[2:]}").unlink()
    for key, value in {
        "core.repositoryformatversion": "1",
        "extensions.partialClone": "origin",
        "remote.origin.promisor": "true",
        "remote.origin.url": f"ext::{programs['evil']} %S",
        "protocol.ext.allow": "always",
    }.items():
        git(hostile, "config", key, value)
    folder = recorded(hostile)
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()
    assert "not recorded" in json.loads((folder / "source.json").read_text())["uncommitted"]


def test_the_configuration_of_a_submodule_starts_no_program(hostile, tmp_path):
    programs = evil(tmp_path)
    lib = tree(hostile / "lib", {"lib.py": "l"})
    git(lib, "init", "-q")
    save(lib)
    git(hostile, "add", "lib")
    git(hostile, "commit", "-q", "-m", "submodule")
    (lib / "lib.py").write_text("changed too\n")
    git(hostile, "config", "diff.submodule", "diff")
    for key in ("diff.external", "core.fsmonitor", "filter.evil.clean"):
        git(lib, "config", key, programs["evil"])
    recorded(hostile)
    assert not (tmp_path / "canary").exists(), (tmp_path / "canary").read_text()


def test_a_program_in_the_source_called_git_is_not_started(hostile, tmp_path, monkeypatch):
    programs = evil(tmp_path)
    (hostile / "git").symlink_to(programs["evil"])
    (hostile / ".deploykitignore").write_text("git\n")
    monkeypatch.chdir(hostile)
    monkeypatch.setenv("PATH", f".{os.pathsep}{os.pathsep}{os.environ['PATH']}")
    recorded(hostile)
    assert not (tmp_path / "canary").exists()
