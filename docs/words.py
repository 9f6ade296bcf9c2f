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

INTERNAL = {  # the page has those that a job file may set; a test compares all with the code
    "DEPLOYKIT_STAGE": "JSON, channel to its section of `data`; removed once copied",
    "DEPLOYKIT_ENVIRONMENT": "the folder of the environment that this node has made for the job",
    "DEPLOYKIT_SECRETS": "JSON, variable to `secret:` reference; removed once resolved",
    "DEPLOYKIT_NOTIFY": "JSON: `notify` of the job file, with the receivers that a node can reach; "
    "removed before the program starts",
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
    "DEPLOYKIT_RESTART_POLICY": "JSON: `restarts` of the job file, unless it is the default",
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

GUIDES = {
    "init": "how-to/start.md",
    "check": "tutorial/first-steps.md",
    "doctor": "how-to/doctor.md",
    "advise": "how-to/choose-a-strategy.md",
    "cost": "how-to/cost.md",
    "when": "how-to/slurm.md",
    "backends": "how-to/doctor.md",
    "config": "how-to/start.md",
    "infra": "how-to/infra.md",
    "completion": "how-to/install.md",
    "schema": "how-to/agents.md",
    "submit": "tutorial/first-steps.md",
    "sweep": "how-to/sweep.md",
    "rerun": "how-to/every-day.md",
    "reproduce": "how-to/compare.md",
    "attach": "how-to/sagemaker.md",
    "wait": "how-to/every-day.md",
    "cancel": "how-to/local.md",
    "notify": "how-to/notify.md",
    "export": "how-to/deploy.md",
    "deploy": "how-to/deploy.md",
    "status": "how-to/every-day.md",
    "list": "how-to/every-day.md",
    "watch": "how-to/watch.md",
    "logs": "how-to/every-day.md",
    "fetch": "how-to/results.md",
    "metrics": "how-to/watch.md",
    "profile": "how-to/profile.md",
    "compare": "how-to/compare.md",
    "report": "how-to/compare.md",
    "open": "how-to/every-day.md",
    "sync": "how-to/track.md",
    "diagnose": "how-to/diagnose.md",
    "guide": "how-to/diagnose.md",
    "explain": "how-to/diagnose.md",
    "dump": "how-to/a-run-hangs.md",
    "exec": "how-to/enter.md",
    "shell": "how-to/enter.md",
    "nodes": "how-to/network.md",
    "disk": "how-to/clean-up.md",
    "prune": "how-to/clean-up.md",
    "rm": "how-to/clean-up.md",
}
"""The page that shows a command at work: the reference has its arguments only."""

WIDTH = 96
"""Characters of a line of code in a page."""


def title(page: str) -> str:
    """The heading of a page of docs/."""
    text = (Path(__file__).parent / page).read_text(encoding="utf-8")
    return text.splitlines()[0].removeprefix("# ")


def part(name: str) -> str:
    """The prose of `parts/NAME.md.in`."""
    return (Path(__file__).parent / "parts" / f"{name}.md.in").read_text(encoding="utf-8")
