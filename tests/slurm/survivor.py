"""The reference trainer, in the first attempt of which something can happen at a step known before.

    survivor.py hold:STEP | fail:STEP | run [OPTIONS of train.py]...

The first attempt stays at STEP until something happens to it or the file `go` appears in its
output folder (hold), or its last rank raises an exception there (fail). Each step that rank 0 does
is a line of `steps.jsonl`: restart, step. The losses are in the trainer's own `metrics.jsonl`.
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
"""Seconds by which each step of the first attempt is longer: the ranks then vote in each."""


class Survivor(train.Run):
    def __init__(self, fate, options, place, notices):
        super().__init__(options, place, notices)
        self.fate, _, at = fate.partition(":")
        self.at, self.told = int(at or 0), notices
        # each torchrun counts its restarts for itself
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
                self.meet_its_fate()

    def meet_its_fate(self):
        if self.fate == "fail" and self.place.rank == self.place.world - 1:
            raise RuntimeError("a fault of the user's")
        go = Path(train.OUTPUT, "go")
        while not any(group.totals(self.place, [float(bool(self.told)), float(go.exists())])):
            time.sleep(0.1)


if __name__ == "__main__":
    train.Run = partial(Survivor, sys.argv.pop(1))
    train.main()
