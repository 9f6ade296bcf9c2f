"""Predicted bytes beside those that torch allocates, counted on every rank of real processes.

`python -m tests.advise.counting` prints the table of figures.md.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

from deploykit.advise import ParallelConfig, Training, gpt
from deploykit.advise.memory import Activations, rank_memory, stages
from tests.ports import free_port

CHECKOUT = Path(__file__).resolve().parents[2]
COUNT = "tests.advise.count_bytes"
SHAPE = ("layers", "width", "heads", "vocabulary", "positions")
SMALL = {"layers": 4, "width": 64, "heads": 4, "vocabulary": 256, "positions": 40, "batch": 12}
WIDE = {"layers": 3, "width": 128, "heads": 8, "vocabulary": 512, "positions": 56, "batch": 8}
DEEP = {"layers": 6, "width": 96, "heads": 4, "vocabulary": 300, "positions": 40, "batch": 12}


def case(strategy, shape=SMALL, **more):
    return {"strategy": strategy, **shape, **more}


CASES = {
    1: [
        *(
            case("single", shape, precision=precision, checkpointing=checkpointing, micro_batches=2)
            for precision in ("fp32", "bf16", "pure-bf16")
            for checkpointing in (False, True)
            for shape in (SMALL, DEEP)
        ),
        case("single", WIDE, optimizer="sgd-momentum", micro_batches=2),
        case("single", WIDE, optimizer="sgd", precision="bf16", micro_batches=2),
    ],
    2: [
        case("ddp"),
        case("ddp", DEEP, precision="bf16"),
        case("ddp", WIDE, precision="bf16", checkpointing=True),
        case("zero1", WIDE),
        case("zero2"),
        case("zero3", DEEP),
        case("zero3", precision="bf16"),
        case("zero3", WIDE, checkpointing=True),
        case("tp", tensor=2),
        case("tp", WIDE, tensor=2, precision="bf16"),
        case("pp", pipeline=2, micro_batches=4),
        case("pp", WIDE, pipeline=2, micro_batches=4, precision="bf16"),
    ],
    4: [
        case("ddp", WIDE, optimizer="sgd-momentum"),
        case("zero1", DEEP),
        case("zero3", WIDE, precision="bf16"),
        case("hsdp"),
        case("tp", WIDE, tensor=4),
        case("pp", pipeline=4, micro_batches=6),
        case("tp-dp", WIDE, tensor=2),
        case("pp-dp", DEEP, pipeline=2, micro_batches=3),
        case("fsdp-tp", WIDE, tensor=2),
    ],
}


def named(world, each):
    """A case in words, for the names of tests and the table."""
    switches = ["checkpointing"] if each.get("checkpointing") else []
    words = [f"{each['strategy']} x {world}", each.get("precision", "fp32")]
    words += [each.get("optimizer", "adamw"), *switches, f"width {each['width']}"]
    return ", ".join(words)


ALL = {named(world, each): (world, each) for world in CASES for each in CASES[world]}


@functools.cache
def count(world):
    """What each case of `world` ranks allocates, the largest of its ranks."""
    place = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    argv = [sys.executable, "-W", "ignore", "-m", COUNT, json.dumps(CASES[world])]
    ranks = [
        subprocess.Popen(
            argv,
            cwd=CHECKOUT,
            env={**os.environ, **place, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        told = [rank.communicate(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world, told
    found = [json.loads(line) for line in told[0][0].splitlines()]
    return {named(world, each): line for each, line in zip(CASES[world], found, strict=True)}


def predict(world, each):
    """The same figures from the formulas."""
    model = gpt(**{name: each[name] for name in SHAPE})
    training = Training(
        each["batch"],
        each["positions"],
        precision=each.get("precision", "fp32"),
        optimizer=each.get("optimizer", "adamw"),
        on_cpu=True,
        loss_parallel=False,  # the counted program gathers the logits
    )
    tensor, pipeline = each.get("tensor", 1), each.get("pipeline", 1)
    data = world // (tensor * pipeline)
    shards = {"zero2": data, "zero3": data, "hsdp": data // 2, "fsdp-tp": data}
    config = ParallelConfig(
        each["strategy"],
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        shards=shards.get(each["strategy"], 1),
        micro_batches=each.get("micro_batches", 1),
        checkpointing=each.get("checkpointing", False),
    )
    ranks = [_rank(model, training, config, stage) for stage in stages(model, pipeline)]
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


def _rank(model, training, config, stage):
    memory = rank_memory(model, training, config, stage)
    buffers = dict(memory.buffers)
    kept = Activations(model, training, config).of_stage(stage.blocks, stage.index)
    return {
        "parameters": memory.parameters,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        # the loss keeps one tensor as large as the logits; what a block keeps when it is
        # recomputed, autograd's hooks do not see: the peak does
        "activations": kept + memory.logits // 3,
        "copies": buffers.get("16-bit copies of the weights", 0),
        "peak": memory.total - memory.parameters - memory.optimizer,
    }


def rows():
    """The table of figures.md: predicted over counted KiB, and the difference."""
    yield "| strategy x ranks | parameters | gradients | optimizer | activations | peak of a step |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, (world, each) in ALL.items():
        guess, found = predict(world, each), count(world)[name]
        parts = ("parameters", "gradients", "optimizer", "activations", "peak")
        cells = (_cell(guess[part], found[part]) for part in parts)
        yield f"| {name} | {' | '.join(cells)} |"


def _cell(guess, found):
    if not found:
        return "-" if guess else "0 / 0"
    return f"{guess / 1024:.0f} / {found / 1024:.0f} ({guess / found - 1:+.1%})"


if __name__ == "__main__":
    for row in rows():
        print(row, flush=True)  # noqa: T201 - a table to paste
