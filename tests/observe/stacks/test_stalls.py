"""What `status` says of a run whose launchers have recorded a stall."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from deploykit.observe import stacks
from tests.observe.stacks.samples import NEXT, REDUCE, node_data, rank, write


def record(folder, node=0, **changes):
    time = (datetime.now(UTC) - timedelta(seconds=5)).isoformat()
    data = {"time": time, "seconds": 240, "longest": 3, "dump": "", "nodes": 1, "attempt": 0}
    data |= {"waiting": 0, "address": "", "refused": False}
    path = folder / "exit_records" / f"stall-{node}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({**data, **changes}))


def test_the_time_and_the_places(tmp_path):
    assert stacks.stall_reason(tmp_path) == ""
    record(tmp_path)
    assert stacks.stall_reason(tmp_path) == "no progress for 4 min"
    write(tmp_path / "stacks/a", node_data(rank(0, *REDUCE), rank(1, *NEXT)))
    write(tmp_path / "stacks/b", node_data(rank(2, *REDUCE)))
    record(tmp_path, dump="a", nodes=2)
    record(tmp_path, 1, dump="b", nodes=2)
    assert stacks.stall_reason(tmp_path) == (
        "no progress for 4 min: rank 1 is in _LoaderIter.__next__ (train.py:19), "
        "ranks 0,2 are in all_reduce (train.py:15)"
    )


def test_a_node_that_makes_progress_means_that_the_run_does(tmp_path):
    record(tmp_path, nodes=2)
    assert stacks.stall_reason(tmp_path) == ""
    record(tmp_path, 1, nodes=2, attempt=1)
    assert stacks.stall_reason(tmp_path) == "", "the other record is of an earlier attempt"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3, "less than 1 min"), (90, "1 min"), (260, "4 min"), (1500, "25 min"), (9000, "2 h")],
)
def test_times_are_told_in_steps(seconds, text, tmp_path):
    record(tmp_path, seconds=seconds)
    assert stacks.stall_reason(tmp_path) == f"no progress for {text}"


@pytest.mark.parametrize(
    "changes",
    [
        {"seconds": -1},
        {"seconds": 10**30},
        {"nodes": 0},
        {"time": "soon"},
        {"time": "9999-12-31T23:59:59-23:00"},
        {"dump": None},
        {"attempt": "x"},
    ],
)
def test_a_record_that_is_none_is_left_out(changes, tmp_path):
    record(tmp_path, **changes)
    assert stacks.stall_reason(tmp_path) == ""


@pytest.mark.parametrize("name", ["../a", "/etc", "a/b"])
def test_a_record_names_no_folder_outside(name, tmp_path):
    record(tmp_path, dump=name)
    assert stacks.stall_reason(tmp_path) == "no progress for 4 min"


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"address": "", "refused": False}, "4 of 4 processes wait in init_process_group"),
        (
            {"address": "localhost:12355", "refused": True},
            "4 of 4 processes wait to connect to localhost:12355, where nobody listens",
        ),
        (
            {"address": "n1:12355", "refused": False},
            "4 of 4 processes wait for others at n1:12355",
        ),
    ],
)
def test_processes_that_wait_for_others(more, text, tmp_path):
    for node in range(2):
        record(tmp_path, node, nodes=2, waiting=2, **more)
    assert stacks.stall_reason(tmp_path) == f"no progress for 4 min: {text}"
