"""The reference trainer's loop, with metrics."""

from __future__ import annotations

import sys
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))

import train
from trainer import task, tasks
from trainer.arguments import parse
from trainer.parallel import process_group


def main() -> None:
    """Train, and print the line of JSON on rank 0."""
    clock = common.Clock()
    data = common.dataset()
    small = common.TensorDataset(*(tensor[: common.BATCH] for tensor in data.tensors))
    tasks.load = lambda _: task.Task(lambda: common.model(clock), data, small, small)
    batch, rate = common.BATCH * common.world(), common.LEARNING_RATE
    words = f"--epochs 1 --batch-size {batch} --optimizer adamw --lr {rate} --weight-decay 0.01"
    words += " --compile" * common.COMPILE
    trainer = train.Trainer(
        parse(words.split()), process_group.join(), train.collect_stop_signals()
    )
    clock.moments.clear()  # the first batch was tried, for unused parameters
    trainer.train()
    clock.report(trainer.best_loss)


if __name__ == "__main__":
    main()
    process_group.leave()
