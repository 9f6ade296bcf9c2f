"""A dump read from the files of its nodes, and printed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from deploykit.observe import stacks
from deploykit.observe.stacks import spans
from tests.observe.stacks.samples import NEXT, REDUCE, WORKER, node_data, process, rank, write

TEXT = """\
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

rank 2: no process; it has ended or not started, or its node did not answer
rank 3: by faulthandler, since py-spy is not installed on the node
"""


def sample(folder):
    workers = (process(*WORKER, name="pt_data_worker"),) * 2
    late = rank(1, *NEXT, children=(*workers, process(name="sh")))
    missing = "py-spy is not installed on the node"
    other = rank(3, *REDUCE, tool="faulthandler", problem=missing)
    write(folder, node_data(rank(0, *REDUCE), late), node_data(other, host="n2"))
    return stacks.read(folder)


def test_the_dump_of_two_nodes_as_text(tmp_path):
    assert "\n".join(stacks.lines(sample(tmp_path / "a"))) + "\n" == TEXT


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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["rank", "tool", "process", "frames", "x"]), inner)
    ),
    max_leaves=20,
)


@given(st.data())
def test_whatever_a_node_writes_is_a_dump_without_an_error(tmp_path_factory, data):
    """Any part of a valid file is replaced by any JSON."""
    tree = node_data(rank(0, *NEXT, children=(process(*WORKER),)))
    part, key = tree, data.draw(st.sampled_from(sorted(tree)))
    while data.draw(st.booleans()) and isinstance(part[key], (dict, list)) and part[key]:
        part = part[key]
        keys = sorted(part) if isinstance(part, dict) else range(len(part))
        key = data.draw(st.sampled_from(list(keys)))
    part[key] = data.draw(JSON)
    folder = tmp_path_factory.mktemp("any") / "dump"
    write(folder, json.dumps(tree), "{", "[]", "\0", "[" * 100_000)
    dump = stacks.read(folder)
    assert len(dump.absent) <= 10_000
    text = "\n".join(stacks.lines(dump))
    assert all(spans([one.rank]) in text for one in dump.ranks)
    json.dumps(stacks.data(dump))
