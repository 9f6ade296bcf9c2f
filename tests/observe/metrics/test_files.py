"""Files of metrics: event files as TensorBoard's own writer makes them, and JSON lines."""

from __future__ import annotations

import itertools
import json
import math
import os
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploykit.observe.metrics import files, tensorboard
from deploykit.observe.metrics.files import CsvRows, JsonLines, MetricFiles
from deploykit.observe.metrics.points import Point, number
from deploykit.observe.metrics.series import Collection, without_repeats
from deploykit.observe.metrics.tensorboard import EventFile

STARTED = 1_000.0


@pytest.fixture(scope="module")
def proto():
    """TensorBoard's own messages, and the writer of its files."""
    from tensorboard.compat.proto import event_pb2, summary_pb2, tensor_pb2
    from tensorboard.summary.writer.record_writer import RecordWriter

    class Proto:
        Event, Summary, Tensor = event_pb2.Event, summary_pb2.Summary, tensor_pb2.TensorProto
        SessionLog, Writer = event_pb2.SessionLog, RecordWriter

    return Proto


def scalar(proto, step, tag, value, time=STARTED):
    summary = proto.Summary(value=[proto.Summary.Value(tag=tag, simple_value=value)])
    return proto.Event(step=step, wall_time=time, summary=summary)


def tensor(proto, step, tag, **fields):
    value = proto.Summary.Value(tag=tag, tensor=proto.Tensor(**fields))
    return proto.Event(step=step, wall_time=STARTED, summary=proto.Summary(value=[value]))


def write(proto, path, *events):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer = proto.Writer(file)
        for event in [proto.Event(file_version="brain.Event:2", wall_time=STARTED), *events]:
            writer.write(event.SerializeToString())
        writer.flush()
    return path


def read(path):
    with path.open("rb", buffering=0) as file:
        reader = EventFile("board")
        return list(reader.read(file)), reader.problem


def test_scalars_of_every_kind(proto, tmp_path):
    """As torch and TensorFlow 1 write them, and as TensorFlow 2 does."""
    path = write(
        proto,
        tmp_path / f"{tensorboard.FILE_NAME}1",
        scalar(proto, 1, "loss/train", 0.5),
        tensor(proto, 2, "float", dtype=1, float_val=[1.5]),
        tensor(proto, 3, "content", dtype=1, tensor_content=struct.pack("<f", 2.5)),
        tensor(proto, 4, "double", dtype=2, double_val=[3.5]),
        tensor(proto, 5, "int", dtype=9, tensor_content=struct.pack("<q", -7)),
        scalar(proto, 6, "bad", float("nan")),
        scalar(proto, -1, "before", 1.0),
    )
    points, problem = read(path)
    assert problem == ""
    assert [(one.name, one.value, one.step) for one in points[:5]] == [
        *(("loss/train", 0.5, 1), ("float", 1.5, 2), ("content", 2.5, 3), ("double", 3.5, 4)),
        ("int", -7.0, 5),
    ]
    assert math.isnan(points[5].value)
    assert points[6].step is None
    assert {(one.time, one.source) for one in points} == {(STARTED, "board")}


def test_what_is_no_scalar_is_skipped(proto, tmp_path):
    shape = {"dim": [{"size": 2}]}
    picture = proto.Summary.Value(tag="x", image={"encoded_image_string": b"0" * 200_000})
    path = write(
        proto,
        tmp_path / f"{tensorboard.FILE_NAME}1",
        tensor(proto, 1, "vector", dtype=1, float_val=[1, 2], tensor_shape=shape),
        tensor(proto, 1, "text", dtype=7, string_val=[b"hello"]),
        proto.Event(step=2, summary=proto.Summary(value=[picture])),
        proto.Event(step=2, session_log=proto.SessionLog(status=1)),
        scalar(proto, 3, "loss", 0.25),
    )
    points, problem = read(path)
    assert [(one.name, one.value) for one in points] == [("loss", 0.25)]
    assert problem == ""


