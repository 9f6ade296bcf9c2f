"""An offline run of Weights & Biases: one, with every step once."""

from __future__ import annotations

import json

import pytest

from tests.observe.trackers.tracked import PYTHON, attempt, loss, python, tracked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="wandb: make .venv-trackers/.ready"),
]
READ = """\
import json, struct, sys
from wandb.proto import wandb_internal_pb2
data = open(sys.argv[1], "rb").read()  # a heading, then blocks of LevelDB's log format
at, whole, records = 7, b"", []
while at + 7 <= len(data):
    if 32768 - at % 32768 < 7:
        at += 32768 - at % 32768
    _, size, kind = struct.unpack("<IHB", data[at : at + 7])
    whole += data[at + 7 : at + 7 + size]
    at += 7 + size
    if kind in {1, 4}:  # whole, or the last piece
        records.append(whole)
        whole = b""
for data in records:
    record = wandb_internal_pb2.Record()
    record.ParseFromString(data)
    if record.HasField("history"):
        row = {item.key or item.nested_key[0]: json.loads(item.value_json)
               for item in record.history.item}
        print(json.dumps(row))
"""


OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}


def values_sent():
    (one,) = json.loads(python("-m", "deploykit", "sync", "--json", **OFFLINE))["trackers"]
    assert one["error"] is None
    return one["values"]


def test_a_run_that_was_preempted_thrice(live, tmp_path):
    tracked(live, {"wandb": "team/digits"})
    for number, first in enumerate((0, 20, 40, 60)):
        attempt(live, number, range(first, first + 30))
        assert values_sent() == 0  # it gets the run at its end
    (live.folder / "wandb/offline-run-20260101_000000-live-run").mkdir(parents=True)  # interrupted
    live.end()
    assert (values_sent(), values_sent()) == (180, 0)
    (file,) = live.folder.glob("wandb/offline-run-*/run-live-run.wandb")
    rows = [json.loads(line) for line in python("-c", READ, str(file), **OFFLINE).splitlines()]
    assert [row["_step"] for row in rows] == list(range(90))
    assert [row["loss"] for row in rows] == [loss(step) for step in range(90)]
    assert {row["lr"] for row in rows} == {0.1}
