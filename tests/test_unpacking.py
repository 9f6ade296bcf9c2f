"""An archive is unpacked below its folder, and nowhere else."""

from __future__ import annotations

import io
import os
import tarfile

import pytest

from deploykit import unpacking
from deploykit.errors import UsageError


@pytest.fixture
def archive(tmp_path):
    """A function that writes an archive of these members, each a name with its kind or link."""

    def write(*members):
        path = tmp_path / "a.tar.gz"
        with tarfile.open(path, "w:gz") as tar:
            for name, kind, link in members:
                info = tarfile.TarInfo(name)
                info.type, info.linkname, info.mode = kind, link, 0o755
                info.size = 3 if kind == tarfile.REGTYPE else 0
                tar.addfile(info, io.BytesIO(b"abc"))
        return path

    return write


def file(name):
    return (name, tarfile.REGTYPE, "")


@pytest.mark.parametrize(
    "members",
    [
        [file("/etc/evil")],
        [file("../evil")],
        [file("a/../../evil")],
        [file("a//b")],
        [("link", tarfile.SYMTYPE, "/etc")],
        [("link", tarfile.SYMTYPE, "..")],
        [("a/link", tarfile.SYMTYPE, "../../out")],
        [("link", tarfile.SYMTYPE, "a"), file("link/below")],
        [file("a/b"), ("a/link", tarfile.SYMTYPE, "../a"), file("a/link/deep/er")],
        [file("b"), ("a", tarfile.LNKTYPE, "b")],
        [("pipe", tarfile.FIFOTYPE, "")],
        [("disk", tarfile.BLKTYPE, "")],
    ],
)
def test_what_no_bundle_has_is_refused(archive, tmp_path, members):
    with pytest.raises(UsageError, match="has an entry that no bundle has"):
        unpacking.unpack(archive(*members), tmp_path / "deep/out")
    made = {path.name for path in tmp_path.rglob("*") if not path.is_dir()}
    assert made <= {"a.tar.gz", "a", "b", "link"}


def test_an_interrupted_submit_is_repeated_whatever_it_has_left(archive, tmp_path):
    packed, out = archive(file("a/b"), ("l", tarfile.SYMTYPE, "a/b")), tmp_path / "out"
    (out / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").write_text("kept")
    (out / "a/b").symlink_to(tmp_path / "elsewhere")
    for _ in range(2):
        unpacking.unpack(packed, out)
        assert (out / "l").read_text() == "abc"
    assert not (out / "a/b").is_symlink()
    assert (tmp_path / "elsewhere").read_text() == "kept"


def test_mode_and_time_do_not_depend_on_the_user(archive, tmp_path):
    before = os.umask(0o177)
    try:
        unpacking.unpack(archive(file("run.sh")), tmp_path)
    finally:
        os.umask(before)
    info = (tmp_path / "run.sh").stat()
    assert (info.st_mode & 0o777, info.st_mtime) == (0o700, 0.0)
