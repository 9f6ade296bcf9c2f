"""Folding of logs: torchrun's own lines go, a traceback appears once, and nothing else is lost."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploykit.cli import main as cli
from deploykit.job.model import LogLine
from deploykit.observe.folding import Folding

TRACEBACK = """\
[rank{rank}]: Traceback (most recent call last):
[rank{rank}]:   File "train.py", line {line}, in <module>
[rank{rank}]:     x @ y
[rank{rank}]: RuntimeError: sizes differ at 0x7f{rank}"""
TORCHRUN = """\
W1122 15:26:32.194000 22294 torch/distributed/elastic/multiprocessing/api.py:1028] Sending SIGTERM
E1122 15:26:32.259000 22294 torch/distributed/elastic/multiprocessing/api.py:1002] failed (1)
Traceback (most recent call last):
  File "launch.py", line 70, in <module>
    main(sys.argv[1:], dict(os.environ))
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:\x20
============================================================
launch.py FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
============================================================"""
FAILING = """\
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
print("before the error", flush=True)
torch.ones(3) @ torch.ones(4)
"""


def lines(text, rank=None, node=0):
    return [LogLine(line, node, rank) for line in text.split("\n")]


def shown(*parts):
    folding = Folding()
    texts = [line.text for line in folding.fold(line for part in parts for line in part)]
    assert len(texts) + folding.hidden == sum(map(len, parts)), "no line is lost without count"
    return texts


def test_torchruns_own_lines_are_hidden_and_the_launchers_sentence_is_not():
    last = "rank 0 ended with exit code 1"
    assert shown(lines("step 1", 0), lines(TORCHRUN), lines(last)) == ["step 1", last]


FRAMES = """\
[W1122 20:08:36.529135213 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed: Failed to recv
Exception raised from recvBytes at /src/torch/csrc/distributed/c10d/Utils.hpp:787:
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x9d (0x7f in libc10.so)
frame #1: <unknown function> + 0x674888d (0x7ff05e54888d in libtorch_cpu.so)
"""


def test_frames_of_cpp_go_and_the_message_above_them_stays():
    texts = shown(lines(FRAMES, 0), lines("\nframe 1 of the film\n", 1))
    assert texts == [FRAMES.partition("\n")[0], "", "frame 1 of the film", ""]


def test_torchrun_that_outlives_its_store_is_not_heard():
    """It warns on each node that ends after the first one, even if the run has succeeded."""
    broken = FRAMES.replace("recvValueWithTimeout failed: Failed", "sendBytes failed on Socket")
    assert shown(lines(FRAMES), lines(broken), lines("the end")) == ["the end"]


def test_a_traceback_of_several_ranks_is_printed_once():
    first, second = TRACEBACK.format(rank=1, line=5), TRACEBACK.format(rank=0, line=5)
    assert shown(lines(first, 1), lines(second, 0)) == [
        *first.split("\n"),
        "RuntimeError: sizes differ at 0x7f0  (same traceback as rank 1)",
    ]


def test_interleaved_tracebacks_come_out_whole():
    first = lines(TRACEBACK.format(rank=1, line=5), 1)
    second = lines(TRACEBACK.format(rank=0, line=6).replace("x @ y", "x + y"), 0)
    mixed = [line for pair in zip(first, second, strict=True) for line in pair]
    assert shown(mixed) == [line.text for line in [*first, *second]]


def test_the_same_rank_may_fail_twice_in_the_same_way():
    text = TRACEBACK.format(rank=1, line=5)
    assert shown(lines(text, 1), lines(text, 1)) == [*text.split("\n")] * 2


def test_chained_exceptions_stay_together():
    chained = "\n".join(
        [
            *("Traceback (most recent call last):", '  File "a.py", line 1', "KeyError: 1", ""),
            "During handling of the above exception, another exception occurred:",
            *("", "Traceback (most recent call last):", '  File "a.py", line 3', "ValueError: 2"),
        ]
    )
    assert shown(lines(chained, 0)) == chained.split("\n")


def test_a_traceback_that_never_ends_is_not_held_back():
    text = "Traceback (most recent call last):\n" + "\n".join(["  frame"] * 5000)
    folding = Folding()
    folded = folding.fold(iter(lines(text, 0)))
    assert next(folded).text == "Traceback (most recent call last):"
    assert len(list(folded)) == 5000


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, 0, 1]),
            st.sampled_from([*TORCHRUN.split("\n"), *TRACEBACK.split("\n"), "", "step 1", "====="]),
        )
    )
)
def test_lines_in_any_order_are_shown_or_counted(mixed):
    shown([LogLine(text, 0, rank) for rank, text in mixed])


@pytest.mark.torch
def test_a_users_error_is_told_in_a_few_lines(project, capfd):
    (project / "train.py").write_text(FAILING)
    sets = ["--set", "resources.processes_per_node=2", "--set", "entrypoint.args=[]"]
    assert cli.main(["submit", "--backend", "local", "--run", "folded", "--wait", *sets]) == 1
    told = capfd.readouterr()
    assert told.out.count("Traceback") == 1
    assert "ChildFailedError" not in told.out
    assert len(told.out.split("\n")) <= 20
    assert "repeated tracebacks); `deploykit logs folded --raw` shows all" in told.err
    assert cli.main(["logs", "folded", "--first-error"]) == 0
    assert capfd.readouterr().out.count("RuntimeError: ") == 1
    assert cli.main(["logs", "folded", "--raw"]) == 0
    raw = capfd.readouterr().out
    assert raw.count("Traceback") == 3
    assert "ChildFailedError" in raw


def test_a_bar_is_shown_once_in_ten_seconds_for_each_rank():
    start = datetime(2026, 11, 22, tzinfo=UTC)
    states = [
        LogLine(f"{second}", 0, rank, start + timedelta(seconds=second), bar=True)
        for second in range(25)
        for rank in (0, 1)
    ]
    found = [(line.rank, line.text) for line in Folding().fold(states)]
    assert found == [(rank, text) for text in ("0", "10", "20") for rank in (0, 1)]
