"""The schema of exit records: both planes, and the files themselves."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
from datetime import UTC, datetime, timedelta
from typing import get_origin, get_type_hints, is_typeddict

import pytest

from deploykit.backends import base as backend
from deploykit.observe import exit_records
from deploykit_node import node, outputs, packages, records, staging
from deploykit_node.cluster import Cluster, Rank
from deploykit_node.network import alive
from deploykit_node.observe import processes, stall, usage
from deploykit_node.restart import cap, checkpoint_keeper, decision, slurm_job
from deploykit_node.restart.attempt import Attempt


@pytest.fixture
def env(tmp_path):
    (tmp_path / records.FOLDER).mkdir()
    return {
        "DEPLOYKIT_RUN_DIR": str(tmp_path),
        "DEPLOYKIT_RESTARTS": '{"preemption": 3}',
        "SLURM_RESTART_COUNT": "2",
    }


@pytest.fixture
def written(env, tmp_path):
    """Every kind of record, as the node plane writes it: its content by the name in the schema."""
    end = records.NodeExit(137, "rank 3 was terminated by SIGKILL (exit code 137)", 3)
    end = end._replace(ranks={"3": 137})
    records.record_node(env, 0, end)
    rank, of_node = Rank("torchrun", 3, 1, 4, 2), {"DEPLOYKIT_RANK_DIR": str(tmp_path / "node")}
    records.record_rank(env, rank, -9, stopped=True)
    failed = records.record_rank(env | of_node, rank, -9, stopped=False)
    decision.record_failure(env, tmp_path, failed, ("", "", ""))
    decision.after_failure(env, decision.root(env, tmp_path, alone=True), "")
    slurm_job.record_restart(env, 1, slurm_job.PREEMPTION)
    slurm_job.record_restart(env, 2, slurm_job.TIME_LIMIT)
    capped = {cap.VARIABLE: '{"seconds": 900, "cap": "1 USD", "hourly": "1 USD"}'}
    Attempt(env | capped, Cluster("slurm", 0, ("n0", "n1"))).begin()
    alive.start(env, 0, "127.0.0.1").close()
    folders = {f"DEPLOYKIT_{name}_DIR": str(tmp_path / name) for name in ("OUTPUT", "CHECKPOINT")}
    outputs.record_written(env | folders, tmp_path, [])
    processes.register(env, rank, os.getpid(), stacks=tmp_path / "stacks")
    watch = stall.Watch(env, Cluster("alone", 0, ("n0",)), tmp_path, print)
    watch._stall(1.0)
    (tmp_path / "rank-3.pid").write_text(json.dumps({"pid": os.getppid()}))
    usage.Recorder(env, Cluster("alone", 0, ("n0",)), tmp_path).look()
    names = ("node-0", "failed-2.0", "rank-3", "error-2.0", "decision-2.0", "restart-1")
    names += ("attempt", "billed-2", "heartbeat-0")
    records.record_unhealthy(env, {"n1": "GPU 3 is lost"}, failed_check=True)
    source = {"path": str(tmp_path / "node"), "stage": "node", "stage_folder": str(tmp_path)}
    channels = {staging.VARIABLE: json.dumps({"train": source})}
    staging.run(env | channels, Cluster("alone", 0, ("n0",)), elastic=False)
    packages.record(env)
    names += ("process-3", "staging-0", "stall-0", "unhealthy-2", "usage-0", "software")
    names += ("packages", "written")
    keeper = checkpoint_keeper._Keeper(
        env | {"DEPLOYKIT_CHECKPOINT_DIR": str(tmp_path), checkpoint_keeper.BUCKET: "s3://b/p"},
        0,
        1,
    )
    keeper._record()
    names += ("checkpoints-0",)
    contents = [json.loads((tmp_path / records.FOLDER / f"{n}.json").read_text()) for n in names]
    return dict(zip(records.SCHEMA, contents, strict=True))


@pytest.mark.parametrize("name", records.SCHEMA)
def test_what_is_written_has_the_fields_of_the_schema(written, name):
    types = get_type_hints(records.SCHEMA[name])
    assert list(written[name]) == list(types)
    for field, value in written[name].items():
        origin = get_origin(types[field])
        kind = origin if origin in {list, dict} else types[field]
        assert isinstance(value, dict if is_typeddict(kind) else kind)


def test_the_control_plane_reads_what_the_node_plane_writes(written, tmp_path):
    (end,) = exit_records.read(tmp_path)
    record = written["node-N.json"]
    assert record.pop("ranks") == {"3": 137}
    assert [field.name for field in dataclasses.fields(end)] == list(record)
    assert dataclasses.asdict(end) == {
        **record,
        "finished": datetime.fromisoformat(record["finished"]),
    }
    assert abs(datetime.now(UTC) - end.finished) < timedelta(days=1)  # the zone is right
    assert exit_records.restarts(tmp_path) == ["preemption", "time_limit"]
    assert exit_records.attempt(tmp_path) == 2
    assert exit_records.processes(tmp_path) == []
    (tmp_path / records.FOLDER / "node-0.json").unlink()  # its node has not ended
    (process,) = exit_records.processes(tmp_path)
    assert (process.rank, process.host) == (3, written["process-N.json"]["host"])


@pytest.mark.parametrize("kind", exit_records.FIELDS)
def test_the_control_plane_reads_fields_of_the_schema(kind):
    """With the types that the node plane writes; of lists and dictionaries their contents apart."""
    (record,) = [schema for name, schema in records.SCHEMA.items() if re.match(rf"{kind}\b", name)]
    types = get_type_hints(record)
    for field, expected in exit_records.FIELDS[kind].items():
        written = types[field]
        plain = dict if is_typeddict(written) else get_origin(written)
        assert expected == (plain if plain in {dict, list} else written)


def test_both_planes_know_the_folder_and_the_code_of_a_checkpoint():
    assert records.FOLDER in backend.FOLDERS
    assert records.STOPPED == exit_records.STOPPED


def test_a_rank_that_received_the_signal_before_its_launcher_counts_as_stopped_by_it(tmp_path):
    env = {"DEPLOYKIT_RANK_DIR": str(tmp_path)}
    records.record_rank(env, Rank("torchrun", 0, 0, 1, 1), -signal.SIGTERM, stopped=False)
    end = node._node_exit(1, env, tmp_path, signal.SIGTERM)
    reason = "rank 0 was terminated by SIGTERM (exit code 143) after a signal to stop"
    assert (end.code, end.reason, end.stopped) == (143, reason, True)
    assert not node._node_exit(1, env, tmp_path, None).stopped  # anybody else sent it


def test_a_rank_that_torchrun_starts_anew_and_ends_counts_as_stopped_by_the_signal(tmp_path):
    """A rank has ended by SIGTERM, torchrun restarts it, and is told to end: by SIGHUP."""
    env = {"DEPLOYKIT_RANK_DIR": str(tmp_path), "TORCHELASTIC_RESTART_COUNT": "1"}
    records.register(env, tmp_path, 0, os.getpid())
    records.record_rank(env, Rank("torchrun", 0, 0, 1, 1), -signal.SIGHUP, stopped=True)
    end = node._node_exit(-signal.SIGHUP, env, tmp_path, signal.SIGTERM)
    assert end.code == 143
    assert end.reason == "rank 0 was terminated by SIGTERM (exit code 143) after a signal to stop"
    assert node._node_exit(-signal.SIGHUP, env, tmp_path, signal.SIGHUP).code == 129
