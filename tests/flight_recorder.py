"""Dumps of the flight recorder, as PyTorch writes them with NCCL."""

RECORD = {
    "record_id": 0,
    "collective_seq_id": 1,
    "p2p_seq_id": 0,
    "op_id": 1,
    "is_p2p": False,
    "profiling_name": "nccl:all_reduce",
    "state": "started",
    "time_created_ns": 1,
    "process_group": ("0", "default_pg"),
    "frames": [{"name": "main", "filename": "train.py", "line": 7}],
    **{f"{way}_sizes": [[4]] for way in ("input", "output")},
    **{f"{way}_dtypes": ["Float"] for way in ("input", "output")},
}


def dump(records, *, ranks="[0, 1]", **more):
    """A dump with one process group, before it is pickled."""
    group = {"name": "0", "desc": "default_pg", "ranks": ranks, **more}
    return {"version": "2.10", "entries": records, "pg_config": {"0": group}}
