"""Ranks that stay: started once, they train whenever they are told to.

Importing torch takes each process two seconds, and a run of fifty steps less. Run as a program,
this file is one such rank: a line of JSON in, a line out.
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

import pytest
import torch
from ranks import PATIENCE, environment, free_port
from torch import distributed

import train
from trainer import group, tasks


class Ranks:
    """Processes that form one group. After one has died or hung, new ones are started."""

    def __init__(self, world, folder):
        self.world = world
        self._folder = folder
        self._processes = []

    def train(self, folder, *arguments, double=False):
        """Train to the end, whatever is in the way on any rank an AssertionError."""
        faults = [fault for fault in self.ask(folder, *arguments, double=double) if fault]
        assert not faults, "\n".join(faults)

    def ask(self, folder, *arguments, double=False):
        """Train; what was in the way, for each rank, or ''."""
        if not self._processes:
            self._processes = list(self._started())
        order = {"folder": str(folder), "arguments": arguments, "double": double}
        for process in self._processes:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        timer = threading.Timer(PATIENCE, self._kill)
        timer.start()
        answers = [process.stdout.readline() for process in self._processes]
        timer.cancel()
        if not all(answers):
            self.close()
            return [f"a rank died, or hung for {PATIENCE} s: {answers}; see {self._folder}"]
        return [json.loads(answer) for answer in answers]

    def _started(self):
        port = str(free_port())
        for rank in range(self.world):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.world}
            place |= {"LOCAL_WORLD_SIZE": self.world, "MASTER_PORT": port}
            variables = {name: str(value) for name, value in place.items()}
            with (self._folder / f"rank-{rank}.log").open("a") as log:
                yield subprocess.Popen(
                    [sys.executable, __file__],
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


def topics(folder, size):
    """A folder with so many bytes of Python's own reference texts."""
    from pydoc_data.topics import topics as texts

    folder.mkdir()
    (folder / "topics.txt").write_text("\n".join(texts[name] for name in sorted(texts))[:size])
    return folder


def run(place, folder, arguments, *, double=False):
    """One training run in this process, a rank of a group that is there already."""
    with pytest.MonkeyPatch.context() as patch, _few_groups(patch):
        patch.setattr(train, "OUTPUT", folder / "output")
        patch.setattr(train, "CHECKPOINTS", folder / "checkpoints")
        if double:
            _compute_in_double_precision(patch)
        try:
            train.Run(train.parse(arguments), place, notices=[]).train()
        finally:
            torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def _few_groups(patch):
    """Each group of gloo has a thread that wakes up a hundred times a second, and a process that
    stays would collect those of every run: make each mesh once, and close the other groups.
    """
    made = []

    def new_group(*arguments, **options):
        made.append(NEW_GROUP(*arguments, **options))
        return made[-1]

    patch.setattr(distributed, "new_group", new_group)
    patch.setattr(group.Place, "mesh", MESH)
    yield
    for each in made:
        distributed.destroy_process_group(each)


NEW_GROUP, MESH = distributed.new_group, functools.cache(group.Place.mesh)


def _compute_in_double_precision(patch):
    """Sums in another order then differ by 1e-16 of their size: what is left is a mistake."""
    find = tasks.find

    def doubled(options):
        task = find(options)
        for part in (task.training, task.validation, task.test):
            part.tensors = tuple(t.double() if t.is_floating_point() else t for t in part.tensors)
        return task

    patch.setattr(tasks, "find", doubled)
    patch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)


def main():
    place = group.join()
    for line in sys.stdin:
        order = json.loads(line)
        fault = ""
        with contextlib.redirect_stdout(io.StringIO()):
            try:
                run(place, Path(order["folder"]), order["arguments"], double=order["double"])
            except (Exception, SystemExit) as error:  # noqa: BLE001 - the parent asks for it
                traceback.print_exc()
                fault = f"{type(error).__name__}: {error}"
        sys.stdout.write(json.dumps(fault) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
