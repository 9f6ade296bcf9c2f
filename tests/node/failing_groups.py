"""Programs that fail under torchrun's own agent, many with a single import of torch.

Reads cases as JSON: folder of `train.py`, number of ranks, variables. Each agent is a fork, and so
is each rank below it; the log of all is `torchrun.log` in the folder. A fork of a process with
threads hangs once in a while, on a lock that one of them held: then the case is tried again.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import traceback
from collections import Counter
from functools import partial

import torch
import torch.utils.data
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from torch.distributed.launcher.api import elastic_launch

_AT_ONCE = 6
_LONGEST = 100
_TRIES = 3


def _rank(argv, env):
    """What a rank's fork does in place of starting Python: the same, to the same end."""
    signal.alarm(_LONGEST)
    os.closerange(3, 1024)  # torchrun waits for one of them
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv[argv.index("train.py") :]
    code = 0
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - whatever a program raises
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _forked(args, env, **more):
    argv = list(args)
    rank = partial(_rank, argv, env)
    return subprocess.Popen(argv, env=env, preexec_fn=rank, **more)  # noqa: PLW1509 - it never execs


def _agent(case):
    meeting = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=failing"]
    options = [*meeting, f"--nproc-per-node={case['ranks']}", "--monitor-interval=0.1", "--tee=3"]
    config, program, words = torchrun.config_from_args(torchrun.parse_args([*options, "train.py"]))
    subprocess_handler.Popen = _forked
    elastic_launch(config, program)(*words)


def _child(case):
    """Ends as torchrun does."""
    signal.alarm(_LONGEST)
    os.setsid()
    os.chdir(case["folder"])
    log = os.open("torchrun.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(case["env"])
    try:
        _agent(case)
    except ChildFailedError as error:
        print(f"{type(error).__module__}.ChildFailedError: {error}", flush=True)  # noqa: T201
        os._exit(1)
    except BaseException:  # noqa: BLE001 - a fork must not return
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main():
    torch.set_num_threads(1)
    waiting, running = json.load(sys.stdin), {}
    tries = Counter()
    while waiting or running:
        while waiting and len(running) < _AT_ONCE:
            case = waiting.pop()
            running[os.fork() or _child(case)] = case
        child, status = os.wait()
        case = running.pop(child)
        tries[case["folder"]] += 1
        if status == signal.SIGALRM and tries[case["folder"]] < _TRIES:
            waiting.append(case)


if __name__ == "__main__":
    main()
