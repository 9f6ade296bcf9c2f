"""The bundle: reproducible, without ignored files and secrets."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tarfile
import time
from pathlib import Path

import pytest

from deploykit.bundle import archive as bundle
from deploykit.bundle import node_plane
from deploykit.cli import report_page
from deploykit.lib import paths
from deploykit.lib.errors import JobFileError, TryAgain

LIMIT = 10**6
KEY_BODY = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASCBKcwggSjAgEAAoIBAQC7"
"""The beginning of a private key, the same for all of its kind."""


def tree(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return folder


def names(folder, limit=LIMIT):
    scanned = bundle.scan(folder, limit)
    return {e.path for e in scanned.entries if not e.path.startswith(f"{node_plane.FOLDER}/")}


def scan_problems(folder, limit=LIMIT):
    with pytest.raises(JobFileError) as caught:
        bundle.scan(folder, limit)
    return [problem.message for problem in caught.value.problems]


def test_same_tree_same_hash_and_same_archive(tmp_path):
    files = {"b.py": "1", "a/c.txt": "2", "a/ü ' \n.txt": "3"}
    one = tree(tmp_path / "one", files)
    two = tree(tmp_path / "two", dict(reversed(files.items())))
    for path in two.rglob("*"):
        os.utime(path, (1, time.time() - 10**6))
    (two / "b.py").chmod(0o600)
    first, second = bundle.scan(one, LIMIT), bundle.scan(two, LIMIT)
    assert first.hash == second.hash
    archive = bundle.store(first).read_bytes()
    bundle.store(first).unlink()
    assert bundle.store(second).read_bytes() == archive


@pytest.mark.parametrize("change", ["content", "name", "mode", "link"])
def test_what_changes_the_hash(tmp_path, change):
    before = bundle.scan(tree(tmp_path / "src", {"a.py": "1", "b.py": "1"}), LIMIT).hash
    path = tmp_path / "src/a.py"
    if change == "content":
        path.write_text("2")
    elif change == "name":
        path.rename(tmp_path / "src/c.py")
    elif change == "mode":
        path.chmod(0o755)
    else:
        path.unlink()
        path.symlink_to("b.py")
    assert bundle.scan(tmp_path / "src", LIMIT).hash != before


PLANTED = {
    "another bundle": lambda path, other: path.write_bytes(other.read_bytes()),
    "torn": lambda path, _: path.write_bytes(path.read_bytes()[:-9]),
}


@pytest.mark.parametrize("plant", PLANTED.values(), ids=PLANTED)
def test_a_stored_archive_is_not_believed_by_its_name(tmp_path, plant):
    scanned = bundle.scan(tree(tmp_path / "src", {"train.py": "good"}), LIMIT)
    other = bundle.store(bundle.scan(tree(tmp_path / "other", {"train.py": "evil"}), LIMIT))
    plant(bundle.store(scanned), other)
    bundle.unpack(bundle.store(scanned), tmp_path / "out")
    assert (tmp_path / "out/train.py").read_text() == "good"


def test_unpacks_what_was_packed(tmp_path):
    source = tree(tmp_path / "src", {"run.sh": "#!/bin/sh", "deep/er/x": "y", "empty": ""})
    (source / "run.sh").chmod(0o700)
    (source / "deep/link").symlink_to("../run.sh")
    bundle.unpack(bundle.store(bundle.scan(source, LIMIT)), tmp_path / "out")
    assert (tmp_path / "out/run.sh").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "out/deep/er/x").read_text() == "y"
    assert (tmp_path / "out/empty").read_text() == ""
    assert (tmp_path / "out/deep/link").readlink().as_posix() == "../run.sh"
    assert {node_plane.FILES, *node_plane.node_plane()} == {
        path.relative_to(tmp_path / "out").as_posix()
        for path in (tmp_path / "out" / node_plane.FOLDER).rglob("*")
        if path.is_file()
    }


def test_an_unchanged_bundle_is_written_once(tmp_path):
    source = tree(tmp_path / "src", {"a": "1"})
    first = bundle.store(bundle.scan(source, LIMIT))
    stamp = first.stat().st_mtime_ns
    assert bundle.store(bundle.scan(source, LIMIT)).stat().st_mtime_ns == stamp
    assert len(list(first.parent.iterdir())) == 1


def replace_by(make):
    def change(path):
        path.unlink()
        make(path)

    return change


CHANGES = {
    "grows": lambda path: path.write_text("12"),
    "shrinks": lambda path: path.write_text(""),
    "is written to": lambda path: path.write_text("2"),
    "vanishes": Path.unlink,
    "becomes a pipe": replace_by(os.mkfifo),
    "becomes a link": replace_by(lambda path: path.symlink_to("/etc/passwd")),
    "becomes a folder": replace_by(Path.mkdir),
    "is below a folder that vanishes": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_changes_before_it_is_stored(tmp_path, change):
    source = tree(tmp_path / "src", {"below/a": "1"})
    scanned = bundle.scan(source, LIMIT)
    CHANGES[change](source / "below/a")
    with pytest.raises(TryAgain, match="changed while it was being bundled"):
        bundle.store(scanned)
    assert list(paths.bundles().iterdir()) == []


@pytest.mark.parametrize("size", [0, 1, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, 3 << 20])
def test_a_file_of_any_size_arrives_whole(tmp_path, size):
    content = os.urandom(size)
    source = tree(tmp_path / "src", {"train.py": ""})
    (source / "a").write_bytes(content)
    with tarfile.open(bundle.store(bundle.scan(source, 4 * LIMIT))) as archive:
        assert archive.extractfile("a").read() == content


def test_a_private_key_is_not_in_the_archive(tmp_path):
    files = {"a": "one", "key": f"-----BEGIN PRIVATE KEY-----\n{KEY_BODY}\n", "z": "two"}
    scanned = bundle.scan(tree(tmp_path / "source", files), LIMIT)
    assert scanned.kept_back == ("key",)
    path = bundle.store(scanned)
    assert bundle.holds(path, scanned.hash)
    with tarfile.open(path) as archive:
        assert {"a", "z"} < set(archive.getnames())
        assert "key" not in archive.getnames()


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "is written to"])
def test_a_file_that_changes_between_its_listing_and_its_reading(tmp_path, change, monkeypatch):
    source = tree(tmp_path / "src", {"below/a": "1"})
    walk = bundle.walk

    def meanwhile(*args):
        entries = list(walk(*args))
        CHANGES[change](source / "below/a")
        return entries

    monkeypatch.setattr(bundle, "walk", meanwhile)
    with pytest.raises(TryAgain, match="below/a changed while it was being bundled"):
        bundle.scan(source, LIMIT)


@pytest.mark.parametrize("name", [".gitignore", ".deploykitignore", "below/.gitignore"])
def test_an_ignore_file_that_cannot_be_read_is_a_problem(tmp_path, name):
    """What it names might travel."""
    source = tree(tmp_path / "src", {"below/a": "1"})
    os.mkfifo(source / name)
    (problem,) = scan_problems(source)
    assert "gnore" in problem
    assert "is not a regular file" in problem
    (source / name).unlink()
    (source / name).write_text("x\n" * 600_000)
    (problem,) = scan_problems(source)
    assert "File too large" in problem


def test_invalid_patterns_are_skipped(tmp_path):
    ignore = "\ufeff*.log\r\n!\n\\\n[z-a]\nb.txt\n"
    source = tree(tmp_path / "src", {".gitignore": ignore, "a.log": "", "b.txt": "", "c": ""})
    assert names(source) == {".gitignore", "c"}


def test_the_rules_above_count_behind_a_link_too(tmp_path):
    source = tree(tmp_path / "repo/src", {"a": "1", "private.txt": "2"})
    tree(tmp_path / "repo", {".gitignore": "private.txt\n", ".git/HEAD": ""})
    (tmp_path / "link").symlink_to(source)
    assert names(tmp_path / "link") == {"a"}


def test_a_report_of_deploykits_own_does_not_travel(tmp_path):
    """The hash is that of the source without it; a page of the user's own travels."""
    files = {"train.py": "1", "index.html": "<html><head><title>mine</title></head></html>"}
    before = bundle.scan(tree(tmp_path / "p", files), LIMIT).hash
    page = report_page.rendered("report/page.html.j2", [{"title": "digits-1"}])
    tree(tmp_path / "p", {"report-digits-1.html": page, "docs/any name.html": page})
    assert bundle.scan(tmp_path / "p", LIMIT).hash == before
    (tmp_path / "p/.deploykitignore").write_text("!report-*.html\n")
    assert {"report-digits-1.html", "index.html"} <= names(tmp_path / "p")


