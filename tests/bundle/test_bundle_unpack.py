"""A stored archive is unpacked whatever the folder holds, under any umask, with one clear error."""

from __future__ import annotations

import os

import pytest

from deploykit.bundle import archive as bundle
from deploykit.lib.errors import CannotWrite

LIMIT = 10**8


@pytest.fixture
def archive(tmp_path):
    """A stored bundle of a program and a link to it."""
    source = tmp_path / "src"
    (source / "bin").mkdir(parents=True)
    (source / "bin/run.sh").write_text("#!/bin/sh")
    (source / "bin/run.sh").chmod(0o755)
    (source / "link").symlink_to("bin/run.sh")
    return bundle.store(bundle.scan(source, LIMIT))


def test_an_interrupted_submit_is_repeated_whatever_it_has_left(archive, tmp_path):
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    (out / "bin").mkdir(parents=True)
    elsewhere.write_text("kept")
    (out / "bin/run.sh").symlink_to(elsewhere)
    for _ in range(2):
        bundle.unpack(archive, out)
        assert (out / "link").read_text() == "#!/bin/sh"
    assert not (out / "bin/run.sh").is_symlink()
    assert elsewhere.read_text() == "kept"


@pytest.mark.parametrize("umask", [0o000, 0o177])
def test_access_is_the_owners_alone_under_any_umask(archive, tmp_path, umask, monkeypatch):
    monkeypatch.setenv("TAR_OPTIONS", "--exclude=*.sh --mode=777")
    before = os.umask(umask)
    try:
        bundle.unpack(archive, tmp_path / "out")
    finally:
        os.umask(before)
    info = (tmp_path / "out/bin/run.sh").stat()
    assert (info.st_mode & 0o777, info.st_mtime) == (0o700, 0.0)


def test_a_folder_that_looks_like_an_option_is_a_folder(archive, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bundle.unpack(archive, tmp_path / "--checkpoint=1")
    assert (tmp_path / "--checkpoint=1/link").is_symlink()


def test_a_damaged_archive_is_one_error_with_what_tar_says(archive, tmp_path):
    archive.write_bytes(archive.read_bytes()[:200])
    with pytest.raises(CannotWrite, match=r"cannot unpack .* into .*out: .*[Uu]nexpected"):
        bundle.unpack(archive, tmp_path / "out")
