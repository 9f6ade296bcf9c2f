"""Hangs in dumps of the flight recorder: four of Megatron, and the cases of PyTorch's own tests."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from tests.flight_recorder import RECORD, dump

MEGATRON = json.loads(
    gzip.decompress((Path(__file__).parent / "logs/megatron_hangs.json.gz").read_bytes())
)
REFERENCES = {
    "gpu_error_1st": {"74": [12]},
    "gpu_error_2nd": {"72": [9, 14]},
    "lock_gil_1st": {"72": [9, 14]},
    "lock_gil_2nd": {"73": [10], "74": [15]},
}
"""By group, the missing ranks that NVIDIA's own analyzer names."""
NAMES = ["_dump_{}", "nccl_trace_rank_{}", "comm_lib_trace_rank_{}", "nccl_trace_rank_gpu-17_{}"]
NAMES += ["gpu-17.cluster_nccl_trace_rank_{}.pkl", "comm_lib_trace_rank_{}_gpu-17", "gpu17_dump_{}"]


def megatron(name):
    """The dumps of a hang by rank, as PyTorch pickles them."""
    for rank, one in MEGATRON["hangs"][name].items():
        names = {group: desc for group, (desc, _) in one["groups"].items()}
        entries = [dict(zip(MEGATRON["fields"], values, strict=True)) for values in one["entries"]]
        for entry in entries:
            group = entry["process_group"]
            entry |= {"process_group": (group, names[group]), "frames": [], "retired": False}
        groups = {
            group: {"name": group, "desc": desc, "ranks": str(ranks)}
            for group, (desc, ranks) in one["groups"].items()
        }
        status = {
            number: {"last_enqueued_collective": last, "last_completed_collective": last}
            for number, last in one["enqueued"].items()
        }
        content = {"version": "2.9", "entries": entries, "pg_config": groups, "pg_status": status}
        yield int(rank), pickle.dumps(content)


@pytest.fixture
def diagnosed(tmp_path, capsys):
    """Write dumps into a folder, and diagnose it."""

    def look(dumps, name="fr_{}"):
        for rank, content in enumerate(dumps):
            raw = content if isinstance(content, bytes) else pickle.dumps(content)
            (tmp_path / name.format(rank)).write_bytes(raw)
        code = cli.main(["diagnose", "--json", str(tmp_path)])
        said = capsys.readouterr()
        return code, json.loads(said.out)["causes"], said.err

    return look


@pytest.mark.parametrize("name", REFERENCES)
def test_the_ranks_that_hold_up_a_megatron_job_are_those_of_nvidias_references(name, diagnosed):
    code, (cause, *_), warnings = diagnosed([raw for _, raw in sorted(megatron(name))], "_dump_{}")
    assert (code, cause["cause"], warnings) == (79, "collective_timeout", "")
    texts = [proof["text"] for proof in cause["evidence"]]
    expected = [",".join(map(str, ranks)) for ranks in REFERENCES[name].values()]
    assert [text.partition(" never made ")[0].split()[-1] for text in texts] == expected
    assert all("of group EXPERT_MODEL_PARALLEL_GROUP (all_to_all of " in text for text in texts)


@pytest.mark.parametrize("name", NAMES)
def test_a_dump_is_found_under_every_name(name, diagnosed):
    code, (cause, *_), _ = diagnosed([dump([RECORD]), dump([])], name)
    assert (code, cause["first_rank"]) == (79, 1)
    assert "rank 1 never made call 1 of group default_pg" in cause["evidence"][0]["text"]


@pytest.mark.parametrize("raw", [b"", b"\x80cut", b"{}", pickle.dumps([1])])
def test_a_dump_that_cannot_be_read_is_never_healthy(raw, diagnosed):
    code, causes, warnings = diagnosed([raw], "nccl_trace_rank_{}")
    assert (code, causes) == (66, [])
    assert "is not a valid dump" in warnings


def test_two_groups_that_are_entered_in_another_order_block_each_other(diagnosed):
    """Neither rank is late by itself: each waits in one group for the other."""
    groups = [{**RECORD, "process_group": (name, f"pg {name}")} for name in "ab"]
    config = {name: {"name": name, "desc": f"pg {name}", "ranks": "[0, 1]"} for name in "ab"}
    dumps = [{"version": "2.10", "entries": [one], "pg_config": config} for one in groups]
    _, (cause, *_), _ = diagnosed(dumps)
    texts = "\n".join(proof["text"] for proof in cause["evidence"])
    assert "rank 1 never made call 1 of group pg a" in texts
    assert "rank 0 never made call 1 of group pg b" in texts


def test_a_receive_without_its_send_names_the_rank_that_should_send(diagnosed):
    receive = {**RECORD, "is_p2p": True, "profiling_name": "nccl:recv 0<-1"}
    _, (cause, *_), _ = diagnosed([dump([receive]), dump([])])
    assert cause["first_rank"] == 1
    assert "rank 1 never called the counterpart of recv 0<-1" in cause["evidence"][0]["text"]


def call(name, given=([4, 4],), got=([4, 4],), state="scheduled", dtypes=("float32",), number=1):
    """A record of a collective, as PyTorch's own tests make them."""
    return {
        **RECORD,
        "profiling_name": f"nccl:{name}",
        "state": state,
        "input_sizes": list(given),
        "output_sizes": list(got),
        "input_dtypes": ["float32"],
        "output_dtypes": list(dtypes),
        "collective_seq_id": number,
        "frames": [],
    }


