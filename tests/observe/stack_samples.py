"""Dumps as nodes write them, for tests."""

from __future__ import annotations

import json

from deploykit.observe.stacks import Frame, Process, RankStacks, Thread

SITE = "/env/lib/python3.11/site-packages"
SOURCE = "/home/ada/.local/state/deploykit/runs/digits-1/source"

SELECT = Frame("Selector.select", "/usr/lib/python3.11/selectors.py", 415, "fd = poll()")
NEXT = (
    SELECT,
    Frame("_LoaderIter._get_data", f"{SITE}/torch/utils/data/dataloader.py", 1464),
    Frame("_LoaderIter.__next__", f"{SITE}/torch/utils/data/dataloader.py", 725),
    Frame("main", f"{SOURCE}/train.py", 19, "for batch in loader:"),
    Frame("<module>", f"{SOURCE}/train.py", 21, "main()"),
)
REDUCE = (
    Frame("all_reduce", f"{SITE}/torch/distributed/distributed_c10d.py", 3252, "work.wait()"),
    Frame("_log.<locals>.wrapper", f"{SITE}/torch/distributed/c10d_logger.py", 83),
    Frame("step", f"{SOURCE}/train.py", 15, "dist.all_reduce(total)"),
    Frame("main", f"{SOURCE}/train.py", 20, "step(batch)"),
    Frame("<module>", f"{SOURCE}/train.py", 21, "main()"),
)
WORKER = (
    SELECT,
    Frame("_worker_loop", f"{SITE}/torch/utils/data/_utils/worker.py", 334),
    Frame("Process.run", "/usr/lib/python3.11/multiprocessing/process.py", 108),
    Frame("Process._bootstrap", "/usr/lib/python3.11/multiprocessing/process.py", 314),
    *NEXT[1:],
)


def process(*frames, state="S", name="python", pid=1):
    return Process(pid, name, state, (Thread("MainThread", frames),) if frames else ())


def rank(number, *frames, state="S", children=(), **more):
    values = {"host": "n1", "tool": "py-spy", "problem": "", **more}
    return RankStacks(number, process=process(*frames, state=state), children=children, **values)


def node_data(*ranks, host="n1", time="2026-11-23T07:20:01.123Z", world_size=4):
    """The content of a node's file."""

    def as_process(one):
        threads = [
            {"name": thread.name, "frames": [vars(frame) for frame in thread.frames]}
            for thread in one.threads
        ]
        return {"pid": one.pid, "name": one.name, "state": one.state, "threads": threads}

    listed = [
        {
            "rank": one.rank,
            "tool": one.tool,
            "problem": one.problem,
            "process": as_process(one.process),
            "children": [as_process(child) for child in one.children],
        }
        for one in ranks
    ]
    return {"host": host, "time": time, "world_size": world_size, "ranks": listed}


def write(folder, *nodes):
    folder.mkdir(parents=True)
    for number, node in enumerate(nodes):
        text = node if isinstance(node, str) else json.dumps(node)
        (folder / f"n{number}.json").write_text(text)
