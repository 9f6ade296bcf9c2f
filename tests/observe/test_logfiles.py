"""Logs of the nodes: parsed, merged, followed; no line is lost or duplicated."""

from __future__ import annotations

import random
import resource
import threading
import time
import tracemalloc
from datetime import UTC, datetime
from pathlib import Path

import pytest

from deploykit.job.model import LogLine
from deploykit.observe import logfiles


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
    monkeypatch.setattr(logfiles, "_PAUSE_SECONDS", 0.005)
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


def stamped(at, rank, text):
    """A line of a log, `at` milliseconds after an hour."""
    time = f"01:{at // 60000:02}:{at // 1000 % 60:02}.{at % 1000:03}"
    return f"2026-11-21T{time}Z [rank {rank}] {text}\n"


@pytest.fixture
def many(tmp_path):
    """Logs of forty ranks, one of which stopped early, and one without times."""
    folder = tmp_path / "logs"
    folder.mkdir()
    for rank in range(40):
        steps = range(100) if rank == 7 else range(3000)
        lines = [stamped(step * 31 + rank * 7 % 60, rank, f"step {step}") for step in steps]
        (folder / f"node-{rank}.log").write_text("".join(lines))
    (folder / "job.log").write_text("set up\n" * 3000)
    return folder


def sorted_at_once(folder):
    """All lines as `sort` would merge them."""
    lines = [("", text) for text in (folder / "job.log").read_text().splitlines()]
    for node in range(40):
        lines += [
            (line[:24], line[25:])
            for line in (folder / f"node-{node}.log").read_text().splitlines()
        ]
    return [text for _, text in sorted(lines, key=lambda pair: pair[0])]


def shown(lines):
    return [f"{line.origin}{line.text}" for line in lines]


def logs_of(folder):
    return logfiles.read(folder, follow=False, ended=bool)


def chosen(lines):
    return iter(lines)


@pytest.mark.slow
def test_many_files_are_merged_in_little_memory(many, monkeypatch):
    expected = sorted_at_once(many)
    assert shown(logs_of(many)) == expected
    monkeypatch.setattr(logfiles, "_ALL_BLOCKS_BYTES", 1 << 16)
    tracemalloc.start()
    count = sum(1 for _ in logs_of(many))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == len(expected)
    assert peak < sum(path.stat().st_size for path in many.iterdir()) / 2


@pytest.mark.slow
def test_texts_for_a_pipe_are_the_lines(many):
    (many / "node-3.log").write_text(
        stamped(5, 3, "\r 10% of a bar")
        + "a line of its own\n"
        + "2026-02-32T01:00:00.000Z [rank 3] no such day\n"
        + stamped(7, "04", "a rank with a zero")
        + stamped(6, 3, "earlier than the line before")
        + "2026-11-21T01:00:09.000Z [node 3] launcher\n"
        + "2026-11-21T01:00:09.000Z [rank 3]\n"
        + stamped(60000, 3, "after all that")
        + "".join(stamped(60000 + at, 3, "x" * 200) for at in range(3000))
    )
    plain, found = 0, []
    for batch in logs_of(many).batches():
        text = batch.plain()
        lines = shown(batch.lines())
        plain += text is not None
        if text is not None:
            assert text.splitlines() == lines
        found += lines
    assert plain > 1
    assert found == shown(logs_of(many))
    own = [line for line in found if "[rank 3]" in line or "[node 3]" in line]
    assert own[:8] == [
        "[rank 3]  10% of a bar",
        "[node 3] a line of its own",
        "[node 3] 2026-02-32T01:00:00.000Z [rank 3] no such day",
        "[rank 3] earlier than the line before",
        "[node 3] launcher",
        "[rank 3] ",
        "[rank 3] after all that",
        f"[rank 3] {'x' * 200}",
    ]


ODD_TIMES = (
    *("2026-11-21T01:60:00.000Z", "2026-11-21T01:00:60.000Z", "2026-11-21T24:00:00.000Z"),
    *("2026-11-32T01:00:00.000Z", "2026-13-01T01:00:00.000Z", "2026-00-01T01:00:00.000Z"),
    *("2026-11-21 01:00:00.000Z", "2026-11-21T01:00:00,000Z", "2026-11-2\u0661T01:00:00.000Z"),
    "2026-11-21T01:00:00.00\udce9Z",
)


@pytest.mark.parametrize("odd", ODD_TIMES)
@pytest.mark.parametrize("hours", [0, 3])
def test_one_time_that_does_not_exist_is_seen_among_others(tmp_path, odd, hours):
    times = [f"2026-11-21T{1 + at // 5 * hours:02}:00:00.{at:03}Z" for at in range(10)]
    for place in (None, 0, 3, 10):
        lines = [f"{time} [rank 0] step\n" for time in times]
        if place is not None:
            lines.insert(place, f"{odd} [rank 0] odd\n")
        text = "".join(lines).encode(errors="surrogateescape")
        (tmp_path / "node-0.log").write_bytes(text)
        (batch,) = logs_of(tmp_path).batches()
        assert (batch.plain() is None) == (place is not None)
        assert shown(batch.lines()) == in_order([(0, lines)])