def test_fetched_results_and_old_state_do_not_travel(tmp_path):
    source = tree(tmp_path / "p", {"train.py": "1"})
    before = bundle.scan(source, LIMIT).hash
    fetched = {"run-1/.deploykit-fetched.json": "{}", "run-1/output/weights.pt": "1"}
    tree(source, {**fetched, "state/runs.sqlite": "", "state/runs/run-1/job.json": "{}"})
    assert bundle.scan(source, LIMIT).hash == before
    (source / ".deploykitignore").write_text("!run-1/\n")
    assert "run-1/output/weights.pt" in names(source)


def test_packages_of_models_do_not_travel(tmp_path):
    """The weights of `deploykit export --to model` would be in each later job."""
    source = tree(
        tmp_path / "p", {"train.py": "1", "mine/manifest.json": "{}", "mine/code/a.py": ""}
    )
    before = bundle.scan(source, LIMIT).hash
    manifest = json.dumps({"format": 1, "run": "digits", "deploykit": "0.2.0"}, indent=1)
    package = {"model/manifest.json": manifest, "model/code/inference.py": "", "model/w.bin": "1"}
    tree(source, package)
    assert bundle.scan(source, LIMIT).hash == before
    assert "mine/code/a.py" in names(source)
    (source / ".deploykitignore").write_text("!model/\n")
    assert "model/w.bin" in names(source)


