"""The hand-written parts of the reference, for `generate.py`: tables here, prose in `parts/`."""

# ruff: noqa: INP001

import datetime as dt
from pathlib import Path

SDK_VERSION = "2.257.7"
TODAY = dt.date(2026, 11, 21)
"""The day of which the oracle's tables speak."""

MADE = "<!-- Written by docs/generate.py from the code; change the code or docs/words.py. -->"

STATES = {
    "unsent": "the target refused it, or submit was interrupted and the target has no job of it",
    "submitting": "recorded here; the target has not confirmed the job yet",
    "queued": "it is waiting for nodes, or they are being prepared",
    "blocked": "it is queued, but can never start as it is: `reason` says why",
    "running": "its program runs",
    "stopping": "it received a signal to stop, or is being cleaned up",
    "succeeded": "it ended, with exit code 0 on every rank",
    "failed": "it ended with an error; `reason` says why",
    "cancelled": "it was stopped on request",
    "unknown": "the target cannot be reached from here, or has no record of the job",
}

LAUNCHER = {
    "BadCommand": "the launcher on the node got an invalid command, or the program does not exist",
    "LaunchError": "an error in the launcher itself; the node's log has the details",
    "BadEnvironment": "the job cannot run in this environment: no PyTorch, no route to another "
    "node, a secret that cannot be read, a folder that cannot be created, data or packages that "
    "cannot be copied or installed",
}

VARIABLES = {
    "RANK": "number of this process in the whole job, from 0",
    "LOCAL_RANK": "number of this process on its node, from 0; the GPU to use",
    "WORLD_SIZE": "processes in the whole job",
    "LOCAL_WORLD_SIZE": "processes on this node",
    "MASTER_ADDR": "address of rank 0; `torch.distributed.init_process_group()` reads it",
    "MASTER_PORT": "port of rank 0",
    "DEPLOYKIT_BACKEND": "`local`, `slurm` or `sagemaker`",
    "DEPLOYKIT_RUN": "the run id",
    "DEPLOYKIT_RUN_DIR": "the run folder; not on SageMaker",
    "DEPLOYKIT_OUTPUT_DIR": "folder for results; created before the trainer starts",
    "DEPLOYKIT_CHECKPOINT_DIR": "folder for checkpoints; created before the trainer starts",
    "DEPLOYKIT_DATA_<NAME>": "folder of the data channel NAME, in capitals",
    "DEPLOYKIT_RESTART_COUNT": "restarts of the job so far, by Slurm or by torchrun, or because "
    "nodes left or joined",
    "DEPLOYKIT_FULL_WORLD_SIZE": "the ranks of all nodes, if the number of nodes may change",
}

