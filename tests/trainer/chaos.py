"""Kill a rank at random steps, again and again, and start both again from their checkpoints.

Every other time it is killed in the next save. So nothing depends on how fast the machine is.

    python chaos.py FOLDER KILLS

torch is imported once; the ranks are forked. Prints one JSON line for each kill.
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

import sklearn.datasets  # noqa: F401 - imported once for all ranks
import torch.distributed.checkpoint  # noqa: F401 - the same
from ranks import free_port

import train
from trainer import group
from trainer.options import parse

INTERVAL = 5
OPTIONS = ("--log-every", "1", "--checkpoint-steps", str(INTERVAL), "--no-tensorboard")
BEGUN = "2 rank(s) on"


def main(folder, kills):
    moments = random.Random(0)
    train.OUTPUT, train.CHECKPOINTS = folder / "output", folder / "checkpoints"
    for number in range(kills):
        log, began = folder / f"round-{number}.log", time.time()
        ranks = start(log)
        wait_for(lambda log=log: log.exists() and BEGUN in log.read_text(), log)
        last = last_step() + moments.randint(0, 2 * INTERVAL)
        wait_for(lambda last=last: last_step() >= last, log)
        if number % 2:
            wait_for(lambda began=began: saving(began), log)
        os.kill(moments.choice(ranks), signal.SIGKILL)
        end(ranks)
        tell({"logged": last_step(), "saving": saving(began), **resumed(log.read_text())})
    log = folder / "last.log"
    for rank in start(log, "--steps", str(last_step() + 1)):
        assert os.waitpid(rank, 0)[1] == 0, log.read_text()
    tell({"logged": last_step(), **resumed(log.read_text())})


def tell(facts):
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def start(log, *more):
    """Two ranks as children; their process ids."""
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
        train.Run(parse(["--epochs", "100000", *OPTIONS, *more]), group.join(), []).train()
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
    """Whether a save is at work, or was when it was killed, and not before the time `since`."""
    with contextlib.suppress(FileNotFoundError):  # it has just ended
        return any(path.stat().st_mtime > since for path in train.CHECKPOINTS.glob("*.saving"))
    return False


def end(ranks):
    """Kill what is left, as torchrun does, and see both gone."""
    for rank in ranks:
        os.kill(rank, signal.SIGKILL)
        os.waitpid(rank, 0)


def last_step():
    lines = (train.OUTPUT / "metrics.jsonl").read_text().split("\n")[:-1]
    return max((json.loads(line)["step"] for line in lines), default=0)


def resumed(log):
    """From which step a round went on, and what it said of broken checkpoints."""
    found = re.search(r"resumed from .*, (\d+) steps done", log)
    return {"resumed": int(found[1]) if found else 0, "broken": log.count("is not whole")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
