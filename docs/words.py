"""The hand-written parts of the reference, for `generate.py`."""

# ruff: noqa: INP001

import datetime as dt

SDK_VERSION = "2.257.7"
TODAY = dt.date(2026, 11, 21)
"""The day of which the oracle's tables speak."""

MADE = "<!-- Written by docs/generate.py from the code; change the code or docs/words.py. -->"

SWEEP_FILE = """\
What `deploykit sweep start` reads, in YAML or TOML: [Find the best arguments](../how-to/sweep.md).
Unknown and duplicate keys are errors, and all problems are reported at once.
"""

JOB_FILE = """\
One file describes a job, in YAML (`job.yaml`) or TOML (any name that ends in `.toml`).
[`deploykit init`](../how-to/start.md) writes a short one, `deploykit init --full` one with every
key and a comment for each, and `deploykit check` finds every problem in one. With the JSON Schema
that `deploykit init --schema` writes ([also here](job.schema.json)) editors complete keys and mark
mistakes. For VS Code with the YAML extension `init` makes this the first line:

    # yaml-language-server: $schema=job.schema.json

Rules for every key:

* Unknown and duplicate keys are errors. All problems are reported at once.
* A value without quotes in YAML keeps its text where text is expected: `args: [--lr, 0.10, yes]`
  passes `0.10` and `yes`, not `0.1` and `True`. In TOML, text needs quotes.
* A relative folder is relative to the job file, not to the current folder. `~` is your home folder.
* `--set a.b=c` overrides one value for one command. Lists and sections are written as in YAML:
  `--set entrypoint.args='[--lr, 0.1]'`. `--set a.b=null` removes an optional value.
* `entrypoint` has exactly one of `script` and `module`, `environment` at most one of `conda`,
  `venv` and `uv`.
* A backend's section is read only when that backend is used.
"""

TRAVELS = """\
## What is in the bundle

The bundle contains the folder `source` as it is on disk, committed or not. For a source folder in a
git repository the run folder also keeps the commit and, in `uncommitted.diff`, the changes since:
the commit with this patch applied has exactly the files in the bundle. The repository's own
configuration is not run. The same files give the same archive, which is stored and uploaded once.

Excluded are:

* what `.gitignore` files ignore (those of the source folder and of the folders above it, up to the
  repository's root);
* files that may contain secrets, in upper or lower case: {secrets}, but not {let_through};
* clutter: {clutter};
* any other file that contains a private key; a warning names file and line.

A file that seems to contain an access token is included, with a warning that names file and line.

A `.deploykitignore` has the format of `.gitignore` and takes precedence: `!.env.test` in it
includes that file, without warnings about its content. See [Keep secrets out of
jobs](../how-to/secrets.md). Links that leave the folder are refused, and so is a source larger than
`max_bundle`.
"""

SECRETS = """\
## Secrets

A value of `env` may be a reference, `secret:KIND:NAME`. Plans, scripts, logs and the registry
contain only the reference; each node resolves it before the trainer starts.

| reference | value |
|---|---|
| `secret:env:NAME` | the variable NAME of the node's own environment |
| `secret:file:PATH` | the text of a file that only you can read (`chmod 600`) |
| `secret:ssm:NAME` | a parameter of AWS Systems Manager; needs boto3 on the node |
| `secret:secretsmanager:NAME` | a text secret of AWS Secrets Manager; needs boto3 on the node |

A plain secret in `env`, or a token in an argument, gives a warning; `deploykit check --strict` and
`submit --strict` refuse the job for it.

SageMaker supports only the last two. On Slurm, `env` means the environment from which you submit,
since sbatch copies it to the nodes.
"""

COMMANDS = """\
`deploykit submit` without a file reads `./job.yaml`; a [script needs
none](../how-to/start.md#without-a-job-file). Every command except `completion` has
`--json` and then prints JSON on standard output, errors included, as
`{{"error": {{"message", "hint", "exit_code", "transient", "problems"}}}}`. Without it, results go
to standard output, messages and errors to standard error. Tables are drawn on a terminal, and
tab-separated without headings in a pipe. See also [exit codes](exit-codes.md).

Times are printed in UTC. As JSON a run has `created`, `started` and `finished` in ISO 8601, null
where the target has not told them, and `queue_seconds` and `duration_seconds`. States have colors
on a terminal, unless `NO_COLOR` is set or `TERM` is `dumb`.

RUN is a run id, or a unique beginning or end of one. `cancel` takes the id, or its
first four characters or more.
"""

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

