"""A source that has not changed is not read again; one that has changed in any way is."""

from __future__ import annotations

import os

import pytest

from deploykit.bundle import archive as bundle
from deploykit.lib import paths

TOKEN = "hf_" + "aB3dE5gH7jK9mN1pQ3sT5vW7yZ9bC1dE3f"


@pytest.fixture
def source(tmp_path):
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "train.py").write_text("print(1)\n")
    (folder / "link.py").symlink_to("train.py")
    (folder / "settings.py").write_text(f'token = "{TOKEN}"\n')
    return folder


@pytest.fixture
def settled(monkeypatch):
    """As if nothing had been changed in the last seconds."""
    monkeypatch.setattr(bundle, "_SETTLED", -3600)


@pytest.fixture
def reads(monkeypatch):
    """The files of the source that were read."""
    found = []
    opened = bundle.opened

    def counted(source, entry):
        if entry.content is None:
            found.append(entry.path)
        return opened(source, entry)

    monkeypatch.setattr(bundle, "opened", counted)
    return found


def submitted(source):
    scanned = bundle.scan(source, 10**9)
    bundle.store(scanned)
    return scanned


def test_an_unchanged_source_is_not_read_and_gives_the_same_bundle(source, settled, reads):
    first = submitted(source)
    assert {"train.py", "settings.py"} <= set(reads)
    assert any("looks like" in problem.message for problem in first.warnings)
    reads.clear()
    assert submitted(source) == first
    assert reads == []


def edit(path, text):
    """Change a file, and nothing that a program can keep: neither its size nor its time."""
    before = path.stat()
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    "change",
    [
        lambda source: edit(source / "train.py", "print(2)\n"),
        lambda source: (source / "train.py").chmod(0o755),
        lambda source: (source / "new.py").touch(),
        lambda source: (source / "settings.py").unlink(),
        lambda source: (source / "train.py").rename(source / "other.py"),
        lambda source: (source / ".deploykitignore").write_text("settings.py\n"),
    ],
    ids=["content", "mode", "new", "removed", "renamed", "ignored"],
)
def test_every_change_is_seen(source, settled, change):
    first = submitted(source)
    change(source)
    assert submitted(source).hash != first.hash


def test_a_link_elsewhere_is_seen(source, settled):
    (source / "b.py").touch()
    first = submitted(source)
    (source / "link.py").unlink()
    (source / "link.py").symlink_to("b.py")
    assert submitted(source).hash != first.hash


def test_a_source_that_has_just_changed_is_read_again(source, reads):
    """A file system that counts seconds would show another change of this second as none."""
    submitted(source)
    reads.clear()
    assert submitted(source).state == ""
    assert "train.py" in reads


def test_an_archive_that_was_removed_or_changed_is_written_again(source, settled):
    first = submitted(source)
    (archive,) = paths.bundles().glob("*.tar.gz")
    content = archive.read_bytes()
    for spoil in (archive.unlink, lambda: archive.write_bytes(b"spoilt")):
        spoil()
        assert submitted(source).hash == first.hash
        assert archive.read_bytes() == content


def test_a_record_whose_writing_was_interrupted_is_ignored(source, settled):
    first = submitted(source)
    (record,) = paths.source_states().iterdir()
    record.write_text(record.read_text()[:20])
    assert submitted(source).hash == first.hash


def test_another_version_reads_again(source, settled, reads, monkeypatch):
    submitted(source)
    reads.clear()
    monkeypatch.setattr(bundle, "__version__", "9.9")
    submitted(source)
    assert "train.py" in reads


def test_a_file_with_a_private_key_stays_behind_again(source, settled, reads):
    body = "MC4CAQAwBQYDK2VwBCIEIDpDlRlFhkDrV0pUsEqhZ3nVhMyYtTj8Xk0pQ2sV4w6T\n"
    kind = "PRIVATE KEY-----\n"
    (source / "notes.txt").write_text(f"-----BEGIN {kind}{body}-----END {kind}")
    first = submitted(source)
    assert first.kept_back == ("notes.txt",)
    reads.clear()
    assert submitted(source) == first
    assert reads == []