def test_the_29th_of_february_is_a_day_and_the_30th_has_no_time(tmp_path):
    (tmp_path / "node-0.log").write_text(
        "2028-02-29T01:00:01.000Z [rank 0] a\n2028-02-29T01:00:03.000Z [rank 0] c\n"
        "2028-02-30T01:00:00.000Z [rank 0] d\n"
    )
    (tmp_path / "node-1.log").write_text("2028-02-29T01:00:02.000Z [rank 1] b\n")
    lines = list(logs_of(tmp_path))
    assert [line.text for line in lines] == ["a", "b", "c", "d"]
    assert [line.time is None for line in lines] == [False, False, False, True]
    assert [line.text for line in logs_of(tmp_path).tail(2, chosen)] == ["c", "d"]


def any_lines(rng, node):
    """Lines of a log, most of them plain, many at the same time, a few of any kind."""
    at = 0
    odd = [
        *("no time", "", "\r", "caf\udce9", "[rank 2] no time either"),
        "2026-02-32T01:00:00.000Z [rank 1] no such day",
        *(
            f"2026-11-21T01:00:00.000Z {mark}"
            for mark in ("[rank 1]", "[gpu 1] ", "[rank x] ", "[rank 1\u0663] x")
        ),
        *(f"2026-11-21T01:00:00.{n:03}Z [node {n}] of a launcher" for n in (0, 1, 7)),
    ]
    how_odd = rng.choice([0, 0.01, 0.2])
    for number in range(rng.randrange(400)):
        at += rng.choice([0, 0, 1, 1, 5, 1000]) if rng.random() < 0.99 else -3
        rank = rng.choice([0, node, 10])
        if rng.random() < how_odd:
            yield f"{rng.choice(odd)}\n"
        elif rng.random() < how_odd / 4:
            yield stamped(max(0, at), f"0{rank}", "\rbar")
        else:
            yield stamped(max(0, at), rank, rng.choice(["", " x", f"step {number}"]))


def in_order(logs):
    """What a merge must give: (time, file, line), a line never before one of its own file."""
    entries = []
    for number, (node, lines) in enumerate(logs):
        last = ""
        for line in "".join(lines).removesuffix("\n").split("\n"):
            parsed = logfiles.parse(line, node)
            if parsed.time is not None:
                last = max(last, line[:24])
            entries.append((last, number, parsed))
    return [f"{line.origin}{line.text}" for _, _, line in sorted(entries, key=lambda it: it[:2])]


@pytest.mark.parametrize("seed", range(40))
def test_any_logs_are_merged_in_blocks_of_any_size(tmp_path, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(logfiles, "_MIN_BLOCK", rng.choice([16, 300, 1 << 12]))
    monkeypatch.setattr(logfiles, "_ALL_BLOCKS_BYTES", 0)
    logs = [(node, list(any_lines(rng, node))) for node in range(rng.randrange(1, 6))]
    logs = [(node, lines) for node, lines in logs if lines]
    for node, lines in logs:
        lines[-1] = rng.choice([lines[-1], lines[-1].rstrip("\n") or "\n"])
        text = "".join(lines).encode(errors="surrogateescape")
        (tmp_path / f"node-{node}.log").write_bytes(text)
    expected, found = in_order(logs), []
    assert shown(logs_of(tmp_path)) == expected
    for batch in logs_of(tmp_path).batches():
        text = batch.plain()
        found += shown(batch.lines()) if text is None else text.removesuffix("\n").split("\n")
    assert found == expected


@pytest.mark.parametrize("count", [1, 5, 100, 5000, 10**6])
def test_the_last_lines_are_those_of_the_whole(many, count):
    expected = sorted_at_once(many)[-count:]
    assert shown(logs_of(many).tail(count, chosen)) == expected


@pytest.mark.parametrize("count", [1, 50, 200])
def test_the_last_lines_of_a_rank(many, count):
    for rank in (7, 12):
        lines = logs_of(many)
        lines.logs.rank = rank
        expected = [text for text in sorted_at_once(many) if f"[rank {rank}]" in text]
        assert shown(lines.tail(count, chosen)) == expected[-count:]


def test_for_the_last_lines_the_ends_are_read(many, monkeypatch):
    """And no more files are open than the system allows."""
    read, read_block = [], logfiles._Source._read
    monkeypatch.setattr(
        logfiles._Source, "_read", lambda one: read.append(read_block(one)) or read[-1]
    )
    monkeypatch.setattr(logfiles, "_WINDOW", 1 << 12)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    here = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (here + 30, limits[1]))
    try:
        assert len(logs_of(many).tail(100, chosen)) == 100
        total = sum(path.stat().st_size for path in many.iterdir())
        assert sum(map(len, read)) < total / 10
        assert sum(1 for _ in logs_of(many)) == 3000 * 39 + 100 + 3000
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_many_files_are_looked_at_less_often(tmp_path):
    logs = logfiles.Logs(tmp_path)
    assert logs.pause == logfiles._PAUSE_SECONDS
    for node in range(300):
        (tmp_path / f"node-{node}.log").touch()
    assert list(logs.new()) == []
    assert logs.pause == 0.3


def test_the_last_lines_and_those_that_follow(tmp_path):
    log = tmp_path / "node-0.log"
    log.write_text("".join(stamped(at, 0, f"{at}") for at in range(3000)) + "unfinished")
    ended = iter([False, True])

    def is_over():
        with log.open("a") as file:
            file.write(" no more\n")
        return next(ended)

    lines = logfiles.read(tmp_path, follow=True, ended=is_over)
    assert [line.text for line in lines.tail(2, chosen)] == ["2998", "2999"]
    assert [line.text for line in lines] == ["unfinished no more", " no more"]


def test_only_the_files_of_a_node_are_read(many):
    lines = logs_of(many)
    lines.logs.node = 7
    assert len(shown(lines)) == 100
