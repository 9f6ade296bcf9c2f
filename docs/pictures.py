"""Draw the pictures in docs/pictures/: `make docs`."""

# ruff: noqa: INP001

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import imports
import pipeline_schedule
from svg import Picture, Point

HERE = Path(__file__).resolve().parent


def pictures() -> dict[str, str]:
    """The text of each picture by its file's name."""
    drawn = {
        "submit.svg": submit(),
        "node-plane.svg": node_plane(),
        "strategies.svg": strategies(),
        "bubble.svg": bubble(),
        "imports.svg": imports.picture(),
    }
    return {name: str(picture) for name, picture in drawn.items()}


def main() -> None:
    """Write every picture."""
    for name, text in pictures().items():
        (HERE / "pictures" / name).write_text(text, encoding="utf-8")


def submit() -> Picture:
    """From the job file to the ranks."""
    picture = Picture((880, 372), "What happens between submit and the first training step")
    picture.rect((10, 10), (860, 204), "frame")
    picture.text((24, 32), "Where you type", "title")
    steps = [
        ("job.yaml", "and --set", "plain"),
        ("check", "all problems at once", "blue"),
        ("bundle", "source, named by its hash", "blue"),
        ("plan", "text; no network", "green"),
    ]
    for number, (title, text, style) in enumerate(steps):
        x = 24 + 216 * number
        picture.box((x, 46), (184, 54), (title, text), style)
        if number:
            picture.arrow((x - 32, 73), (x - 2, 73))
    picture.arrow((764, 100), (764, 142))
    picture.text((756, 126), "--dry-run stops here and prints it", "small end")
    last = [
        ("registry", "3. handle: slurm://prod/4242", "plain"),
        ("submit", "2. sends the plan as printed", "blue"),
        ("registry", "1. row with the run's id", "plain"),
    ]
    for number, (title, text, style) in enumerate(last):
        x = 240 + 216 * number
        picture.box((x, 144), (184, 54), (title, text), style)
        if number:
            picture.arrow((x, 171), (x - 30, 171))
    targets(picture)
    return picture


def targets(picture: Picture) -> None:
    """The lower half of the picture of a submit."""
    picture.rect((10, 250), (860, 112), "frame")
    picture.text((766, 270), "At the target", "title middle")
    backends = [
        ("local", "plan.sh, in the background"),
        ("slurm", "sbatch, here or over ssh"),
        ("sagemaker", "CreateTrainingJob; source in S3"),
    ]
    picture.line((534, 198), (534, 232))
    for number, (title, text) in enumerate(backends):
        x = 24 + 206 * number
        picture.box((x, 280), (196, 54), (title, text), "amber")
        picture.arrow((534, 232), (x + 98, 232), (x + 98, 278))
        picture.line((x + 98, 334), (x + 98, 350))
    picture.box((676, 280), (180, 54), ("launcher on each node", "starts the ranks"), "green")
    picture.arrow((122, 350), (766, 350), (766, 336))


def node_plane() -> Picture:
    """What runs on each node, and what it leaves."""
    picture = Picture((880, 388), "The processes on one node, and the files they leave")
    picture.rect((10, 10), (620, 368), "frame")
    picture.text((24, 32), "Each node", "title")
    picture.box((24, 48), (230, 44), ("backend", "sh, srun or SageMaker's launcher"), "amber")
    picture.arrow((139, 92), (139, 116))
    picture.rect((24, 118), (230, 164), "green")
    picture.text((139, 140), "launcher", "title middle")
    steps = [
        "which node of the job this is",
        "network interface to another node",
        "secrets, output, checkpoints",
        "preflight, if asked for",
        "forwards signals, waits for saves",
        "records how the node ended",
    ]
    for number, text in enumerate(steps):
        picture.text((42, 162 + 19 * number), f"{number + 1}. {text}", "small")
    picture.arrow((254, 200), (294, 200))
    picture.box((296, 172), (132, 56), ("torchrun", "own rendezvous"), "blue")
    for number, rank in enumerate(("rank 0", "rank 1", "rank N")):
        y = 70 + 102 * number
        picture.box((488, y), (128, 56), (rank, "your program"), "violet")
        picture.arrow((428, 200), (458, 200), (458, y + 28), (486, y + 28))
    picture.arrow((139, 310), (139, 284))
    picture.box((24, 312), (230, 54), ("SIGTERM, SIGUSR2", "time limit, preemption, cancel"))
    picture.line((254, 339), (552, 339), style="frame")
    picture.arrow((552, 339), (552, 332))
    picture.text((404, 358), "passed on to every rank", "small middle")
    run_folder(picture)
    return picture


def run_folder(picture: Picture) -> None:
    """The right part of the picture of a node."""
    picture.rect((660, 10), (210, 368), "frame")
    picture.text((674, 32), "Run folder", "title")
    files = [
        ("logs/node-0.log", "what the ranks printed"),
        ("exit_records/node-0.json", "exit record of the node"),
        ("exit_records/failed-0.0.json", "first rank that failed"),
        ("checkpoints/", "read again on a restart"),
        ("output/", "results"),
        ("debug/", "what NCCL and PyTorch wrote"),
    ]
    for number, (name, text) in enumerate(files):
        y = 62 + 54 * number
        picture.text((674, y), name, "code")
        picture.text((674, y + 17), text, "small")
    picture.arrow((616, 200), (658, 200))


