"""`disk`."""

from __future__ import annotations

import json
import os
import subprocess

from deploykit.lib import paths
from deploykit.run import storage
from tests.run.housekeeping.state import run


def test_disk_adds_up_and_lists_the_largest_first(add, capsys):
    large, small = add("large"), add("small")
    (large / "checkpoints/step-1").write_bytes(b"x" * 2_000_000)
    (small / "output/result").write_bytes(b"x" * 300_000)
    shown = json.loads(run(capsys, "disk", "--json")[1])
    assert [one["run"] for one in shown["runs"]] == ["large", "small"]
    first, second = shown["runs"]
    assert 2_000_000 <= first["parts"]["checkpoints"] < 2_020_000
    assert 300_000 <= second["parts"]["output"] < 320_000
    assert sum(kind["bytes"] for kind in shown["kinds"].values()) == shown["bytes"]
    counted = subprocess.run(
        ["du", "-s", "-B1", str(paths.state())], capture_output=True, text=True, check=True
    )
    assert abs(int(counted.stdout.split()[0]) - shown["bytes"]) <= 8192
    assert shown["free"] > 0
    out = run(capsys, "disk")[1]
    assert out.index("runs\t2\t") < out.index("bundles\t1\t")
    assert out.index("\nlarge\t") < out.index("\nsmall\t")


def test_disk_with_nothing_to_show_makes_no_file(capsys):
    code, out, _ = run(capsys, "disk")
    assert (code, out.startswith(f"{paths.state()}: 0 B, ")) == (0, True)
    assert not paths.state().exists()


def test_a_file_with_two_names_counts_once_and_a_link_not_at_all(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    empty = storage.size(folder)
    (folder / "one").write_bytes(b"x" * 8192)
    os.link(folder / "one", folder / "two")
    (folder / "link").symlink_to("..")  # a target of 60 bytes and more would take a block
    assert storage.size(folder) == empty + 8192


def test_disk_looks_into_folders_of_any_depth(tmp_path):
    deep = tmp_path / "deep"
    here = deep
    for _ in range(300):
        here /= "d"
    here.mkdir(parents=True)
    (here / "file").write_bytes(b"x" * 4096)
    assert storage.size(deep) >= 301 * 4096