EXIT_CODES = """\
Scripts may rely on these. Codes 64 to 78 follow BSD's `sysexits.h`, so that they are not confused
with a trainer's own, which usually are 1, 2 or 128 + a signal.
"""

PASSED_ON = """\
## Exit codes of a run

`wait` and `submit --wait` exit with the code of the rank that failed first, 128 + N for signal N.
If the run failed and no code is known, it is 1. With several runs, `wait` exits with the code of
the first, in the order in which they were given, whose code is not 0. It also ends, with 81, for a
run that stays `blocked`: it can never start, for example on 9 nodes of a partition of 4, and is in
the queue until `deploykit cancel`. With 83 it ends where the target answers for five minutes that
it has no job of the run, as SageMaker does with the credentials of another account. A run that
merely waits is waited for. These codes do not come from the trainer:

| code | meaning |
|---|---|
| 75 | the trainer saved a checkpoint after a signal to stop, and no other attempt follows |
| 124 | the run reached its time limit (local, Slurm) |
| 137 | a rank was killed (128 + 9); on Slurm also: a node ran out of memory |
{launcher}

So after `submit --wait` a code from 64 to 78 can be deploykit's or the run's. `--json`
distinguishes them: `error` is deploykit's, `exit_code` is the run's.
"""

LAUNCHER = {
    "BadCommand": "the launcher on the node got an invalid command, or the program does not exist",
    "LaunchError": "an error in the launcher itself; the node's log has the details",
    "BadEnvironment": "the job cannot run in this environment: no PyTorch, no route to another "
    "node, a secret that cannot be read, a folder that cannot be created",
}

NODE = """\
What a trainer finds on a node, the same on every backend. A script that knows nothing of deploykit
and only reads torchrun's variables runs unmodified.

## The command

![The processes on one node](../pictures/node-plane.svg)

Every backend runs the same file on every node, in the unpacked source folder:

    PYTHON .deploykit/launch.py torchrun --nnodes=2 --nproc-per-node=4 --max-restarts=0 -- train.py

The local backend starts one such launcher per node with `launch.py --emulated-nodes`, which also
keeps the time limit. {files} travel in `.deploykit/` of every bundle. They need Python 3.10 or
later and, until the trainer starts, nothing but the standard library (boto3 for secrets of AWS).
They are not on the trainer's `sys.path`.

`launch.py`

1. finds out which node this is, from {launchers}, or that it is the only one;
2. on several nodes finds the interface that leads to another node of the job, and logs its choice
   with the reason; on one node chooses loopback;
3. resolves secrets, creates the output and checkpoint folders, and brings back
   [`outputs`](../how-to/results.md) of an earlier attempt;
4. starts torchrun with a [rendezvous of its own](../how-to/network.md#who-else-can-connect), on an
   address and port for this run alone, and itself once for each rank. A job of one rank without
   `retries` needs no torchrun, which would load PyTorch: its rank is started directly, with the
   same variables;
5. for each rank, runs the program with exactly the arguments of the job file, and prefixes each
   line that it prints with the time and `[rank N]`;
6. forwards SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 to the ranks, but not to torchrun. After
   one of the first three the ranks have {grace} seconds to exit, on Slurm as long as Slurm lets
   them; then they are killed;
7. on Slurm, requests another attempt if one is [due](../how-to/slurm.md#a-job-that-survives);
8. collects `outputs`, writes [exit records](#exit-records), and exits with the code of the rank
   that failed first.

On SageMaker AWS's own launcher starts the ranks, and `launch.py` does steps 2, 3 and 5 in each of
them, and collects `outputs`. The command then travels in hyperparameters `{argument}0`,
`{argument}1`, ... as pieces of one JSON list.

## Stopping and resuming

SIGTERM and SIGUSR2 tell a trainer to stop: a time limit is near, or another job gets the node. A
trainer that then saves a checkpoint into `DEPLOYKIT_CHECKPOINT_DIR` and can resume from it exits,
on every rank, with code **{stopped}** (`EX_TEMPFAIL` of `sysexits.h`: try again). That code is no
failure: torchrun neither restarts the rank nor stops the others, which may still be saving. If
nothing restarts the job, the run ends with {stopped} too, and its reason says how to resume.

A trainer that exits with 0 after such a signal is finished; any other code is a failure.

## A script that starts its own processes

With `entrypoint: {{launcher: python}}` the command is `launch.py python --nnodes=2 -- train.py`,
and there is no torchrun: on each node one plain process runs the script, which starts the others,
as with `torch.multiprocessing.spawn`. Beside `env` and the variables that begin with `DEPLOYKIT_`
it finds exactly these:

| variable | meaning |
| --- | --- |
| `MASTER_ADDR` | an address of node 0 that all nodes reach; 127.0.0.1 on one node |
| `MASTER_PORT` | a port of that address that is free as the script starts, the same on all nodes |
| `NODE_RANK` | number of this node, from 0 |
| `NNODES` | number of nodes |

On several nodes of SageMaker the port is 7777, or the lowest of `DEPLOYKIT_PORTS`. None of
`RANK`, `LOCAL_RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE` and `TORCHELASTIC_*` is set, and
`OMP_NUM_THREADS` is left as it is. Logs and records call the process of node N `rank N`.

## Variables of the trainer
"""

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
    "nodes were lost or came",
    "DEPLOYKIT_FULL_WORLD_SIZE": "where the number of nodes may change: the ranks of all nodes",
}

