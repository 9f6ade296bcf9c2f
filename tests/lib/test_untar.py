"""Archives from elsewhere, by Python's filter and, as on Debian 12's Python 3.11.2, without one."""

from __future__ import annotations

import io
import tarfile

import pytest

from deploykit.lib import untar

CONTENT = b"weights"


@pytest.fixture(autouse=True, params=["filter", "no filter"])
def filters(request, monkeypatch):
    """With the filter of this Python, and with what replaces it."""
    if request.param == "no filter":
        monkeypatch.setattr(untar, "_HAS_FILTERS", False)
    elif not untar._HAS_FILTERS:
        pytest.skip("optional: this Python has no filters")


def archive(*members):
    """A tar archive of members: name, type and what a link leads to."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, kind, link in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname, info.mode = kind, link, 0o777
            info.size = len(CONTENT) if kind == tarfile.REGTYPE else 0
            tar.addfile(info, io.BytesIO(CONTENT))
    stream.seek(0)
    return tarfile.open(fileobj=stream)


GOOD = (
    ("model", tarfile.DIRTYPE, ""),
    ("model/a.bin", tarfile.REGTYPE, ""),
    ("model/newest", tarfile.SYMTYPE, "a.bin"),
    ("model/same", tarfile.LNKTYPE, "model/a.bin"),
)
BAD = {
    "above": ("../x", tarfile.REGTYPE, ""),
    "a link above": ("model/x", tarfile.SYMTYPE, "../../x"),
    "an absolute link": ("x", tarfile.SYMTYPE, "/etc/passwd"),
    "a hard link above": ("x", tarfile.LNKTYPE, "../x"),
    "a pipe": ("x", tarfile.FIFOTYPE, ""),
    "a device": ("x", tarfile.CHRTYPE, ""),
}


def test_files_folders_and_links_within(tmp_path):
    folder = tmp_path / "to"
    with archive(*GOOD) as tar:
        untar.extract_all(tar, folder)
    for name in ("a.bin", "newest", "same"):
        assert (folder / "model" / name).read_bytes() == CONTENT
    assert (folder / "model/newest").is_symlink()
    assert (folder / "model/a.bin").stat().st_mode & 0o022 == 0  # others cannot write


@pytest.mark.parametrize("name", BAD)
def test_a_member_that_would_leave_the_folder_or_is_no_file(name, tmp_path):
    folder = tmp_path / "to"
    with archive(BAD[name], *GOOD) as tar, pytest.raises(untar.UnsafeMemberError):
        untar.extract_all(tar, folder)
    assert not (tmp_path / "x").exists()
    with archive(BAD[name], *GOOD) as tar:
        untar.extract_all(tar, folder, skip_unsafe=True)
    assert (folder / "model/a.bin").read_bytes() == CONTENT
    assert not (tmp_path / "x").exists()


def test_a_file_through_a_link_that_came_before(tmp_path):
    """The second member is checked where the first one leads."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "to/out").symlink_to("../outside")
    member = ("out/x", tarfile.REGTYPE, "")
    with archive(member) as tar, pytest.raises(untar.UnsafeMemberError):
        untar.extract_all(tar, tmp_path / "to")
    assert not list((tmp_path / "outside").iterdir())
