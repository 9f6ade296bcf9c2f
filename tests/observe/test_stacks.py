"""Dumps of stacks: read, merged by place, printed; and what `status` says of a recorded stall."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from deploykit.observe import stacks
from deploykit.observe.stacks import Frame
from tests.observe import stack_samples as samples
from tests.observe.stack_samples import (
    NEXT,
    REDUCE,
    SITE,
    SOURCE,
    WORKER,
    node_data,
    process,
    rank,
    write,
)


def test_the_odd_one_out_comes_first():
    ranks = [rank(number, *(NEXT if number == 6 else REDUCE)) for number in range(8)]
    first, second = stacks.groups(ranks)
    assert (first.label, second.label) == ("rank 6", "ranks 0-5,7")
    assert str(first.place) == ("_LoaderIter.__next__, called at train.py:19: for batch in loader:")
    assert str(second.place) == "all_reduce, called at train.py:15: dist.all_reduce(total)"
    assert stacks.sentence([first, second]) == (
        "rank 6 is in _LoaderIter.__next__ (train.py:19), "
        "ranks 0-5,7 are in all_reduce (train.py:15)"
    )


def test_lines_within_a_library_do_not_tell_ranks_apart():
    moved = replace(REDUCE[0], line=3250)
    assert len(stacks.groups([rank(0, *REDUCE), rank(1, moved, *REDUCE[1:])])) == 1


def test_native_calls_do_not_tell_ranks_apart():
    native = Frame("0x7f00", "/lib/libc.so.6", 0)
    other = Frame("0x7f11", "/lib/libc.so.6", 0)
    assert len(stacks.groups([rank(0, *REDUCE, native), rank(1, native, *REDUCE, other)])) == 1


def test_the_users_lines_tell_ranks_apart_and_so_does_the_way_there():
    evaluation = Frame("main", f"{SOURCE}/train.py", 30, "step(held_out)")
    other_way = (*REDUCE[:3], evaluation, REDUCE[-1])
    assert len(stacks.groups([rank(0, *REDUCE), rank(1, *other_way)])) == 2
    other_library = (*REDUCE[:2], Frame("sync", f"{SITE}/lib.py", 1), *REDUCE[2:])
    assert len(stacks.groups([rank(0, *REDUCE), rank(1, *other_library)])) == 2


def test_a_rank_that_was_stopped_is_apart():
    first, _ = stacks.groups([rank(0, *REDUCE), rank(1, *REDUCE, state="T"), rank(2, *REDUCE)])
    assert str(first.place).startswith("stopped by a signal, all_reduce")
    assert stacks.sentence([first]) == ("rank 1 is stopped by a signal in all_reduce (train.py:15)")


@pytest.mark.parametrize(
    ("frames", "text"),
    [
        ((), "no Python stack"),
        (REDUCE[2:], "step at train.py:15: dist.all_reduce(total)"),
        (WORKER, "_worker_loop (torch/utils/data/_utils/worker.py:334)"),
        ((samples.SELECT,), "Selector.select (selectors.py:415)"),
        (
            (Frame("<module>", "/srv/own/a.py", 3),),
            "<module> at /srv/own/a.py:3",
        ),
        (
            (Frame("wait", "<frozen importlib._bootstrap>", 3),),
            "wait (importlib._bootstrap:3)",
        ),
        ((Frame("poll", "/lib/libc.so.6", 0), *NEXT[2:3]), "_LoaderIter.__next__ (torch/utils"),
    ],
)
def test_a_place_is_named_by_a_function_that_a_reader_knows(frames, text):
    assert str(stacks.place(process(*frames))).startswith(text)


def test_a_sentence_names_three_groups():
    ranks = [rank(number, Frame("f", f"{SOURCE}/a.py", number)) for number in range(5)]
    text = stacks.sentence(stacks.groups(ranks))
    assert text.endswith("rank 2 is in f (a.py:2), 2 more ranks elsewhere")
    assert stacks.sentence(stacks.groups(ranks[:1])) == "rank 0 is in f (a.py:0)".replace(":0", "")
    same = [rank(number, *REDUCE) for number in range(3)]
    assert stacks.sentence(stacks.groups(same)) == "all 3 ranks are in all_reduce (train.py:15)"


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([7], "7"), ([3, 1, 2, 9, 5, 6], "1-3,5-6,9")]
)
def test_spans(numbers, text):
    assert stacks.spans(numbers) == text


DUMP_TEXT = """\
rank 1: _LoaderIter.__next__, called at train.py:19: for batch in loader:
    Selector.select (selectors.py:415)
    _LoaderIter._get_data (torch/utils/data/dataloader.py:1464)
    _LoaderIter.__next__ (torch/utils/data/dataloader.py:725)
    main (train.py:19)  for batch in loader:
    <module> (train.py:21)  main()
  1 child process sh: not a Python process
  2 child processes pt_data_worker: _worker_loop (torch/utils/data/_utils/worker.py:334)

ranks 0,3: all_reduce, called at train.py:15: dist.all_reduce(total)
    all_reduce (torch/distributed/distributed_c10d.py:3252)
    _log.<locals>.wrapper (torch/distributed/c10d_logger.py:83)
    step (train.py:15)  dist.all_reduce(total)
    main (train.py:20)  step(batch)
    <module> (train.py:21)  main()

