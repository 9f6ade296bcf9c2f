"""Save checkpoints and get killed at a given point of a save.

    python -m tests.trainer.kill_points FOLDER

For each mode and each point, a process saves step 1, then kills itself with SIGKILL in the save of
step 2. torch is imported once, and the processes are forked. Prints one JSON line per process.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from trainer.checkpoint import checkpointer as checkpoint
from trainer.checkpoint import dcp_files, integrity
from trainer.checkpoint.checkpointer import CheckpointManager
from trainer.parallel import process_group

POINTS = {
    "before the tensors": (dcp_files.dcp, "save", "before"),
    "after the tensors": (dcp_files.dcp, "save", "after"),
    "before the manifest": (integrity, "write_manifest", "before"),
    "after the manifest": (integrity, "write_manifest", "after"),
    "before the rename": (checkpoint, "_rename", "before"),
    "after the rename": (checkpoint, "_rename", "after"),
    "before the removal": (checkpoint.shutil, "rmtree", "before"),
    "after the removal": (checkpoint.shutil, "rmtree", "after"),
}
"""A function and the moment relative to its call. `keep=1` makes a save remove the previous
checkpoint; the calls of rmtree that prepare the save come before it is armed."""
COMPLETE = ("after the rename", "before the removal", "after the removal")
"""Points at which step 2 has its name."""


def main(folder):
    for mode in ("foreground", "background"):
        for point, where in POINTS.items():
            child = os.fork()
            if not child:
                save_and_die(folder / mode / point, mode == "background", *where)
            _, status = os.waitpid(child, 0)
            result = {"mode": mode, "point": point, "signal": os.WTERMSIG(status)}
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


def save_and_die(folder, background, owner, name, when):
    try:
        manager = CheckpointManager(folder, process_group.join(), keep=1, background=background)
        save(manager, 1)
        manager.wait()
        arm(owner, name, when)
        save(manager, 2)
        manager.wait()
    finally:
        os._exit(1)  # not reached if the point exists


def save(manager, step):
    state = {"model.weight": torch.full((100_000,), float(step))}
    manager.save(step, state, {"step": step, "best_step": step})


def arm(owner, name, when):
    function = getattr(owner, name)

    def deadly(*arguments, **options):
        if name == "rmtree" and str(arguments[0]).endswith(".saving"):
            return function(*arguments, **options)
        if when == "after":
            function(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    setattr(owner, name, deadly)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
