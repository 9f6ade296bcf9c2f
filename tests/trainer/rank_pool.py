"""A pool of ranks that are started once and then train on request.

Importing torch takes two seconds, longer than a run of fifty steps. So this file, as a program,
imports it once and forks the ranks. Each reads requests from a socket of its own, as lines of JSON,
and writes a line for each.
"""

import contextlib
import functools
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import distributed
from torch.distributed import checkpoint, fsdp, pipelining, tensor  # noqa: F401 - once for all

import train
from deploykit_node import signals
from tests.trainer.ranks import PATIENCE, environment, free_port
from trainer import tasks
from trainer.parallel import process_group


class RankPool:
    """Processes that form one process group; restarted after one has died or hung.

    They are stopped while none trains: each of gloo's many threads wakes up a hundred times a
    second, and those of idle pools took a quarter of the processors.
    """

    python = sys.executable
    variables: ClassVar[dict[str, str]] = {}
    """More environment variables."""

    def __init__(self, world, folder):
        self.world = world
        self._folder = folder
        self._program = None
        self._ranks = []

    def train(self, folder, *arguments, double=False):
        """Train to the end; returns what each rank printed. An error is an AssertionError."""
        errors = [error for error in self.try_to_train(folder, *arguments, double=double) if error]
        assert not errors, "\n".join(errors)
        return self._printed

    def try_to_train(self, folder, *arguments, double=False):
        """Train; returns the error of each rank, or ''."""
        if self._program is None:
            self._start()
        timer = threading.Timer(PATIENCE, self._kill)
        timer.start()
        try:
            responses = self._ask(folder=str(folder), arguments=arguments, double=double)
        except ConnectionError:
            responses = [""]
        timer.cancel()
        if not all(responses):
            self.close()
            return [f"a rank died, or hung for {PATIENCE} s: {responses}; see {self._folder}"]
        errors, self._printed = zip(*map(json.loads, responses), strict=True)
        return errors

    def _ask(self, **request):
        os.killpg(self._program.pid, signal.SIGCONT)
        for rank in self._ranks:
            rank.write(json.dumps(request) + "\n")
            rank.flush()
        responses = [rank.readline() for rank in self._ranks]
        os.killpg(self._program.pid, signal.SIGSTOP)
        return responses

    def _start(self):
        pairs = [socket.socketpair() for _ in range(self.world)]
        self._ranks = [mine.makefile("rw") for mine, _ in pairs]
        theirs = [other.fileno() for _, other in pairs]
        variables = {"WORLD_SIZE": str(self.world), "LOCAL_WORLD_SIZE": str(self.world)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with (self._folder / "ranks.log").open("a") as log:
            self._program = subprocess.Popen(
                [self.python, "-m", "tests.trainer.rank_pool", *map(str, theirs)],
                env=environment(self._folder, **variables | self.variables),
                pass_fds=theirs,
                start_new_session=True,
                preexec_fn=signals.child_setup(set(), signal.SIGKILL),  # noqa: PLW1509 - no thread
                stdout=log,
                stderr=log,
            )
        for pair in pairs:
            for end in pair:
                end.close()  # of `mine`, the file is open still

    def _kill(self):
        os.killpg(self._program.pid, signal.SIGKILL)

    def close(self):
        if self._program is None:
            return
        self._kill()
        self._program.wait()
        for rank in self._ranks:
            with contextlib.suppress(ConnectionError):  # of a request that was never read
                rank.close()
        self._program, self._ranks = None, []


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
            options = train.accumulate(train.parse(arguments), context)
            train.Trainer(options, context, stop_signals=[]).train()
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
    """Fork a rank for each socket, whose numbers are the arguments."""
    sockets = [socket.socket(fileno=int(number)) for number in sys.argv[1:]]
    dies_with_us = signals.child_setup(set(), signal.SIGKILL)
    for rank, own in enumerate(sockets):
        if os.fork():
            continue
        dies_with_us()
        for other in sockets:
            if other is not own:
                other.close()
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        serve(own.makefile("rw"))
        os._exit(0)
    for each in sockets:
        each.close()
    for _ in sockets:
        os.wait()


def serve(requests):
    """Train on request, as a rank."""
    context = process_group.join()
    for line in requests:
        request = json.loads(line)
        folder, arguments = Path(request["folder"]), request["arguments"]
        message = ""
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            try:
                run(context, folder, arguments, double=request["double"])
            except (Exception, SystemExit) as error:  # noqa: BLE001 - reported to the parent
                traceback.print_exc()
                message = f"{type(error).__name__}: {error}"
        requests.write(json.dumps([message, printed.getvalue()]) + "\n")
        requests.flush()


if __name__ == "__main__":
    main()
