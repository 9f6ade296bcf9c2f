"""A trainer for the tests: resumable, and the same numbers on any number of ranks.

    survivor.py STEPS [hold | fail]

It fits a line by gradient descent with momentum, and leaves a checkpoint every `EVERY` steps.
Told to stop by SIGTERM or SIGUSR2, all ranks finish the step, rank 0 saves, and all end with exit
code 75. Each step is a line of `steps.jsonl`: restart, step, loss. The first attempt stays at
step `AT` until something happens to it (hold), or its last rank raises an exception there (fail).
"""

# ruff: noqa: T201

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch import distributed

EVERY = 10
AT = 15
BATCH = 8


def main(steps, at_last=None):
    told = []
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, lambda received, _: told.append(received))
    distributed.init_process_group("gloo")
    rank, world = distributed.get_rank(), distributed.get_world_size()
    step, weights, speed = resume()
    restart = restarts()
    while step < steps:
        if (step, restart, at_last) == (AT, 0, "fail") and rank == world - 1:
            raise RuntimeError("a fault of the user's")
        held = (step, restart, at_last) == (AT, 0, "hold")
        if held:
            time.sleep(0.1)
        else:
            gradient, loss = descend(step, weights, rank, world)
            speed = 0.9 * speed + gradient
            weights = weights - 0.05 * speed
            step += 1
        stop = torch.tensor(float(bool(told)))
        distributed.all_reduce(stop)
        if rank == 0 and not held:
            record(restart, step, loss)
        if rank == 0 and (stop or step % EVERY == 0 or step == steps):
            save(step, weights, speed)
        if stop:
            print(f"stopped after step {step}", flush=True)
            leave(75)
    print("finished", flush=True)
    leave(0)


def restarts():
    """How often this job was started again: each torchrun counts for itself, so the most of all."""
    count = torch.tensor(int(os.environ["DEPLOYKIT_RESTART_COUNT"]))
    distributed.all_reduce(count, distributed.ReduceOp.MAX)
    return count.item()


def descend(step, weights, rank, world):
    """Gradient and loss of batch `step`, each rank with its share of it."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(BATCH, 4, generator=generator, dtype=torch.float64)[rank::world]
    error = inputs @ weights - inputs @ torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    sums = torch.cat([inputs.T @ error, (error**2).sum().reshape(1)]) / BATCH
    distributed.all_reduce(sums)
    return sums[:4], sums[4].item()


def record(restart, step, loss):
    with Path(os.environ["DEPLOYKIT_OUTPUT_DIR"], "steps.jsonl").open("a") as file:
        print(json.dumps({"restart": restart, "step": step, "loss": loss}), file=file)


def save(step, weights, speed):
    folder = Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
    torch.save([step, weights, speed], folder / "saving.tmp")
    (folder / "saving.tmp").replace(folder / f"step-{step:05d}.pt")


def resume():
    found = sorted(Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"]).glob("step-*.pt"))
    if not found:
        return 0, torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    print("resumed from", found[-1].name, flush=True)
    return torch.load(found[-1])


def leave(code):
    distributed.barrier()
    sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