INTERNAL = {
    "DEPLOYKIT_STAGE": "JSON, channel to its section of `data`; removed once copied",
    "DEPLOYKIT_ENVIRONMENT": "the folder of the environment that this node has made for the job",
    "DEPLOYKIT_SECRETS": "JSON, variable to `secret:` reference; removed once resolved",
    "DEPLOYKIT_BUNDLE": "on SageMaker: the hash of the planned source, which `launch.py` compares "
    "with that of the bundle's files; removed after that",
    "DEPLOYKIT_ENV": "JSON, on SageMaker: the settings to restore last; removed after that",
    "DEPLOYKIT_NODE_RANK": "number of this node, if several are emulated on one machine",
    "DEPLOYKIT_NODES": "how many nodes are emulated",
    "DEPLOYKIT_NODE_LIST": "on Slurm, if the number of nodes may change: the first nodes",
    "DEPLOYKIT_ARRAY_TASK": "on Slurm, in the batch script of a run that is a task of an array of "
    "several runs: `ARRAY_TASK`, the id of its job",
    "DEPLOYKIT_STEP_NODE": "this node's number in `DEPLOYKIT_NODE_LIST`",
    "DEPLOYKIT_GENERATION": "if the number of nodes may change: the number of node groups so "
    "far, including this one",
    "DEPLOYKIT_PLAIN": "1 for a script that starts its own processes; removed before it starts",
    "DEPLOYKIT_RANK_DIR": "folder where the ranks of a node register with its launcher",
    "DEPLOYKIT_ON_STALL": "`report` or `restart`, if the job file sets `on_stall`",
    "DEPLOYKIT_STALL_SECONDS": "seconds; a shorter pause is never a stall. Default: 300",
    "DEPLOYKIT_STACK_FILE": "the file for the stacks of a rank; removed before the program starts",
    "DEPLOYKIT_LOG_LIMIT": "bytes of a node's log, if the job file sets `log_limit`",
    "DEPLOYKIT_PROFILE": "what to profile, if anything: `torch:FIRST:LAST`, `nsys`, "
    "`nsys:FIRST:LAST` or `memory`",
    "DEPLOYKIT_BELOW_NSYS": "for a rank under nsys: its parent process; removed before the program "
    "starts",
    "DEPLOYKIT_TRACE_FILE": "the file for the profile of a rank; removed before the program starts",
    "DEPLOYKIT_DEBUGGER": "the rank that waits for an editor's debugger, from `submit --debugger`",
    "DEPLOYKIT_DEBUG_FILE": "the file for the port of that debugger; removed before the program "
    "starts",
    "DEPLOYKIT_PYTHONPATH": "the `PYTHONPATH` of the program, which gets it back before it starts",
    "DEPLOYKIT_ROUND": "how often torchrun has restarted the ranks, the same on all nodes; the "
    "trainer reads it as `TORCHELASTIC_RESTART_COUNT`",
    "DEPLOYKIT_GRACE": "seconds that ranks have after SIGTERM. Default: 30; no limit for a signal "
    "from Slurm, which kills the ranks itself",
    "DEPLOYKIT_PORTS": "`LOWEST-HIGHEST`: the ports that the rendezvous may use. Default: any free "
    "one from 10000 to 29999",
    "DEPLOYKIT_OUTPUTS": "JSON: the patterns of `outputs`",
    "DEPLOYKIT_CHECKPOINT_BUCKET": "the s3:// prefix of `checkpoints`, except on SageMaker",
    "DEPLOYKIT_CHECKPOINT_FOLDER": "on Slurm: `checkpoint_folder`, from which each node makes its "
    "`DEPLOYKIT_CHECKPOINT_DIR`",
    "DEPLOYKIT_KEEP_CHECKPOINTS": "`keep_checkpoints`, except on SageMaker",
    "DEPLOYKIT_COLLECT_SECONDS": "on SageMaker: seconds between checks for `outputs` that are "
    "complete, while the program runs. Default: 30",
    "DEPLOYKIT_PREFLIGHT": "seconds for the preflight test; no test if it is not set",
    "DEPLOYKIT_DEBUG": "1 for debugging output of NCCL and PyTorch",
    "DEPLOYKIT_CAP": "JSON: the seconds that `max_cost` pays for, with the cap and the price of an "
    "hour; only with `stop_at_cap`",
    "DEPLOYKIT_NOTICE": "on Slurm: seconds between SIGUSR2 and the time limit",
    "DEPLOYKIT_RESTARTS": "JSON, on Slurm: how often the job may be restarted, by reason",
}

