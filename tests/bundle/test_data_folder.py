"""Folders of data: which files are uploaded, what names their content, and when they are read."""

from __future__ import annotations

import base64
import hashlib
import os
import resource
import sys
import time

import pytest
from s3transfer.utils import ChunksizeAdjuster

from deploykit.bundle import data_folder
from deploykit.lib.errors import JobFileError

_collecting = []
"""The list that gets the paths that are opened, during a test: an audit hook stays for good."""


def _hook(event, args):
    if event == "open" and _collecting and isinstance(args[0], str):
        _collecting[-1].append(args[0])


sys.addaudithook(_hook)


@pytest.fixture
def opened():
    _collecting.append([])
    yield _collecting[-1]
    _collecting.pop()


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "my data"
    for name, content in {"a.csv": "1,2\n", "sub/b ü.bin": "x" * 5000, "empty": ""}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


def scan(folder):
    return data_folder.scan("train", str(folder))


def names(folder):
    return [file.path for file in scan(folder).files]


def test_the_hash_names_the_content_and_nothing_else(data, tmp_path):
    first = scan(data)
    assert [file.path for file in first.files] == ["a.csv", "empty", "sub/b ü.bin"]
    other = tmp_path / "copy"
    data.rename(other)
    os.utime(other / "a.csv", (1, 1))
    assert scan(other).hash == first.hash
    (other / "a.csv").write_text("1,3\n")
    changed = scan(other)
    assert changed.hash != first.hash
    (other / "a.csv").rename(other / "c.csv")
    assert scan(other).hash not in {first.hash, changed.hash}


def test_unchanged_files_are_not_read_again(data, opened):
    data_folder.remember([scan(data)])

    def read():
        """The files that the next scan reads, besides ignore files."""
        opened.clear()
        scan(data)
        ours = [path for path in opened if path.startswith(str(data))]
        return [path for path in ours if not path.endswith(".deploykitignore")]

    assert read() == []
    (data / "a.csv").write_text("9,9\n")
    assert read() == [str(data / "a.csv")]


def test_a_change_that_keeps_size_and_time_is_seen(data):
    first = scan(data)
    data_folder.remember([first])
    before = (data / "a.csv").stat()
    (data / "a.csv").write_text("3,4\n")
    os.utime(data / "a.csv", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert scan(data).hash != first.hash


def test_a_file_that_was_just_written_is_read_when_its_times_are_settled(data):
    """A second change within the same tick of the clock would leave the times as they are."""
    (data / "a.csv").write_text("5,6\n")
    scan(data)
    assert time.time() - (data / "a.csv").stat().st_ctime >= 0.09


def test_the_checksum_of_a_large_file_is_that_of_its_parts(data):
    content = os.urandom(data_folder.PART * 2 + 17)
    (data / "large").write_bytes(content)
    parts = [content[at : at + data_folder.PART] for at in range(0, len(content), data_folder.PART)]
    whole = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts)).digest()
    (large,) = (file for file in scan(data).files if file.path == "large")
    assert large.checksum == f"{base64.b64encode(whole).decode()}-3"
    assert len(large.parts) == 3


@pytest.mark.parametrize("size", [1, 9, 79_999, 80_000, 80_001, 500_000, 5_000_000])
def test_parts_are_as_large_as_those_of_boto3(size):
    """In units of 2**20 bytes; S3 allows 10,000 parts."""
    expected = ChunksizeAdjuster().adjust_chunksize(data_folder.PART, size * 2**20)
    assert data_folder.part_size(size * 2**20) == expected


def test_gits_rules_do_not_leave_data_out(data, tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".gitignore").write_text("my data/\n*.csv\n")
    (data / ".gitignore").write_text("*\n")
    assert names(data) == [".gitignore", "a.csv", "empty", "sub/b ü.bin"]


def test_deploykitignore_leaves_out_files_and_secrets_stay_unless_it_includes_them(data):
    for name in (".env", "server.key", ".DS_Store", "cache/x"):
        (data / name).parent.mkdir(exist_ok=True)
        (data / name).write_text("x")
    (data / ".deploykitignore").write_text("cache/\n!server.key\n.deploykitignore\n")
    found = scan(data)
    assert [file.path for file in found.files] == ["a.csv", "empty", "server.key", "sub/b ü.bin"]
    (warning,) = found.warnings
    assert warning.path == "data.train"
    assert warning.message.endswith("suggest secrets: .env")
    assert "!.env" in warning.hint


def test_links_are_replaced_by_what_they_name(data, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/c").write_text("c")
    (data / "file").symlink_to(data / "a.csv")
    (data / "folder").symlink_to(tmp_path / "elsewhere")
    files = {file.path: file.size for file in scan(data).files}
    assert files["file"] == 4
    assert files["folder/c"] == 1


def test_every_file_that_cannot_be_uploaded_is_reported(data):
    (data / "loop").symlink_to(data)
    (data / "sub/nothing").symlink_to("missing")
    os.mkfifo(data / "pipe")
    (data / ("d" * 200)).mkdir()
    deep = data.joinpath(*["d" * 200] * 5)
    deep.mkdir(parents=True)
    (deep / "x").touch()
    (data / os.fsdecode(b"\xff")).touch()
    with pytest.raises(JobFileError) as caught:
        scan(data)
    found = {problem.message.replace("d" * 200, "d") for problem in caught.value.problems}
    assert "loop/ is a link to a folder that contains it" in found
    assert "sub/nothing is a broken link" in found
    assert "pipe is neither a file nor a folder" in found
    assert "d/d/d/d/d/x exceeds the maximum length of an S3 key" in found
    assert any("not a valid UTF-8 name" in message for message in found)
    assert {problem.path for problem in caught.value.problems} == {"data.train"}


def test_a_folder_without_files_is_a_problem(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(JobFileError, match="has no files to upload"):
        scan(tmp_path / "none")


def test_a_full_disk_costs_only_time(data, caplog):
    """The checksums do not fit: the next scan reads the files again."""
    folder = scan(data)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        data_folder.remember([folder])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    (record,) = caplog.records
    assert "were not saved, so the next submit reads all files again" in record.getMessage()
    assert scan(data).hash == folder.hash
