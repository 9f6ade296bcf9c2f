"""What of a progress bar goes to the log: thinned states, and every line of the program."""

from __future__ import annotations

import io
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from deploykit_node import relay
from deploykit_node.relay import EVERY, FRESH, SOONEST, Lines


def relayed(pieces, *, step=0.0):
    """The lines that are logged of pieces that come `step` seconds apart."""
    lines = Lines()
    logged = []
    for number, piece in enumerate(pieces):
        logged += lines.feed(piece, number * step)
    return [*logged, *lines.finish()]


def drawn(count, **options):
    """What tqdm writes for a loop that it redraws each time."""
    out = io.StringIO()
    for _ in tqdm(range(count), file=out, mininterval=0, miniters=1, ncols=40, **options):
        pass
    return out.getvalue().encode()


def split(data, size=7):
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_of_a_bar_the_last_state_is_a_line_and_the_others_are_thinned(size):
    logged = relayed([b"before\n", *split(drawn(1000), size), b"after\n"])
    assert logged[0] == b"before"
    assert logged[-1] == b"after"
    assert b"1000/1000" in logged[-2]
    assert not logged[-2].startswith(b"\r")
    assert [one[:1] for one in logged[1:-2]] == [b"\r"] * len(logged[1:-2])
    assert len(logged[1:-2]) <= 1


def test_a_long_bar_leaves_a_line_in_ten_seconds():
    states = [b"\r %d%%" % number for number in range(100)]
    logged = relayed(states, step=1.0)
    assert logged[:-1] == [b"\r %d%%" % number for number in range(0, 100, int(EVERY))]
    assert logged[-1] == b" 99%"


def states(seconds, step):
    """A bar with a loss, drawn every `step` seconds."""
    return [
        b"\r %d/9 [00:01<00:05, loss=%.4f]" % (n, 1 / (n + 1)) for n in range(int(seconds / step))
    ]


def test_every_state_with_numbers_is_logged_at_first_so_that_curves_have_points():
    bar = states(50, 0.1)
    assert relayed(bar, step=0.1) == [*bar, bar[-1].lstrip(b"\r")]


def test_a_long_bar_with_numbers_fills_no_log():
    assert len(relayed(states(100, 0.01), step=0.01)) <= 100 / SOONEST
    hours = relayed(states(10 * 3600, 1), step=1)
    assert len(hours) <= 1000 * 4 + 36_000 / EVERY
    assert [b"loss" in one for one in hours] == [True] * len(hours)


@pytest.mark.parametrize(
    "bar", [b"model.bin: %d%%|#| %d/9 [00:01<00:05, 3.1MB/s]", b"Epoch 1: %d%%|#| %d/9"]
)
def test_a_bar_without_numbers_stays_at_ten_seconds(bar):
    assert len(relayed([b"\r" + bar % (n, n) for n in range(1000)], step=0.01)) <= 3


def test_a_bar_that_stands_still_is_logged_when_it_is_due():
    lines = Lines()
    assert list(lines.feed(b"\r 1%", 100)) == [b"\r 1%"]
    assert lines.due() == float("inf")
    assert list(lines.feed(b"\r 2%", 101)) == []
    assert lines.due() == 110
    assert list(lines.tick(lines.due())) == [b"\r 2%"]
    assert lines.due() == float("inf")
    assert list(lines.finish()) == [b" 2%"]


@pytest.mark.parametrize("size", [1, 3, 1000])
def test_a_bar_that_is_wiped_when_it_is_complete_leaves_its_last_state(size):
    one = drawn(5, leave=False)
    logged = relayed(split(one + one + b"done\n", size))
    assert [b"5/5" in line for line in logged if not line.startswith(b"\r")] == [True, True, False]
    assert logged[-1] == b"done"


def test_words_above_a_bar_are_lines_and_do_not_repeat_it():
    out = b"".join(b"\r %d%%\r    \rstep %d\n\r %d%%" % (n, n, n) for n in range(50))
    logged = relayed(split(out))
    assert [one for one in logged if one.startswith(b"step")] == [b"step %d" % n for n in range(50)]
    assert len(logged) <= 50 + 2


