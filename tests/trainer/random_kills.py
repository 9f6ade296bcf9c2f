"""Kill a rank at random steps, repeatedly, and restart both ranks from their checkpoints.

    python -m tests.trainer.random_kills FOLDER KILLS

Every other kill waits for the next save. All waits are for steps and files, not for times, so that
the result does not depend on the speed of the machine. torch is imported once, and the ranks are
forked. Prints one JSON line per kill.
"""

import contextlib
import json
import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import sklearn.datasets  # noqa: F401 - once for all ranks
import torch.distributed.checkpoint  # noqa: F401 - the same

import train
from tests.trainer.ranks import free_port
from trainer.arguments import parse
from trainer.parallel import process_group

INTERVAL = 5
OPTIONS = ("--log-every", "1", "--checkpoint-steps", str(INTERVAL), "--no-tensorboard")
OPTIONS += ("--no-background-save",)  # a kill loses one interval at most
STARTED = "2 rank(s) on"


def main(folder, kills):
    moments = random.Random(0)
    train.OUTPUT_DIR, train.CHECKPOINT_DIR = folder / "output", folder / "checkpoints"
    for number in range(kills):
        log, began = folder / f"round-{number}.log", time.time()
        ranks = start(log)
        wait_for(lambda log=log: log.exists() and STARTED in log.read_text(), log)
        last = last_step() + moments.randint(0, 2 * INTERVAL)
        wait_for(lambda last=last: last_step() >= last, log)
        if number % 2:
            wait_for(lambda began=began: saving(began), log)
        os.kill(moments.choice(ranks), signal.SIGKILL)
        end(ranks)
        report({"logged": last_step(), "saving": saving(began), **resumed(log.read_text())})
    log = folder / "last.log"
    for rank in start(log, "--steps", str(last_step() + 1)):
        assert os.waitpid(rank, 0)[1] == 0, log.read_text()
    report({"logged": last_step(), **resumed(log.read_text())})


def report(result):
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()


def start(log, *more):
    """Fork two ranks; returns their process ids."""
    port = str(free_port())
    return [fork(rank, port, log, more) for rank in range(2)]


def fork(rank, port, log, more):
    child = os.fork()
    if child:
        return child
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=port,
    )
    with log.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    code = 1
    try:
        train.Trainer(
            parse(["--epochs", "100000", *OPTIONS, *more]), process_group.join(), []
        ).train()
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait_for(condition, log):
    for _ in range(60_000):
        if condition():
            return
        time.sleep(0.005)
    raise TimeoutError(log.read_text())


def saving(since):
    """Whether a save that started after `since` is in progress, or was interrupted."""
    with contextlib.suppress(FileNotFoundError):  # it has just finished
        return any(path.stat().st_mtime > since for path in train.CHECKPOINT_DIR.glob("*.saving"))
    return False


def end(ranks):
    """Kill the remaining ranks, as torchrun does, and wait for them."""
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)


def last_step():
    lines = (train.OUTPUT_DIR / "metrics.jsonl").read_text().split("\n")[:-1]
    return max((json.loads(line)["step"] for line in lines), default=0)


def resumed(log):
    """The step from which a round resumed, and the number of checkpoints that it skipped."""
    match = re.search(r"resumed from .* after (\d+) steps", log)
    return {"resumed": int(match[1]) if match else 0, "skipped": log.count("skipped checkpoint")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