NODE_REST = """\
The variables of `env` are set too, secrets with their values. Unless you choose otherwise,
`OMP_NUM_THREADS` is 1 and `PYTHONUNBUFFERED` is 1. On several nodes `NCCL_SOCKET_IFNAME` and
`GLOO_SOCKET_IFNAME` name the chosen interface, unless you set them in `env`. SageMaker's launcher
overwrites what you chose for NCCL, libfabric, Gloo and `OMP_NUM_THREADS`; `launch.py` restores it
before the trainer starts.

## Variables of the launcher

Set by plans and by `launch.py` for itself. Only `DEPLOYKIT_GRACE`, `DEPLOYKIT_PORTS`,
`DEPLOYKIT_STALL_SECONDS`, `DEPLOYKIT_DEBUGGER` and `DEPLOYKIT_COLLECT_SECONDS` can be set in
`env`, which rejects
torchrun's variables above and other names that begin with `DEPLOYKIT_`.
"""

INTERNAL = {
    "DEPLOYKIT_SECRETS": "JSON, variable to `secret:` reference; removed once resolved",
    "DEPLOYKIT_BUNDLE": "on SageMaker: the hash of the planned source, which `launch.py` compares "
    "with that of the bundle's files; removed after that",
    "DEPLOYKIT_ENV": "JSON, on SageMaker: the settings to restore last; removed after that",
    "DEPLOYKIT_NODE_RANK": "number of this node, if several are emulated on one machine",
    "DEPLOYKIT_NODES": "how many nodes are emulated",
    "DEPLOYKIT_NODE_LIST": "on Slurm, where the number of nodes may change: those at first",
    "DEPLOYKIT_ARRAY_TASK": "on Slurm, in the batch script of a run that is a task of an array of "
    "several runs: `ARRAY_TASK`, the id of its job",
    "DEPLOYKIT_STEP_NODE": "the number of this node among them",
    "DEPLOYKIT_GENERATION": "where the number of nodes may change: how many groups of nodes there "
    "were, with this one",
    "DEPLOYKIT_PLAIN": "1 for a script that starts its own processes; removed before it starts",
    "DEPLOYKIT_RANK_DIR": "folder where the ranks of a node register with its launcher",
    "DEPLOYKIT_ON_STALL": "`report` or `restart`, if the job does not leave `on_stall` as it is",
    "DEPLOYKIT_STALL_SECONDS": "seconds without progress that are never too long. Default: 300",
    "DEPLOYKIT_STACK_FILE": "the file for the stacks of a rank; removed before the program starts",
    "DEPLOYKIT_LOG_LIMIT": "bytes of a node's log, if the job file sets `log_limit`",
    "DEPLOYKIT_PROFILE": "what to profile, if anything: `torch:FIRST:LAST`, `nsys`, "
    "`nsys:FIRST:LAST` or `memory`",
    "DEPLOYKIT_BELOW_NSYS": "of a rank below nsys: the process above; removed before the program "
    "starts",
    "DEPLOYKIT_TRACE_FILE": "the file for the profile of a rank; removed before the program starts",
    "DEPLOYKIT_DEBUGGER": "the rank that waits for an editor's debugger, from `submit --debugger`",
    "DEPLOYKIT_DEBUG_FILE": "the file for the port of that debugger; removed before the program "
    "starts",
    "DEPLOYKIT_PYTHONPATH": "the `PYTHONPATH` of the program, which gets it back before it starts",
    "DEPLOYKIT_ROUND": "how often torchrun has restarted the ranks, the same on all nodes; the "
    "trainer reads it as `TORCHELASTIC_RESTART_COUNT`",
    "DEPLOYKIT_GRACE": "seconds that ranks have after SIGTERM. Default: 30; no limit for a signal "
    "from Slurm, which kills them itself",
    "DEPLOYKIT_PORTS": "`LOWEST-HIGHEST`: the ports that the rendezvous may use. Default: any free "
    "one from 10000 to 29999",
    "DEPLOYKIT_OUTPUTS": "JSON: the patterns of `outputs`",
    "DEPLOYKIT_COLLECT_SECONDS": "on SageMaker: seconds between two looks for `outputs` that are "
    "complete, while the program runs. Default: 30",
    "DEPLOYKIT_PREFLIGHT": "seconds for the preflight test; no test if it is not set",
    "DEPLOYKIT_DEBUG": "1 for debugging output of NCCL and PyTorch",
    "DEPLOYKIT_CAP": "JSON: the seconds that `max_cost` pays for, with the cap and the price of an "
    "hour; only with `stop_at_cap`",
    "DEPLOYKIT_NOTICE": "on Slurm: seconds between SIGUSR2 and the time limit",
    "DEPLOYKIT_RESTARTS": "JSON, on Slurm: how often the job may be restarted, by reason",
}