rank 2: no process; it has ended or not started yet, or its node did not respond
rank 3: read with faulthandler, because py-spy is not installed on the node
"""


def sample(folder):
    workers = (process(*WORKER, name="pt_data_worker"),) * 2
    late = rank(1, *NEXT, children=(*workers, process(name="sh")))
    missing = "py-spy is not installed on the node"
    other = rank(3, *REDUCE, tool="faulthandler", problem=missing)
    write(folder, node_data(rank(0, *REDUCE), late), node_data(other, host="n2"))
    return stacks.read(folder)


def test_the_dump_of_two_nodes_as_text(tmp_path):
    assert "\n".join(stacks.lines(sample(tmp_path / "a"))) + "\n" == DUMP_TEXT


def test_all_threads_are_shown_on_request(tmp_path):
    one = rank(0, *REDUCE)
    thread = stacks.Thread("loader", NEXT[:1])
    process = stacks.Process(1, "python", "S", (*one.process.threads, thread))
    write(tmp_path / "a", node_data(stacks.RankStacks(0, "n1", "py-spy", "", process)))
    dump = stacks.read(tmp_path / "a")
    assert "  loader" not in list(stacks.lines(dump))
    lines = list(stacks.lines(dump, threads=True))
    at = lines.index("  loader")
    assert lines[at + 1] == "    Selector.select (selectors.py:415)"


def test_the_same_as_data(tmp_path):
    data = json.loads(json.dumps(stacks.data(sample(tmp_path / "a"))))
    assert data["time"] == "2026-11-23T07:20:01Z"
    assert data["summary"].startswith("rank 1 is in _LoaderIter.__next__ (train.py:19), ranks 0,3")
    assert [group["ranks"] for group in data["groups"]] == [[1], [0, 3]]
    assert data["groups"][0]["called_at"]["text"] == "for batch in loader:"
    assert data["ranks"][1]["children"][2] == {"pid": 1, "name": "sh", "threads": []}
    assert data["absent"] == [2]


def test_the_newest_dump_is_found(tmp_path):
    assert stacks.newest(tmp_path) is None
    for name in ("20261123T072001Z", "20261123T072001Z-2", "20261122T000000Z"):
        write(tmp_path / "stacks" / name, node_data(rank(0, *REDUCE)))
    (tmp_path / "stacks" / "20261124T000000Z").mkdir()
    assert stacks.newest(tmp_path).name == "20261123T072001Z-2"


def test_an_incomplete_file_is_left_out(tmp_path):
    write(tmp_path / "a", node_data(rank(0, *NEXT)), '{"ranks": [{"rank": 1', "[]", "{}")
    assert [one.rank for one in stacks.read(tmp_path / "a").ranks] == [0]


def stall_record(folder, node=0, **changes):
    time = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
    data = {"time": time, "seconds": 240, "longest": 3, "dump": "", "nodes": 1, "attempt": 0}
    data |= {"waiting": 0, "address": "", "refused": False, "stopped": False}
    path = folder / "exit_records" / f"stall-{node}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**data, **changes}))


def test_the_time_and_the_places(tmp_path):
    assert stacks.stall_reason(tmp_path) == ""
    stall_record(tmp_path)
    assert stacks.stall_reason(tmp_path) == "no progress for 4 min"
    write(tmp_path / "stacks/a", node_data(rank(0, *REDUCE), rank(1, *NEXT)))
    write(tmp_path / "stacks/b", node_data(rank(2, *REDUCE)))
    stall_record(tmp_path, dump="a", nodes=2)
    stall_record(tmp_path, 1, dump="b", nodes=2)
    assert stacks.stall_reason(tmp_path) == (
        "no progress for 4 min: rank 1 is in _LoaderIter.__next__ (train.py:19), "
        "ranks 0,2 are in all_reduce (train.py:15)"
    )


def test_a_node_that_makes_progress_means_that_the_run_does(tmp_path):
    stall_record(tmp_path, nodes=2)
    assert stacks.stall_reason(tmp_path) == ""
    stall_record(tmp_path, 1, nodes=2, attempt=1)
    assert stacks.stall_reason(tmp_path) == "", "the other record is of an earlier attempt"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "less than 1 min"), (90, "1 min"), (260, "4 min"), (1500, "25 min"), (9000, "2 h")],
)
def test_times_are_told_in_steps(seconds, text, tmp_path):
    stall_record(tmp_path, seconds=seconds)
    assert stacks.stall_reason(tmp_path) == f"no progress for {text}"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"address": "", "refused": False}, "4 of 4 processes are waiting in init_process_group"),
        (
            {"address": "localhost:12355", "refused": True},
            (
                "4 of 4 processes are waiting to connect to localhost:12355, "
                "where nothing is listening"
            ),
        ),
        (
            {"address": "n1:12355", "refused": False},
            "4 of 4 processes are waiting for others at n1:12355",
        ),
    ],
)
def test_processes_that_wait_for_others(more, text, tmp_path):
    for node in range(2):
        stall_record(tmp_path, node, nodes=2, waiting=2, **more)
    assert stacks.stall_reason(tmp_path) == f"no progress for 4 min: {text}"