def test_a_whole_home_folder_is_refused(tmp_path, monkeypatch):
    """It holds tokens of many programs, whose names nobody can list."""
    monkeypatch.setenv("HOME", str(tmp_path))
    source = tree(tmp_path, {"train.py": "1"})
    with pytest.raises(JobFileError, match="is your whole home folder"):
        bundle.scan(source, LIMIT)
    assert names(tree(tmp_path / "project", {"train.py": "1"})) == {"train.py"}
    with pytest.raises(JobFileError, match="is the whole file system"):
        bundle.scan(Path("/"), LIMIT)


def test_pointers_of_git_lfs_are_named(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    source = tree(tmp_path, {"a.bin": pointer, "b.md": f"see {pointer}"})
    (warning,) = bundle.scan(source, LIMIT).warnings
    assert warning.message == "a.bin is a Git LFS pointer without content"
    assert (warning.severity, "git lfs pull" in warning.hint) == ("warning", True)
    tree(tmp_path, {"data/c.bin": pointer})
    (warning,) = bundle.scan(source, LIMIT).warnings
    assert warning.message.startswith("a.bin and 1 more are Git LFS pointers")
    (source / ".deploykitignore").write_text("*.bin\n")
    assert bundle.scan(source, LIMIT).warnings == ()


def test_secrets_and_clutter_stay_behind(tmp_path):
    secret = {".env": "", "sub/.env.local": "", "id_rsa": "", "x.pem": "", ".aws/credentials": ""}
    clutter = {
        "__pycache__/a.pyc": "",
        ".venv-x/y": "",
        ".git/config": "",
        ".deploykit/launch.py": "",
    }
    kept = {"train.py": "", ".env.example": "", "keys.py": ""}
    key = {"sub/deploy": "-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n"}
    source = tree(tmp_path / "src", {**secret, **clutter, **kept, **key})
    assert names(source) == set(kept)
    assert bundle.scan(source, LIMIT).kept_back == ("sub/deploy",)


def test_deploykitignore_has_the_last_word(tmp_path):
    files = {"a.txt": "", "b.txt": "", ".env": "", "out/x": "", ".gitignore": "a.txt\nout/\n"}
    ours = {".deploykitignore": "b.txt\n!a.txt\n!.env\n"}
    source = tree(tmp_path / "src", {**files, **ours})
    assert names(source) == {"a.txt", ".env", ".gitignore", ".deploykitignore"}


def test_agrees_with_git(tmp_path):
    top = tree(
        tmp_path / "repo",
        {
            ".gitignore": "*.log\n/build\n!keep.log\ndata/**/raw\n# no\n\\#odd\ntrailing \n",
            "src/.gitignore": "local/\n!important.log\n*.tmp\n",
            "src/deep/.gitignore": "!x.tmp\n",
        }
        | dict.fromkeys(
            [
                *("a.log", "keep.log", "build/x", "src/build/x", "src/local/y", "#odd", "trailing"),
                *("src/important.log", "src/x.tmp", "src/deep/x.tmp", "src/deep/y.tmp"),
                *("data/a/b/raw/f", "data/raw/f", "src/deep/local/z", "src/üñ.log"),
            ],
            "",
        ),
    )
    git = ["git", "-C", str(top), "-c", "core.quotepath=off"]
    subprocess.run([*git, "init", "-q"], check=True)
    for folder in (top, top / "src"):
        argv = ["git", "ls-files", "-z", "--others", "--exclude-standard"]
        listed = subprocess.run(argv, cwd=folder, check=True, capture_output=True).stdout
        assert names(folder) == set(listed.decode().split("\0")) - {""}


def test_links_that_leave_the_tree_are_refused(tmp_path):
    tree(tmp_path, {"outside": ""})
    source = tree(tmp_path / "src", {"in/side": ""})
    (source / "good").symlink_to("in/side")
    (source / "loop").symlink_to("loop")
    (source / "up").symlink_to("../outside")
    (source / "in/abs").symlink_to("/etc/passwd")
    found = scan_problems(source)
    assert len(found) == 2
    assert "up is a link to ../outside, which is outside the source folder" in found[0]
    assert "in/abs is a link to /etc/passwd, which is outside" in found[1]


def test_special_files_are_refused(tmp_path, monkeypatch):
    source = tree(tmp_path / "src", {"a": ""})
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as server:
        monkeypatch.chdir(source)  # a socket's path must be short
        server.bind("sock")
        assert scan_problems(source) == [
            "pipe is not a file, folder or link",
            "sock is not a file, folder or link",
        ]


def test_too_large_names_the_largest(tmp_path):
    source = tree(tmp_path / "src", {"small": "1", "big.bin": "x" * 5000})
    with pytest.raises(JobFileError) as caught:
        bundle.scan(source, 3000)
    (problem,) = caught.value.problems
    assert problem.path == "max_bundle"
    assert "big.bin (5.0 kB), small (1 B)" in problem.hint


def test_archive_holds_no_owner_and_no_clock(tmp_path):
    archive = bundle.store(bundle.scan(tree(tmp_path / "src", {"a": "1"}), LIMIT))
    with tarfile.open(archive) as tar:
        for info in tar:
            assert (info.uid, info.gid, info.uname, info.mtime) == (0, 0, "", 0)


@pytest.mark.parametrize("mark", ["myenv/pyvenv.cfg", "myenv/conda-meta/history"])
def test_a_python_environment_stays_behind_and_is_named_with_its_size(tmp_path, mark):
    tree(tmp_path, {"train.py": "", mark: "x", "myenv/lib/big.py": "x" * 2_000_000})
    (tmp_path / "myenv/python").symlink_to("/usr/bin/python3")
    assert names(tmp_path, limit=10) == {"train.py"}
    (warning,) = bundle.scan(tmp_path, LIMIT).warnings
    assert warning.message == "left out: the Python environment myenv/ (2 MB)"
    assert warning.severity == "warning"
    (tmp_path / ".deploykitignore").write_text("!/myenv/\n")
    assert any("is a link to /usr/bin/python3" in one for one in scan_problems(tmp_path))
