"""Records that others may have written: exit records, dumps, metrics."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from deploykit.diagnose import dumps, flight
from deploykit.diagnose.dumps import NotADump
from deploykit.observe import exit_records
from deploykit_node import log
from deploykit_node import records as node_records
from deploykit_node.restart import slurm_job
from tests import flight_recorder
from tests.flight_recorder import RECORD
from tests.fuzz.foreign import anything, files, given, made, odd, outcome
from trainer import metrics

NODE = {"exit_code": 1, "reason": "rank 0", "rank": 0, "finished": log.now(), "attempt": 0}
RANK = {
    "rank": 0,
    "local_world_size": 1,
    "world_size": 2,
    "exit_code": 75,
    "stopped": True,
    "finished": log.now(),
    "attempt": 0,
}
RESTART = {"restart": 1, "why": "preemption", "time": log.now()}
DUMP = json.loads(json.dumps(flight_recorder.dump([RECORD, RECORD])))
"""With lists in place of tuples, so that a part can be replaced."""


@given(node=files(NODE), other=files(NODE), restart=files(RESTART), attempt=files({"attempt": 1}))
def test_an_exit_record_is_read_or_left(tmp_path_factory, node, other, restart, attempt):
    folder = tmp_path_factory.mktemp("run")
    (folder / "exit_records").mkdir()
    (folder / "exit_records/node-0.json").write_bytes(node)
    (folder / "exit_records/node-x.json").write_bytes(other)
    (folder / "exit_records/restart-1.json").write_bytes(restart)
    (folder / "exit_records/restart-\u0663.json").write_bytes(restart)
    (folder / "exit_records/attempt.json").write_bytes(attempt)
    for end in exit_records.read(folder):
        assert 0 <= end.exit_code <= 255
        assert (type(end.reason), type(end.rank) in {int, bool, type(None)}) == (str, True)
    assert all(type(why) is str for why in exit_records.restarts(folder))
    assert exit_records.attempt(folder) is None or isinstance(exit_records.attempt(folder), int)


@given(one=files(RANK), node=files(NODE), pid=files({"pid": 7}), restart=files(RESTART))
def test_an_exit_record_is_read_or_left_on_the_node(tmp_path_factory, one, node, pid, restart):
    run = tmp_path_factory.mktemp("run")
    folder = run / "exit_records"
    folder.mkdir()
    for name in ("rank-0.json", "rank-x.json", "rank-9.json"):
        (folder / name).write_bytes(one)
    (folder / "node-0.json").write_bytes(node)
    (folder / "rank-1.pid").write_bytes(pid)
    (folder / "restart-1.json").write_bytes(restart)
    env = {"DEPLOYKIT_RUN_DIR": str(run)}
    assert all(pid > 1 for pid in node_records.living(folder).values())
    for end in node_records.failures(folder, 0):
        assert "rank" in node_records.sentence(end)
    node_records.all_ended_well(folder)
    (folder / "failed-0.0.json").write_bytes(one)
    assert node_records.first_failure(env, folder) is None or node_records.codes(folder)
    node_records.first_stopped(folder)
    assert node_records.has_ended(env, 0) in {True, False}
    assert slurm_job.describe(slurm_job.restarts(env, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"exit_code": float("inf")},
        {"exit_code": 10**10},
        {"finished": "2026-11-21T01:46:08"},
        {"finished": 5},
        {"rank": []},
        {"attempt": "x"},
    ],
    ids=str,
)
def test_one_odd_record_does_not_hide_the_others(tmp_path, change):
    """Before, an infinite exit code or a time without a zone ended `status` with exit code 70."""
    (tmp_path / "exit_records").mkdir()
    for name, record in ((0, NODE), (1, {**NODE, **change})):
        (tmp_path / f"exit_records/node-{name}.json").write_text(json.dumps(record))
    assert any(end.reason == "rank 0" and end.exit_code == 1 for end in exit_records.read(tmp_path))
    (tmp_path / "exit_records/rank-0.json").write_text(json.dumps({**RANK, "exit_code": 1}))
    (tmp_path / "exit_records/rank-1.json").write_text(
        json.dumps({**RANK, **change, "finished": 7})
    )
    assert [end["rank"] for end in node_records.failures(tmp_path / "exit_records", 0)] == [0]


@pytest.fixture
def dump(tmp_path_factory):
    path = tmp_path_factory.mktemp("dump") / "fr_0"

    def read(data):
        path.write_bytes(data)
        return outcome(dumps.read, path)

    return read


def pickles(chance):
    """A dump with wrong parts, or with wrong bytes."""
    tree = json.loads(json.dumps(DUMP))
    tree["entries"][0][chance.choice(sorted(RECORD))] = anything(chance)
    tree["pg_config"][odd(chance)] = anything(chance)
    data = bytearray(pickle.dumps(tree if chance.random() < 0.5 else DUMP, chance.randrange(5)))
    for _ in range(chance.randrange(4)):
        start = chance.randrange(len(data))
        data[start : start + chance.randrange(4)] = chance.randbytes(chance.randrange(5))
    return bytes(data)


@given(data=made(pickles))
def test_a_dump_is_read_or_refused(dump, data):
    found = dump(data)
    assert isinstance(found, (dumps.Dump, NotADump))
    if isinstance(found, dumps.Dump):
        assert [divergence.line for divergence in flight.divergences([found])]


def test_sizes_where_types_should_be_are_shown(tmp_path):
    """Before, they ended with exit code 70."""
    odd_one = {**RECORD, "input_dtypes": [[4]]}
    (tmp_path / "fr_0").write_bytes(pickle.dumps({**DUMP, "entries": [odd_one]}))
    assert "[4] [[4]]" in flight._last(dumps.read(tmp_path / "fr_0"))


def test_a_dump_cannot_be_part_of_itself(dump):
    entries: list = []
    entries.append(entries)
    assert "expected dict" in str(dump(pickle.dumps({**DUMP, "entries": entries})))


@given(lines=files({"step": 1, "epoch": 0, "loss": 0.5}))
def test_metrics_of_an_earlier_run_are_kept_or_dropped(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    good = b'{"step": 1, "epoch": 0}\n'
    path.write_bytes(good + lines + b"\n" + good)
    metrics.MetricsWriter(path.parent, 1, tensorboard=False).close()
    assert path.read_bytes().startswith(good)
    assert all(json.loads(line)["step"] <= 1 for line in path.read_text().splitlines())


def test_files_that_are_missing_say_so(tmp_path):
    with pytest.raises(NotADump):
        dumps.read(Path(tmp_path, "fr_0"))
    assert exit_records.read(tmp_path) == []
