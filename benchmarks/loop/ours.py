"""The reference trainer's loop, metrics on."""

from __future__ import annotations

import sys
from pathlib import Path

import common

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "entrypoints"))

import train
from trainer import process_group, tasks
from trainer.arguments import parse


def main() -> None:
    clock = common.Clock()
    data = common.dataset()
    few = common.TensorDataset(*(tensor[: common.BATCH] for tensor in data.tensors))
    tasks.load = lambda _: tasks.Task("samples", data, few, few, lambda: common.model(clock))
    batch, rate = common.BATCH * common.world(), common.LEARNING_RATE
    words = f"--epochs 1 --batch-size {batch} --optimizer adamw --lr {rate} --weight-decay 0.01"
    run = train.Trainer(parse(words.split()), process_group.join(), train.collect_stop_signals())
    run.train()
    clock.report(run.best_loss)


if __name__ == "__main__":
    main()
    process_group.leave()