@pytest.mark.torch
def test_a_file_of_torch_is_read_as_tensorboard_reads_it(tmp_path):
    import torch
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as board:
        for step in range(20):
            board.add_scalar("loss/train", 1 / (step + 1), step)
            board.add_scalar("new", step, step, new_style=True)
            board.add_histogram("weights", torch.ones(3), step)
            board.add_text("note", "hello", step)
    (path,) = tmp_path.iterdir()
    theirs = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    theirs.Reload()
    expected = {("loss/train", e.step, e.value, e.wall_time) for e in theirs.Scalars("loss/train")}
    points, problem = read(path)
    assert problem == ""
    assert {(p.name, p.step, p.value, p.time) for p in points if p.name != "new"} == expected
    assert [p.value for p in points if p.name == "new"] == list(range(20))


def test_a_growing_file_loses_and_doubles_nothing(proto, tmp_path):
    events = [scalar(proto, step, "loss", step) for step in range(5)]
    data = write(proto, tmp_path / "whole", *events).read_bytes()
    path = tmp_path / f"{tensorboard.FILE_NAME}1"
    path.touch()
    with path.open("ab", buffering=0) as end, path.open("rb", buffering=0) as file:
        reader, steps = EventFile(""), []
        for at in range(0, len(data), 7):
            end.write(data[at : at + 7])
            steps += [one.step for one in reader.read(file)]
    assert steps == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("place", [8, 14, -6, -1])
def test_a_damaged_record_ends_the_file_with_a_problem(proto, tmp_path, place):
    """In the checksum of the length, in the data, and in the data and checksum of the last one."""
    good = write(proto, tmp_path / "good", scalar(proto, 1, "loss", 1.0))
    data = bytearray(good.read_bytes())
    data[place] ^= 0xFF
    (tmp_path / "bad").write_bytes(data)
    points, problem = read(tmp_path / "bad")
    assert points == []
    assert "is corrupt" in problem


def test_a_record_that_claims_to_be_huge_is_not_read(tmp_path):
    header = struct.pack("<Q", 1 << 62)
    path = tmp_path / f"{tensorboard.FILE_NAME}1"
    path.write_bytes(header + struct.pack("<I", tensorboard._masked(header)) + b"x" * 100)
    assert read(path) == ([], "")


@given(data=st.binary(max_size=300))
def test_any_bytes_are_an_event_or_none(data):
    event = tensorboard.decode_event(data)
    assert all(isinstance(value, float) for _, value in event.scalars)