def test_a_bar_below_another_one_is_thinned_too():
    inner = b"".join(b"\n\r inner %d%%\x1b[A" % number for number in range(100))
    logged = relayed(split(b"\r outer 0%" + inner + b"\r outer 100%\nend\n"))
    assert logged[-2:] == [b" outer 100%", b"end"]
    assert len(logged) <= 5
    assert relayed([b"\r outer 0%", b"\n\r inner 9%\x1b[A"])[-1] == b" inner 9%"


def test_a_traceback_behind_a_bar_begins_a_line():
    head = b"Traceback (most recent call last):"
    logged = relayed([b"\r 37%", head + b"\n  File", b"\n"])
    assert logged[1:] == [b" 37%", head, b"  File"]


@pytest.mark.parametrize("line", [b"windows\r", b"\r", b"", b"a\tb \xff\x00"])
def test_lines_without_a_bar_are_exact(line):
    assert relayed(split(line + b"\n" + line + b"\nend", 1)) == [line, line, b"end"]


@given(st.lists(st.binary(max_size=20).map(lambda text: text.replace(b"\r", b" ")), max_size=20))
def test_no_line_is_lost(lines):
    whole = [line.replace(b"\n", b" ") for line in lines]
    assert relayed(split(b"".join(line + b"\n" for line in whole))) == whole


@given(st.lists(st.sampled_from([b"\r", b"\n", b"100%", b"   ", b"x"]), max_size=40))
def test_the_last_visible_text_is_kept_wherever_the_reads_end(words):
    data = b"".join(words)
    logged = b"\n".join(relayed(split(data, 2)))
    for line in data.split(b"\n"):
        visible = [part for part in line.split(b"\r") if part.strip()]
        if visible:
            assert visible[-1].strip() in logged


def test_a_terminal_reads_the_current_state_in_a_file_of_rank_zero(tmp_path):
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path), "RANK": "0"}
    assert relay.bar_file(env, "1") is None
    assert relay.bar_file({}, "0") is None
    lines, file = Lines(relay.bar_file(env, "0")), tmp_path / relay.NAME
    list(lines.feed(b"\r 1%", 0))
    assert file.read_bytes() == b" 1%\n"
    assert file.stat().st_mode & 0o777 == 0o600
    list(lines.feed(b"\r 2%", 0.1))
    assert file.read_bytes() == b" 1%\n"
    assert lines.due() == FRESH
    list(lines.tick(FRESH))
    assert file.read_bytes() == b" 2%\n"
    list(lines.feed(b"\r 3%\nnext", 0.6))
    assert not file.exists()


def test_a_folder_that_cannot_be_written_does_not_end_the_training(tmp_path):
    lines = Lines(tmp_path / "none" / "progress")
    assert list(lines.feed(b"\r 1%", 0)) == [b"\r 1%"]


def test_the_launcher_passes_a_bar_on_before_its_program_ends(tmp_path):
    """Through a real pipe: the first state comes while the program still runs."""
    program = (
        "import os, sys; sys.stderr.write('\\r 10%'); sys.stderr.flush(); sys.stdin.readline();"
        "sys.stderr.write('\\r 90%'); sys.stderr.flush(); os.kill(os.getpid(), 9)"
    )
    start = (
        "import os, sys; from deploykit_node import relay;"
        f"env = {{**os.environ, 'RANK': '0', 'DEPLOYKIT_RUN_DIR': {str(tmp_path)!r}}};"
        f"print(relay.run([sys.executable, '-c', {program!r}], env, '[rank 0]')[0])"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", start],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with child:
        first = child.stderr.readline()
        assert first.endswith(b"[rank 0] \r 10%\n")
        assert (tmp_path / "progress").read_bytes() == b" 10%\n"
        out, err = child.communicate(b"\n")
    assert err.endswith(b"[rank 0]  90%\n")
    assert out == b"-9\n"
    assert not (tmp_path / "progress").exists()