SETTINGS = """\
## Variables for NCCL and PyTorch

`launch.py` sets a few, and logs the reason for each on node 0. Variables that `env` or the node
already sets are kept. `RUN` is the run folder, on SageMaker the output folder. Before PyTorch 2.9
the flight recorder's variables are called `TORCH_NCCL_TRACE_BUFFER_SIZE` and
`TORCH_NCCL_DEBUG_INFO_TEMP_FILE`, and are set by those names.
"""

RUN_FOLDER = """\
## The run folder

On this machine and on Slurm, `deploykit status` names it, and `DEPLOYKIT_RUN_DIR` holds it.

| | |
|---|---|
| `plan.sh` | what was sent (`plan.json` for SageMaker) |
| `source/` | the unpacked source, where the trainer runs, [later reduced](../how-to/clean-up.md) |
| `source.json`, `uncommitted.diff` | hash of the bundle, commit, and what was not committed |
| `job.json` | the job with all overrides and arguments, for `deploykit rerun` |
| `logs/node-N.log` | the output of node N; of a progress bar one state in 10 s, and the last |
| `progress` | the current state of the progress bar of rank 0, while there is one |
| `output/`, `checkpoints/` | results and checkpoints, unless the job file names other locations |
| `checkpoints/working_folder/` | the files of [`outputs`](../how-to/results.md), to continue from |
| `exit_records/` | [how each node and rank ended](#exit-records), and why the job was restarted |
| `members/` | which [nodes train](../how-to/elastic.md), where their number may change |
| `stacks/` | [stacks of the ranks](../how-to/a-run-hangs.md), a folder for each dump |
| `debug/` | debugging output of NCCL and PyTorch, one file per process |
| `rendezvous.json` | address and port of the rendezvous, and the key of this attempt |

For a run on SageMaker the folder holds only what was sent; the rest is in S3 and CloudWatch.

Whatever your umask, no other user can read or change it, here or on a login node:

| | mode |
|---|---|
| the state folder, and each folder in it that deploykit makes | `0700` |
| the list of runs, bundles, scripts, logs, exit records, pickled functions | `0600` |
| `source/`: executable files, all others | `0700`, `0600` |
| what your program, Python and Slurm's own functions write there | by your umask |

deploykit closes a state folder that was open to other users, with a warning, and refuses one that
belongs to another user. Locations that the job file names (`output`, `checkpoints`) are yours: what
is made there has the permissions of the surrounding folder and your umask.
"""

