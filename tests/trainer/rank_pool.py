"""A pool of ranks that are started once and then train on request.

Importing torch takes each process two seconds, longer than a run of fifty steps. As a program, this
file is one rank: it reads requests as lines of JSON and writes a line for each.
"""

import contextlib
import functools
import io
import json
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import distributed

import train
from tests.trainer.ranks import PATIENCE, environment, free_port
from trainer import tasks
from trainer.parallel import process_group


class RankPool:
    """Processes that form one process group; restarted after one has died or hung."""

    python = sys.executable
    variables: ClassVar[dict[str, str]] = {}
    """More environment variables."""

    def __init__(self, world, folder):
        self.world = world
        self._folder = folder
        self._processes = []

    def train(self, folder, *arguments, double=False):
        """Train to the end; an error on any rank is an AssertionError."""
        errors = [error for error in self.try_to_train(folder, *arguments, double=double) if error]
        assert not errors, "\n".join(errors)

    def try_to_train(self, folder, *arguments, double=False):
        """Train; returns the error of each rank, or ''."""
        if not self._processes:
            self._processes = list(self._start())
        request = {"folder": str(folder), "arguments": arguments, "double": double}
        for process in self._processes:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        timer = threading.Timer(PATIENCE, self._kill)
        timer.start()
        responses = [process.stdout.readline() for process in self._processes]
        timer.cancel()
        if not all(responses):
            self.close()
            return [f"a rank died, or hung for {PATIENCE} s: {responses}; see {self._folder}"]
        return [json.loads(response) for response in responses]

    def _start(self):
        port = str(free_port())
        for rank in range(self.world):
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world}
            variables |= {"LOCAL_WORLD_SIZE": self.world, "MASTER_PORT": port}
            variables = {name: str(value) for name, value in variables.items()} | self.variables
            with (self._folder / f"rank-{rank}.log").open("a") as log:
                yield subprocess.Popen(
                    [self.python, "-m", "tests.trainer.rank_pool"],
                    env=environment(self._folder, MASTER_ADDR="127.0.0.1", **variables),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )

    def _kill(self):
        for process in self._processes:
            process.kill()

    def close(self):
        self._kill()
        for process in self._processes:
            process.communicate()
        self._processes = []


def write_help_topics(folder, size):
    """Write a folder with `size` bytes of Python's help topics."""
    from pydoc_data.topics import topics as texts

    folder.mkdir()
    (folder / "topics.txt").write_text("\n".join(texts[name] for name in sorted(texts))[:size])
    return folder


def run(context, folder, arguments, *, double=False):
    """Run the trainer in this process, a rank of an existing process group."""
    with pytest.MonkeyPatch.context() as patch, _few_groups(patch):
        patch.setattr(train, "OUTPUT_DIR", folder / "output")
        patch.setattr(train, "CHECKPOINT_DIR", folder / "checkpoints")
        if double:
            _compute_in_double_precision(patch)
        try:
            train.Trainer(train.parse(arguments), context, stop_signals=[]).train()
        finally:
            torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _few_groups(patch):
    """Create each mesh once, and destroy the other groups of a run.

    Each gloo group has a thread that wakes up a hundred times a second, and a rank of the pool
    would accumulate those of all runs.
    """
    created = []

    def new_group(*arguments, **options):
        created.append(NEW_GROUP(*arguments, **options))
        return created[-1]

    patch.setattr(distributed, "new_group", new_group)
    patch.setattr(process_group.DistributedContext, "mesh", MESH)
    yield
    for each in created:
        distributed.destroy_process_group(each)


NEW_GROUP, MESH = distributed.new_group, functools.cache(process_group.DistributedContext.mesh)


def _compute_in_double_precision(patch):
    """Rounding is then 1e-16 relative, so that larger differences are errors."""
    load = tasks.load

    def doubled(options):
        task = load(options)
        for part in (task.training, task.validation, task.test):
            part.tensors = tuple(t.double() if t.is_floating_point() else t for t in part.tensors)
        return task

    patch.setattr(tasks, "load", doubled)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


def main():
    context = process_group.join()
    for line in sys.stdin:
        request = json.loads(line)
        message = ""
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                run(
                    context, Path(request["folder"]), request["arguments"], double=request["double"]
                )
            except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the parent
                traceback.print_exc()
                message = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(message) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
