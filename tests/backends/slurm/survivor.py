"""The reference trainer, with an event at a given step of the first attempt.

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
from trainer import stop_vote
from trainer.parallel.process_group import sum_over_ranks

SLOW = 0.11
"""Seconds by which each step of the first attempt is longer: the ranks then vote in each."""
stop_vote.INTERVAL = 0.1


class Survivor(train.Trainer):
    def __init__(self, fate, options, context, stop_signals):
        super().__init__(options, context, stop_signals)
        self.fate, _, at = fate.partition(":")
        self.at, self.stop_signals = int(at or 0), stop_signals
        # each torchrun counts its restarts for itself
        restarts = float(os.environ["DEPLOYKIT_RESTART_COUNT"])
        self.restart = int(sum_over_ranks(context, [restarts])[0])

    def train_step(self, batch):
        super().train_step(batch)
        if self.context.is_rank_zero:
            with (train.OUTPUT_DIR / "steps.jsonl").open("a") as file:
                print(json.dumps({"restart": self.restart, "step": self.step}), file=file)
        if self.at and not self.restart:
            time.sleep(SLOW)
            if self.step == self.at:
                self.fail_or_hold()

    def fail_or_hold(self):
        if self.fate == "fail" and self.context.rank == self.context.world_size - 1:
            raise RuntimeError("an error of the user's")
        go = Path(train.OUTPUT_DIR, "go")
        while not any(
            sum_over_ranks(self.context, [float(bool(self.stop_signals)), float(go.exists())])
        ):
            time.sleep(0.1)


if __name__ == "__main__":
    train.Trainer = partial(Survivor, sys.argv.pop(1))
    train.main()