@given(data=st.binary(max_size=300))
def test_any_bytes_are_a_file_or_damaged(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(data)
    assert read(path)[0] == []


def test_a_number_that_does_not_end_is_malformed():
    for data in (b"\x80" * 11, b"\x0a\x05ab", b"\x0b", b"\x09abc"):
        with pytest.raises(tensorboard.Malformed):
            list(tensorboard._fields(data))


def test_checksums_are_those_of_the_standard():
    """RFC 3720, B.4: 32 bytes of zeros have 8a9136aa."""
    crc = 0x8A9136AA
    masked = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert tensorboard._masked(bytes(32)) == masked


def lines(path, *documents):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.writelines(f"{json.dumps(one)}\n" for one in documents)
    return path


def test_lines_of_json(tmp_path):
    path = lines(
        tmp_path / files.NAME,
        {"step": 1, "epoch": 0, "loss": 0.5, "name": "x", "ok": True, "list": [1]},
        {"global_step": 2, "loss": math.nan, "_timestamp": 1.8e9, "huge": 10**400},
        {"step": -1, "loss": 1},
    )
    with path.open("ab") as file:
        file.write(b'no json\n[1]\n{"step": 3, "loss": 0.2}\n{"step": 4, "lo')
    with path.open("rb", buffering=0) as file:
        reader = JsonLines("m")
        points = list(reader.read(file))
        assert points[0] == Point("loss", 0.5, 1, 0.0, source="m")
        assert [(one.name, one.step, one.time) for one in points[1:3]] == [
            *(("loss", 2, 1.8e9), ("huge", 2, 1.8e9))
        ]
        assert (points[2].value, points[3].step, points[4].step) == (math.inf, None, 3)
        assert len(points) == 5
        lines(path, "")  # completes the last line, which is no document then
        assert list(reader.read(file)) == []


def test_rows_of_csv(tmp_path):
    """As Lightning writes them, which begins the file again when a column is added."""
    path = tmp_path / "metrics.csv"
    path.write_text("epoch,loss,step,note\n0,0.5,9,x\n0,,19,\n1,nan,29,\n1,2")
    reader = CsvRows("m")
    with path.open("rb", buffering=0) as file:
        first, second = reader.read(file)
        assert first == Point("loss", 0.5, 9, 0.0, source="m")
        assert (math.isnan(second.value), second.step) == (True, 29)
        with path.open("a") as more:
            more.write("5,39,\n")
        assert [(one.value, one.step) for one in reader.read(file)] == [(25.0, 39)]
    path.write_text("epoch,acc,loss,step,time\r\n0,,0.5,9,60\r\n1,0.75,,29,120\r\n")
    with path.open("rb", buffering=0) as file:
        found = [(one.name, one.value, one.step, one.time) for one in reader.read(file)]
        assert found == [("loss", 0.5, 9, None), ("acc", 0.75, 29, None)]
        assert list(reader.read(file)) == []
    path.write_text("image,score\n1,0.5\n")  # no step and no epoch: no metrics
    with path.open("rb", buffering=0) as file:
        assert list(CsvRows("m").read(file)) == []


def test_a_line_that_never_ends_takes_no_memory(tmp_path):
    path = tmp_path / files.NAME
    path.write_bytes(b"x" * (3 << 20) + b'\n{"step": 1, "loss": 2}\n')
    with path.open("rb", buffering=0) as file:
        assert [one.value for one in JsonLines("").read(file)] == [2.0]


@pytest.fixture
def folder(tmp_path):
    """A run folder with files of metrics where programs write them."""
    lines(tmp_path / "output" / files.NAME, {"step": 1, "loss": 0.5})
    lines(tmp_path / "source" / "a" / files.NAME, {"step": 1, "loss": 0.6})
    return tmp_path


def test_files_are_found_below_source_and_output_and_nowhere_else(proto, folder):
    write(proto, folder / "source/runs/x" / f"{tensorboard.FILE_NAME}1", scalar(proto, 1, "a", 1))
    write(proto, folder / "source/runs/x" / f"{tensorboard.FILE_NAME}2", scalar(proto, 2, "a", 2))
    write(proto, folder / "source/.git" / f"{tensorboard.FILE_NAME}3", scalar(proto, 1, "b", 1))
    for name in ("metrics.csv", "data.csv"):
        (folder / "source/logs").mkdir(parents=True, exist_ok=True)
        (folder / "source/logs" / name).write_text(" epoch , loss\n 1 , 2\n")
    write(proto, folder / "logs" / f"{tensorboard.FILE_NAME}4", scalar(proto, 1, "c", 1))
    points = list(MetricFiles(folder, "", 0).read())
    assert sorted({(one.source, one.name, one.value) for one in points}) == [
        ("output/metrics.jsonl", "loss", 0.5),
        ("source/a/metrics.jsonl", "loss", 0.6),
        ("source/logs/metrics.csv", "loss", 2.0),
        ("source/runs/x", "a", 1.0),
        ("source/runs/x", "a", 2.0),
    ]


def test_another_output_folder_has_files_of_other_runs_too(folder, tmp_path):
    shared = tmp_path / "shared"
    old = lines(shared / "old" / files.NAME, {"step": 1, "loss": 9})
    os.utime(old, (1000, 1000))
    lines(shared / "new" / files.NAME, {"step": 1, "loss": 0.1})
    points = list(MetricFiles(folder, str(shared), 100_000).read())
    assert {one.source for one in points} == {
        *("source/a/metrics.jsonl", "output/new/metrics.jsonl")
    }


def test_links_and_pipes_are_not_opened(folder, tmp_path):
    secret = lines(tmp_path / "secret", {"step": 1, "loss": 7})
    (folder / "output/metrics.jsonl").unlink()
    (folder / "output/metrics.jsonl").symlink_to(secret)
    os.mkfifo(folder / f"source/{tensorboard.FILE_NAME}1")
    files = MetricFiles(folder, "", 0)
    assert {one.source for one in files.read()} == {"source/a/metrics.jsonl"}
    assert "is not a regular file" in files.problems[0]


def test_a_file_that_was_replaced_is_read_anew(folder, monkeypatch):
    """As a trainer does that resumes: it keeps the lines up to its checkpoint."""
    monkeypatch.setattr("deploykit.observe.metrics.files._SEARCH_SECONDS", 0.0)
    path = folder / "output" / files.NAME
    lines(path, *({"step": step, "loss": step} for step in range(2, 9)))
    found, collection = MetricFiles(folder, "", 0), Collection()
    collection.add(found.read())
    scratch = lines(folder / "output/scratch", {"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.4})
    scratch.replace(path)
    collection.add(found.read())
    series = collection.series["output/metrics.jsonl", "loss"]
    assert series.curve.pairs() == [(1, 0.5), (2, 0.4)]


def test_only_the_end_of_a_long_file_is_read_where_that_is_enough(folder):
    path = folder / "output" / files.NAME
    lines(path, *({"step": step, "loss": 1} for step in range(2, 1000)))
    points = [one for one in MetricFiles(folder, "", 0, most=200).read() if "output" in one.source]
    assert 1 < len(points) < 12
    assert points[-1].step == 999


def test_a_repeated_step_counts_once():
    steps = [1, 2, 3, 4, 3, 4, 5]
    points = [Point("loss", value, step) for value, step in enumerate(steps)]
    assert [(one.step, one.value) for one in without_repeats(points)] == [
        *((1, 0), (2, 1), (3, 4), (4, 5), (5, 6))
    ]


def test_a_curve_is_thinned_and_keeps_its_ends_and_its_peaks():
    values = [float(step % 7) for step in range(20_000)]
    values[0], values[5001], values[7001], values[-1] = -1.0, 99.0, -99.0, 3.0
    collection = Collection()
    collection.add(Point("loss", value, step) for step, value in enumerate(values))
    curve = collection.series["", "loss"].curve
    pairs = curve.pairs()
    assert 400 < len(pairs) < 1100
    assert pairs == sorted(pairs)
    assert {(0, -1.0), (5001, 99.0), (7001, -99.0), (19_999, 3.0)} <= set(pairs)
    assert curve.mean() == pytest.approx(sum(values) / len(values))
    gaps = [later[0] - one[0] for one, later in itertools.pairwise(pairs)]
    assert max(gaps) < 20_000 / 100


def test_a_long_curve_goes_back_to_the_step_where_a_restart_begins():
    collection = Collection()
    steps = [*range(20_000), *range(12_345, 20_000)]
    collection.add(Point("loss", float(at >= 20_000), step) for at, step in enumerate(steps))
    pairs = collection.series["", "loss"].curve.pairs()
    assert [step for step, _ in pairs] == sorted({step for step, _ in pairs})
    assert {value for step, value in pairs if step < 12_345} == {0.0}
    assert {value for step, value in pairs if step >= 12_345} == {1.0}


def test_names_without_end_take_no_memory():
    collection = Collection()
    collection.add(Point(f"n{count}", 1.0) for count in range(5000))
    assert len(collection.series) == 2000


@pytest.mark.parametrize(
    ("text", "value"),
    [("1,234.5", 1234.5), ("-1e-3", -0.001), (".5", 0.5), ("INF", math.inf), ("1e9999", math.inf)],
)
def test_a_number(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "x", "1_0", "0x1", "1 2", "٣", "1.2.3", "--1", "e5"])
def test_no_number(text):
    assert number(text) is None
