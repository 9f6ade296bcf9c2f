"""Dumps of the flight recorder that are hostile, malformed or incomplete."""

from __future__ import annotations

import json
import os
import pickle

import pytest

from deploykit.cli import main as cli
from tests.flight_recorder import RECORD, dump


@pytest.fixture
def diagnosed(tmp_path, capsys):
    """Write what each rank left, as bytes or as data, and diagnose it."""

    def look(*left):
        files = []
        for rank, each in enumerate(left):
            files.append(tmp_path / f"fr_{rank}")
            files[-1].write_bytes(each if isinstance(each, bytes) else pickle.dumps(each))
        code = cli.main(["diagnose", "--json", *map(str, files)])
        said = capsys.readouterr()
        return code, json.loads(said.out), said.err

    return look


class Called:
    """What a pickle calls while it is read."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_that_calls_a_function_is_refused_and_calls_nothing(diagnosed, tmp_path):
    code, _, remark = diagnosed(dump([{**RECORD, "state": Called(tmp_path / "called")}]))
    assert code == 66
    refused = "is not a valid dump of PyTorch's flight recorder: it references "
    assert f"{refused}{open.__module__}.open" in remark
    assert not (tmp_path / "called").exists()


def test_a_program_in_place_of_ranks_is_refused(diagnosed, tmp_path):
    """PyTorch's analyzer passes `ranks` to eval() where it is a text in a text."""
    program = f"open({str(tmp_path / 'called')!r}, 'w') and [0, 1]"
    code, _, remark = diagnosed(dump([RECORD], ranks=repr(program)))
    assert (code, "it contains invalid ranks" in remark) == (66, True)
    assert not (tmp_path / "called").exists()


@pytest.mark.parametrize(
    "ranks", ["-" * 20_000, "[" * 20_000, "[" + "9" * 5000 + "]", "{0}"], ids=lambda text: text[:9]
)
def test_ranks_are_numbers_in_a_list(diagnosed, ranks):
    code, _, remark = diagnosed(dump([RECORD], ranks=ranks))
    assert (code, "it contains invalid ranks" in remark) == (66, True)
    assert len(remark) < 1000


@pytest.mark.parametrize(
    "left",
    [
        pickle.dumps(dump([RECORD]))[:-40],
        [1, 2],
        {"entries": []},
        dump([{**RECORD, "collective_seq_id": "1"}]),
        dump([{**RECORD, "profiling_name": "nccl:all_reduce\nmissing ranks: {1}"}]),
        dump([RECORD], ranks="[0, 1"),
        dump([{name: value for name, value in RECORD.items() if name != "state"}]),
        {**dump([RECORD]), "version": "../../x"},
    ],
)
def test_what_is_no_dump_is_refused_in_a_sentence(left, diagnosed):
    code, said, remark = diagnosed(left)
    assert (code, said["ending"], "fr_0" in remark) == (66, "unread", True)


def test_a_rank_without_a_dump_is_named(diagnosed):
    code, said, _ = diagnosed(dump([RECORD]))
    assert code == 79
    (first,) = said["causes"]
    assert (first["cause"], first["first_rank"]) == ("collective_timeout", 1)
    assert "no dump of rank 1" in first["evidence"][0]["text"]


def test_a_rank_that_raised_left_no_dump_and_its_exception_is_the_cause(tmp_path, capsys):
    (tmp_path / "fr_0").write_bytes(pickle.dumps(dump([RECORD])))
    log = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: label 7\n"
    (tmp_path / "node-1.log").write_text(log)
    files = [str(tmp_path / name) for name in ("fr_0", "node-1.log")]
    assert cli.main(["diagnose", "--json", *files]) == 79
    first, *_ = json.loads(capsys.readouterr().out)["causes"]
    assert (first["cause"], first["first_rank"]) == ("user_code_error", 1)


def test_a_dump_of_a_run_that_cannot_be_read_is_named(live, capsys):
    (live.folder / "debug").mkdir()
    (live.folder / "debug/comm_lib_trace_rank_0").write_bytes(b"\x80cut")
    live.log("training")
    (live.folder / "cancelled").touch()
    live.close()
    assert cli.main(["diagnose", "live-run"]) == 66
    said = capsys.readouterr()
    assert said.out.startswith("unread: ")
    assert "comm_lib_trace_rank_0 is not a valid dump" in said.err


@pytest.mark.parametrize(
    ("others", "rank", "words"),
    [
        ([{**RECORD, "state": "scheduled"}], 1, "is scheduled on rank 1 and started on the others"),
        ([RECORD], None, "all ranks called the same"),
    ],
)
def test_what_the_records_of_nccl_say(diagnosed, others, rank, words):
    code, said, remark = diagnosed(dump([RECORD]), dump(others))
    assert code == 79, remark
    (first,) = said["causes"]
    assert (first["cause"], first["first_rank"]) == ("collective_timeout", rank)
    assert words in first["evidence"][0]["text"]


def test_the_odd_one_is_named_even_if_it_is_the_first(diagnosed):
    odd = {**RECORD, "input_sizes": [[8]], "output_sizes": [[8]]}
    three = "[0, 1, 2]"
    left = [dump([record], ranks=three) for record in (odd, RECORD, RECORD)]
    _, said, _ = diagnosed(*left)
    assert [cause["first_rank"] for cause in said["causes"]] == [0]


def test_the_dumps_of_a_run_are_read_with_its_logs(project, capsys, tmp_path):
    (project / "train.py").write_text("raise SystemExit(3)\n")
    assert cli.main(["submit", "--backend", "local", "--run", "one", "--wait"]) == 3
    folder = tmp_path / "state folder/runs/one/debug"
    folder.mkdir()
    for rank, records in enumerate(([RECORD], [])):
        (folder / f"fr_{rank}").write_bytes(pickle.dumps(dump(records)))
    (folder / "fr_2").write_bytes(b"\x80cut")
    capsys.readouterr()
    assert cli.main(["diagnose", "one", "--json"]) == 79
    said = capsys.readouterr()
    first, *_ = json.loads(said.out)["causes"]
    assert os.fspath(folder / "fr_1") == first["evidence"][0]["file"]
    assert "fr_2 is not a valid dump" in said.err