EXIT_RECORD_FILES = {
    "node-N.json": "how the launcher of node N ended",
    "failed-A.R.json": "the first rank that failed in round R of attempt A; `-stopped`: it was "
    "asked to stop",
    "rank-N.json": "below `mpirun` and the like: how the program of rank N ended",
    "restart-N.json": "on Slurm: why restart N happened",
    "attempt.json": "on Slurm: the latest attempt",
    "billed-N.json": "for a job with a cap: when billing of attempt N began; updated regularly",
    "heartbeat-N.json": "on several nodes of Slurm: where the launcher of node N can be reached",
    "process-N.json": "the process of rank N, kept after its end, for `deploykit dump`",
    "staging-N.json": "progress of node N in copying the channels of `data` with `stage`",
    "stall-N.json": "the ranks of node N make no progress; deleted when they do again",
    "unhealthy-N.json": "nodes that failed in attempt N: in the preflight, or without a record",
    "packages.json": "Python packages of node 0, for `compare` and `reproduce`",
    "software.json": "versions on node 0, and the GPUs that its ranks see, for `report`",
    "usage-N.json": "CPU, memory and GPU of each rank of node N, kept after its end, for `watch`",
    "checkpoints-N.json": "the newest checkpoint that node N copied to a bucket; why a copy failed",
    "written.json": "what the program wrote, as node 0 found it at the end",
}

EXIT_RECORD_FIELDS = {
    "channel": "the channel that is copied, or was copied last",
    "copied": "bytes of it on the node",
    "size": "its total bytes",
    "folders": "the copy of each complete channel, by name",
    "done": "whether all nodes have all channels",
    "waiting": "processes that wait in `init_process_group`, if all of the node do; else 0",
    "address": "`HOST:PORT` where they wait; empty if py-spy could not read it",
    "refused": "whether the connection was refused",
    "attempt": "restarts of the job before this attempt",
    "began": "seconds since 1970",
    "error": "why the last copy failed; empty if it did not",
    "location": "the prefix in S3",
    "newest": "the last checkpoint that was copied or found there, or empty",
    "driver": "version of the GPUs' driver; empty without GPUs",
    "gpus": "names of the GPUs that the ranks of node 0 see",
    "packages": "by name: its version",
    "versions": "by name: Python, the kernel, PyTorch and others that are installed",
    "dump": "name of the folder in `stacks/`, or empty",
    "longest": "seconds of the longest pause before",
    "nodes": "nodes of the job",
    "seconds": "seconds without progress when that was noted",
    "hosts": "why each node failed, by its name",
    "failed_check": "whether the preflight found that",
    "ranks": "by rank: its exit code; in `usage-N.json` `cpu` in percent of a core, with its "
    "children; `rss`, its own memory in bytes; of its GPU `gpu` in percent, `gpu_memory` and "
    "`gpu_size` in bytes; null where not known",
    "exit_code": "exit code, 128 + the signal for a process that a signal killed",
    "finished": "when, in UTC: `2026-11-21T01:46:08.123Z`",
    "host": "address of the node; of a process, the name of its node",
    "libraries": "`LD_LIBRARY_PATH` of the program, or empty",
    "local_world_size": "ranks of the node",
    "logs": "size of each log when the attempt began, in bytes",
    "checkpoints": "the same for the checkpoint folder, without `working_folder/`",
    "output": "files that the run wrote into the output folder: `folder`, `count`, `bytes`, and "
    "path and bytes of the `largest`",
    "outputs": "the patterns of the job file",
    "pid": "process id",
    "port": "TCP port",
    "python": "the Python that runs the program",
    "rank": "number of the rank; for a node, the rank that failed first",
    "reason": "a one-sentence reason",
    "restart": "number of the restart, from 1",
    "stacks": "the file into which the program writes its stacks when it gets SIGURG",
    "started": "when the process started, in clock ticks since boot",
    "stopped": "whether the rank had received a signal to stop",
    "time": "when, in UTC",
    "working_folder": "the same for the working folder: files that did not come with the source, "
    "or have changed",
    "why": "`time_limit`, `preemption`, `node_failure`, `error` or `request`",
    "world_size": "ranks of the job",
}

WIDTH = 96
"""Characters of a line of code in a page."""


def part(name: str) -> str:
    """The prose of `parts/NAME.md.in`."""
    return (Path(__file__).parent / "parts" / f"{name}.md.in").read_text(encoding="utf-8")