EXIT_RECORDS = """\
## Exit records

The launchers leave JSON files of one line in `exit_records/`. `deploykit status` and `wait` read
them, so they know how a run ended even if the scheduler has no accounting. A restart deletes the
records of nodes and ranks. `decision-N` is not a record: the node that creates it decides what
follows attempt N. `history-N.jsonl` has what `usage-N.json` had over time, for `deploykit report`;
`debugger.json` has the port at which a rank waits for a debugger. The folders `gathering-*` count
the nodes that have come to a point of the end.
"""

EXIT_RECORD_FILES = {
    "node-N.json": "how the launcher of node N ended",
    "failed-A.R.json": "the first rank that failed in round R of attempt A; `-stopped`: if told to",
    "rank-N.json": "below `mpirun` and the like: how the program of rank N ended",
    "restart-N.json": "on Slurm: why restart N happened",
    "attempt.json": "on Slurm: the latest attempt",
    "billed-N.json": "of a job with a cap: when attempt N began to be billed; kept fresh",
    "heartbeat-N.json": "on several nodes of Slurm: where the launcher of node N can be reached",
    "process-N.json": "the process of rank N, kept after its end, for `deploykit dump`",
    "stall-N.json": "the ranks of node N make no progress; deleted when they do again",
    "unhealthy-N.json": "nodes that failed in attempt N: in the preflight, or without a trace",
    "software.json": "versions on node 0, and the GPUs that its ranks see, for `report`",
    "usage-N.json": "CPU, memory and GPU of each rank of node N, kept after its end, for `watch`",
    "written.json": "what the program wrote, as node 0 found it at the end",
}

EXIT_RECORD_FIELDS = {
    "waiting": "processes that wait in `init_process_group`, if all of the node do; else 0",
    "address": "`HOST:PORT` where they wait; empty if py-spy could not read it",
    "refused": "whether nobody listens there",
    "attempt": "restarts of the job before this attempt",
    "began": "seconds since 1970",
    "driver": "version of the GPUs' driver; empty without GPUs",
    "gpus": "names of the GPUs that the ranks of node 0 see",
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
    "reason": "one sentence of why",
    "restart": "number of the restart, from 1",
    "stacks": "the file into which the program writes its stacks when it gets SIGURG",
    "started": "when the process started, in clock ticks since the machine did",
    "stopped": "whether the rank had received a signal to stop",
    "time": "when, in UTC",
    "working_folder": "the same for the working folder: files that did not come with the source, "
    "or have changed",
    "why": "`time_limit`, `preemption`, `node_failure`, `error` or `request`",
    "world_size": "ranks of the job",
}

ORACLE = """\
Some settings do not do what they say: the SageMaker SDK accepts a misspelled distribution, and the
job trains on one process. `deploykit check` and `submit` apply these rules before they upload
anything. **refused** is an error, and nothing is sent. **runs as something else** and **cannot
know** are warnings, and so is an image that no longer receives patches.

Each row is a job: two `ml.g5.12xlarge` with four ranks each in AWS's image of PyTorch 2.10, changed
as the first column says. Keys without a section are those of `sagemaker:`. The second column says
what the SDK itself does with the job. A test asks the real SDK about every row, and about every row
with the setting of the last column. None of this was tried on the real service.
"""

PATCHES = """\
The service still runs an image after the end of its patches; `check` warns. The dates are AWS's.
"""

ORACLE_END = """\
The SDK's list of versions ends at 2.8.0, so PyTorch 2.9 and later require `image_uri`. The contents
of an image that is not AWS's are not known: the oracle then says *unknown*, and not that the
job is fine.
"""

INFRA = """\
The file `infra.yaml` (or any YAML or TOML file) from which `deploykit infra` generates the AWS
resources that jobs require: see [the guide](../how-to/infra.md). All problems are reported at once.
"""

WIDTH = 96
"""Characters of a line of code in a page."""

API = """
`import deploykit` from a notebook, a pipeline or a scheduler of your own;
[the guide](../how-to/python.md) shows how. Importing it imports nothing else. No function prints,
ends the process, or changes its environment, signals or current folder; all may be called from
several threads."""

API_ERRORS = """
`deploykit.errors` has the classes. Each error has `message`, `hint` (what to do next), `problems`
(of a job, all of them), `exit_code` (that of the [command line](exit-codes.md)) and `transient`
(whether a retry may help). All can be pickled."""