Held = Callable[[int, int, int], bool]
"""Whether a rank holds, at rest, a slice of a layer: rank, layer, slice."""


def sharded(rank: int, _layer: int, part: int) -> bool:
    """Each rank holds the slice of its own number."""
    return rank == part


def strategies() -> Picture:
    """Which part of parameters and optimizer state each of four ranks holds."""
    panels: list[tuple[str, str, str, Held]] = [
        ("ddp", "a whole copy on every rank", "gradients", lambda *_: True),
        ("zero1", "a copy; optimizer state sharded", "gradients, new parameters", lambda *_: True),
        ("zero2, zero3", "every layer sharded", "whole layers, gradients", lambda r, _, s: r == s),
        ("hsdp", "sharded in a node, replicated", "the same", lambda r, _, s: s // 2 == r % 2),
        ("tp", "large layers split", "activations, in each layer", lambda r, _, s: r == s),
        ("pp", "consecutive layers", "activations, between stages", lambda r, row, _: r == row),
    ]
    picture = Picture((880, 432), "What each of four ranks holds under each strategy")
    for number, (name, holds, sends, held) in enumerate(panels):
        x, y = 10 + 292 * (number % 3), 10 + 200 * (number // 3)
        picture.rect((x, y), (276, 190))
        picture.text((x + 14, y + 24), name, "title")
        picture.text((x + 14, y + 42), holds, "small")
        color = "violet" if name in {"tp", "pp"} else "blue"
        for rank in range(4):
            at = (x + 14 + 64 * rank, y + 54)
            cells(picture, at, rank, (held, color))
            state(picture, at, rank, held if name not in {"zero1", "pp"} else sharded)
        picture.text((x + 14, y + 180), f"sends: {sends}", "small")
    legend(picture)
    return picture


def cells(picture: Picture, at: Point, rank: int, kind: tuple[Held, str]) -> None:
    """The four layers by four slices of one rank, filled where it holds them."""
    held, color = kind
    for layer in range(4):
        for part in range(4):
            style = color if held(rank, layer, part) else "empty"
            picture.rect((at[0] + 13 * part, at[1] + 17 * layer), (11, 14), style, radius=2)
    picture.text((at[0] + 25, at[1] + 102), f"rank {rank}", "small middle")


def state(picture: Picture, at: Point, rank: int, held: Held) -> None:
    """The optimizer state of one rank, below its cells."""
    for part in range(4):
        style = "amber" if held(rank, 0, part) else "empty"
        picture.rect((at[0] + 13 * part, at[1] + 74), (11, 9), style, radius=2)


def legend(picture: Picture) -> None:
    """What rows, columns and colors mean."""
    picture.text((14, 424), "Rows are layers, columns slices of them.", "small")
    words = [
        ("blue", "each rank has its own samples", 282),
        ("violet", "all ranks work on the same samples", 484),
        ("amber", "optimizer state", 716),
    ]
    for color, text, x in words:
        picture.rect((x, 413), (12, 12), color, radius=2)
        picture.text((x + 18, 424), text, "small")


COLOURS = {
    (True, False): ("blue", "forward"),
    (False, False): ("amber", "backward"),
    (True, True): ("green", "forward, second stage"),
    (False, True): ("violet", "backward, second stage"),
}
"""Colour and words of a pass, by forward or not, and second stage of its rank or not."""


def bubble() -> Picture:
    """One step of a pipeline of four ranks, by each schedule."""
    ranks, pieces = 4, 8
    picture = Picture((880, 452), "One training step of a pipeline on four ranks, by schedule")
    for number, name in enumerate(pipeline_schedule.SCHEDULES):
        schedule = pipeline_schedule.simulate(name, ranks, pieces)
        top = 14 + 142 * number
        picture.text((10, top + 12), name, "title")
        picture.text((870, top + 12), f"bubble: {schedule.bubble:.1%} of the step", "small end")
        for rank in range(ranks):
            picture.text((10, top + 38 + 26 * rank), f"rank {rank}", "small")
            picture.rect((60, top + 22 + 26 * rank), (810, 24), "empty", radius=2)
        for slot in schedule.slots:
            draw_slot(picture, slot, top + 22, 810 / schedule.length)
    for number, (style, text) in enumerate([*COLOURS.values(), ("empty", "bubble")]):
        picture.rect((60 + 170 * number, 434), (12, 12), style, radius=2)
        picture.text((78 + 170 * number, 445), text, "small")
    return picture


def draw_slot(picture: Picture, slot: pipeline_schedule.Slot, top: float, unit: float) -> None:
    """One pass of one micro-batch, with its number; `unit` is pixels for each unit of time."""
    x, width = 60 + slot.start * unit, slot.length * unit
    style, _ = COLOURS[slot.forward, slot.stage != slot.rank]
    picture.rect((x, top + 26 * slot.rank), (width, 24), style, radius=2)
    picture.text((x + width / 2, top + 26 * slot.rank + 16), str(slot.piece), "cell middle")


if __name__ == "__main__":
    main()
