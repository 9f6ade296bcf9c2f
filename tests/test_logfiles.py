"""Logs of the nodes: parsed, merged, followed; no line is lost or duplicated."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime

from deploykit import logfiles
from deploykit.model import LogLine


def texts(folder, **how):
    return [line.text for line in logfiles.read(folder, **{"follow": False, "ended": bool, **how})]


def test_marks_are_taken_off():
    when = datetime(2026, 11, 21, 1, 46, 8, 123000, tzinfo=UTC)
    mark = "2026-11-21T01:46:08.123Z"
    assert logfiles.parse(f"{mark} [rank 3]  indented", 1) == LogLine(" indented", 1, 3, when)
    assert logfiles.parse(f"{mark} [node 1] up", 1) == LogLine("up", 1, None, when)
    assert logfiles.parse(f"{mark} [rank 3] ", 0) == LogLine("", 0, 3, when)
    for plain in ("", "hello", "[rank 3] x", f"{mark} rank 3 x", "2026 [rank 1] x"):
        assert logfiles.parse(plain, None) == LogLine(plain)


def test_nodes_are_merged_by_time_and_lines_without_one_stay_behind_theirs(tmp_path):
    stamp = "2026-11-21T01:00:0{}.000Z [rank {}] {}\n"
    one = [stamp.format(1, 0, "a"), "  of a\n", stamp.format(4, 0, "d")]
    two = [stamp.format(2, 1, "b"), stamp.format(3, 1, "c"), "  of c\n"]
    (tmp_path / "node-0.log").write_text("".join(one))
    (tmp_path / "node-1.log").write_text("".join(two))
    (tmp_path / "job.log").write_text("first\n")
    assert texts(tmp_path) == ["first", "a", "  of a", "b", "c", "  of c", "d"]


def test_ten_nodes_are_in_the_order_of_their_numbers(tmp_path):
    for node in (10, 2, 0):
        (tmp_path / f"node-{node}.log").write_text(f"n{node}\n")
    assert texts(tmp_path) == ["n0", "n2", "n10"]


def test_bytes_that_are_no_text_and_a_last_line_without_end(tmp_path):
    (tmp_path / "node-0.log").write_bytes(b"caf\xe9\r\n\nend")
    assert texts(tmp_path) == ["caf\udce9\r", "", "end"]


def test_following_misses_and_doubles_nothing(tmp_path, monkeypatch):
    """Pieces of lines, a file that comes late, and a last line written as the job ends."""
    monkeypatch.setattr(logfiles, "_PAUSE", 0.005)
    done = threading.Event()

    def write():
        with (tmp_path / "node-0.log").open("a", buffering=1) as first:
            for number in range(300):
                first.write(f"a{number}")
                first.flush()
                if number == 100:
                    (tmp_path / "node-1.log").write_text("b\n")
                time.sleep(0.0005)
                first.write("\n")
            first.write("last, unfinished")
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    found = texts(tmp_path, follow=True, ended=done.is_set)
    writer.join()
    assert [text for text in found if text != "b"] == [f"a{n}" for n in range(300)] + [
        "last, unfinished"
    ]
    assert found.count("b") == 1