def told(diagnosed, *ranks):
    """The sentence about records of ranks 0 and 1; empty if they called the same."""
    _, (cause, *_), _ = diagnosed([{**dump(list(records)), "version": "2.8"} for records in ranks])
    text = cause["evidence"][0]["text"].partition("flight recorder: ")[2]
    return "" if text.startswith("all ranks called the same") else text


REDUCE = call("all_reduce")
DIFFERENT = {
    "another operation": (REDUCE, call("all_gather"), "rank 1 ran all_gather of "),
    "another input": (REDUCE, call("all_reduce", ([5, 4],), ([5, 4],)), "[[5, 4]] as call 1 of"),
    "another output": (REDUCE, call("all_reduce", got=([5, 4],)), "[[4, 4]] to [[5, 4]] as call"),
    "an output of another size": (
        *[call("all_reduce", got=([5, 4],))] * 2,
        "has 32 input elements and 40 output elements",
    ),
    "another state": (
        REDUCE,
        call("all_reduce", state="completed"),
        "is completed on rank 1 and scheduled on the others",
    ),
    "another type": (
        call("all_reduce", state="completed"),
        call("all_reduce", state="completed", dtypes=["float16"]),
        "rank 1 ran all_reduce",
    ),
    "an all_to_all that does not add up": (
        call("all_to_all", ([4, 4],)),
        call("all_to_all", ([5, 4],)),
        "has 36 input elements and 32 output elements",
    ),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_calls_that_pytorch_tells_apart_are_told_apart(name, diagnosed):
    first, second, words = DIFFERENT[name]
    assert words in told(diagnosed, [first], [second])


SAME = {
    "an all_to_all of uneven parts": (
        call("all_to_all", ([6],), ([4],)),
        call("all_to_all", ([2],), ([4],)),
    ),
    "a gather whose root alone has an output": (
        call("gather", got=([4, 4], [4, 4]), state="completed"),
        call("gather", got=([],), state="completed", dtypes=[""]),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_calls_that_pytorch_takes_for_the_same_are_the_same(name, diagnosed):
    assert not told(diagnosed, *([one] for one in SAME[name]))


def coalesced(*names, end, sizes=None, start=0):
    """Records under one number, as PyTorch writes a group of operations that it sends as one."""
    sizes = sizes or [[4, 4]] * len(names)
    one = [call(name, [size], [size], "completed") for name, size in zip(names, sizes, strict=True)]
    return [*one, {**call(end, [[]], [[]], "completed")}]


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (["broadcast"] * 2, ["broadcast"] * 2, ""),
        (["_reduce_oop"] * 2, ["_reduce_oop"] * 2, ""),
        (["broadcast"], ["_reduce_oop"], "rank 1 ran _reduce_oop"),
    ],
)
def test_coalesced_operations_are_compared_one_by_one(first, second, words, diagnosed):
    left = [coalesced(*names, end="coalesced") for names in (first, second)]
    found = told(diagnosed, *left)
    assert words in found if words else not found


def test_an_uneven_gather_is_seen_within_its_coalesced_parts(diagnosed):
    parts, end = ["_broadcast_oop"] * 2, "ALLGATHER_coalesced"
    first = coalesced(*parts, end=end, sizes=[[4, 4], [5, 5]])
    assert "[[4, 4]] as call 1" in told(diagnosed, first, coalesced(*parts, end=end))


def test_a_rank_with_nothing_to_scatter_is_not_blamed_for_a_call_that_completed(diagnosed):
    """PyTorch's sixth case: one rank has no part in an uneven reduce_scatter."""
    parts = [{**one, "collective_seq_id": 2} for one in coalesced(*["_reduce_oop"] * 2, end="x")]
    reduced = call("all_reduce", state="completed")
    assert not told(diagnosed, [reduced], [reduced, *parts])


def test_groups_of_the_same_name_with_other_ranks_are_others(diagnosed):
    """As split_group makes them: PyTorch's first case."""
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
    own = {**call("all_reduce", ([5, 5],), ([5, 5],), "completed"), "process_group": ("1", "sub")}
    dumps = [
        {
            **dump([own]),
            "pg_config": {**config, "1": {"name": "1", "desc": "sub", "ranks": f"[{rank}]"}},
        }
        for rank in range(2)
    ]
    _, (cause, *_), _ = diagnosed(dumps)
    assert "all ranks called the same" in cause["evidence"][0]["text"]


@pytest.mark.torch
def test_the_verdict_on_every_collective_is_that_of_pytorch(diagnosed):
    """The same two records, judged by PyTorch's analyzer and here."""
    from torch.distributed.flight_recorder.components.types import COLLECTIVES, MatchState
    from torch.distributed.flight_recorder.components.utils import (
        check_size_alltoall,
        match_one_event,
    )

    for name in sorted(COLLECTIVES):
        rows = 8 if "gather" in name and name != "gather" else 2 if "reduce_scatter" in name else 4
        usual = call(name, got=([rows, 4],))
        others = (
            usual,
            call(name, ([6, 4],), ([rows, 4],)),
            call(name, got=([6, 4],)),
            {**usual, "output_dtypes": ["float16"]},
            {**usual, "state": "completed"},
            {**usual, "profiling_name": "nccl:barrier"},
        )
        for other in others:
            state = match_one_event(usual, other, {"0": {0, 1}}, "0").state
            same = state is MatchState.FULLY_MATCHED
            if state is MatchState.UNDECIDED:
                same = not check_size_alltoall([usual, other])[0]
            assert same == (not told(diagnosed, [usual], [other])), (name, other, state)
