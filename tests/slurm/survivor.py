"""The reference trainer, with a first attempt that stops or fails at a given step.

    survivor.py hold:STEP | fail:STEP | run [OPTIONS of train.py]...

In the first attempt, the ranks stop at STEP until they are told to exit or the file `go` appears in
the output folder (hold), or the last rank raises an exception there (fail). Rank 0 writes a line
with restart and step to `steps.jsonl` for each step. The trainer writes losses to `metrics.jsonl`.
"""

import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import train
from trainer import group

SLOW = 0.11
"""Seconds added to each step of the first attempt, so that the ranks vote in each."""


class Survivor(train.Run):
    def __init__(self, action, options, place, notices):
        super().__init__(options, place, notices)
        self.action, _, at = action.partition(":")
        self.at, self.notices = int(at or 0), notices
        # each torchrun counts its own restarts
        counts = group.totals(place, [float(os.environ["DEPLOYKIT_RESTART_COUNT"])])
        self.restart = int(counts[0])

    def learn(self, batch, epoch):
        super().learn(batch, epoch)
        if self.place.first:
            with (train.OUTPUT / "steps.jsonl").open("a") as file:
                print(json.dumps({"restart": self.restart, "step": self.step}), file=file)
        if self.at and not self.restart:
            time.sleep(SLOW)
            if self.step == self.at:
                self.stop_or_fail()

    def stop_or_fail(self):
        if self.action == "fail" and self.place.rank == self.place.world - 1:
            raise RuntimeError("an error of the user's")
        go = Path(train.OUTPUT, "go")
        while not any(group.totals(self.place, [float(bool(self.notices)), float(go.exists())])):
            time.sleep(0.1)


if __name__ == "__main__":
    train.Run = partial(Survivor, sys.argv.pop(1))
    train.main()
