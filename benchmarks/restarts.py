"""Hours that a cluster loses to failures, by the policy of restarts: a simulation.

Failures: the 419 unexpected interruptions of 54 days of pre-training Llama 3 405B on 16,384 GPUs,
by component (The Llama 3 Herd of Models, 2024, table 5, https://arxiv.org/abs/2407.21783). They
come as a Poisson process. The decisions are those of `deploykit_node.restart.decision`.

The paper does not say how often a retry would have failed again, so this is assumed, and printed
for several shares: a share of the 54 software bugs is deterministic, and returns until a person has
mended it. A GPU, a NIC or a host that is not avoided fails again with a certain probability; by
cause, it is assumed to be found and avoided each time. The times are assumptions too: `TIMES`.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "entrypoints"))

from deploykit_node.restart import decision
from deploykit_node.restart.failure import TRANSIENT, UNKNOWN, Failure

GPUS, DAYS = 16_384, 54
MACHINE, BUG, PASSING = "machine", "bug", "passing"
INTERRUPTIONS = {
    MACHINE: {
        "faulty GPU": 148,
        "GPU HBM3 memory": 72,
        "GPU SRAM memory": 19,
        "GPU system processor": 17,
        "NIC": 7,
        "silent data corruption": 6,
        "GPU thermal interface and sensor": 6,
        "SSD": 3,
        "power supply": 3,
        "server chassis": 2,
        "IO expansion board": 2,
        "CPU": 2,
        "system memory": 2,
    },
    BUG: {"software bug": 54, "dependency": 2},
    PASSING: {"network switch or cable": 35, "host maintenance": 32, "NCCL watchdog timeout": 7},
}
TIMES = {
    "start": 10 / 60,  # from the requeue to the first step
    "lost": 15 / 60,  # half of the time between two checkpoints
    "again": 5 / 60,  # from the first step until a deterministic failure returns
    "person": 1.0,  # until someone notices that the job has stopped and restarts it
    "mend": 1.0,  # more, to find and mend a bug
}
"""Hours."""
MOST = 10
"""Restarts in a row that `always` may use up."""
SEEDS = 200


class Assumed(NamedTuple):
    """The share of software bugs that are deterministic, and how often a bad machine fails anew."""

    deterministic: float
    bad_again: float


class Event(NamedTuple):
    """A failure: its kind, and whether it returns until a person has mended it."""

    kind: str
    returns: bool


Policy = Callable[[Event, Assumed, random.Random], float]
"""The hours that a failure costs."""


def never(event: Event, _assumed: Assumed, _random: random.Random) -> float:
    """Each failure waits for a person, who avoids the machine and mends the bug."""
    return TIMES["lost"] + TIMES["person"] + TIMES["mend"] * event.returns + TIMES["start"]


def always(event: Event, assumed: Assumed, random: random.Random) -> float:
    """The job is started again on the same machines, at most `MOST` times in a row."""
    hours, count = TIMES["lost"] + TIMES["start"], 1
    while count < MOST and (
        event.returns or (event.kind == MACHINE and random.random() < assumed.bad_again)
    ):
        hours, count = hours + TIMES["again"] + TIMES["start"], count + 1
    if event.returns or count == MOST:
        hours += TIMES["again"] + TIMES["person"] + TIMES["mend"] * event.returns + TIMES["start"]
    return hours


def by_cause(event: Event, _assumed: Assumed, _random: random.Random) -> float:
    """As deploykit decides; a bad machine is avoided, and a bug is of unknown kind at first."""
    found = (
        Failure(retry=UNKNOWN, root="bug") if event.returns else Failure(retry=TRANSIENT, root="x")
    )
    hours, earlier = TIMES["lost"], []
    while (decided := decision.decide(found, "", earlier)).restart:
        hours += decided.wait / 3600 + TIMES["start"]
        if not event.returns:
            return hours
        hours += TIMES["again"]
        earlier.append({"root": found.root, "step": None, "steps": False, "saved": ""})
    return hours + TIMES["person"] + TIMES["mend"] + TIMES["start"]


def simulate(policy: Policy, assumed: Assumed, seed: int) -> float:
    """The hours that the whole cluster loses in all."""
    chance = random.Random(seed)
    total = 0.0
    for kind, counts in INTERRUPTIONS.items():
        expected, arrived = sum(counts.values()), 0
        clock = chance.expovariate(expected)
        while clock < 1:
            arrived, clock = arrived + 1, clock + chance.expovariate(expected)
        for _ in range(arrived):
            returns = kind == BUG and chance.random() < assumed.deterministic
            total += policy(Event(kind, returns), assumed, chance)
    return total


def main() -> None:
    """Print the hours lost by policy, for several assumptions."""
    count = sum(sum(counts.values()) for counts in INTERRUPTIONS.values())
    print(f"{count} interruptions in {DAYS} days on {GPUS:,} GPUs; assumed hours: {TIMES}")
    print("deterministic bugs | bad machine again | hours lost: never, always, cause | saved")
    for deterministic in (0.1, 0.5, 1.0):
        for bad_again in (0.0, 0.3, 0.6):
            assumed = Assumed(deterministic, bad_again)
            medians = [
                statistics.median(simulate(policy, assumed, seed) for seed in range(SEEDS))
                for policy in (never, always, by_cause)
            ]
            saved = medians[1] - medians[2]
            hours = ", ".join(f"{hours:.0f}" for hours in medians)
            share = 100 * saved / medians[1]
            gpu_hours = f"{saved * GPUS / 1e6:.2f} million GPU hours"
            print(
                f"{deterministic:18.0%} | {bad_again:17.0%} | {hours:>32} | "
                f"{saved:.0f} h of `always` ({share:.0f}%), {gpu_hours}"
            )


if __name__ == "__main__":
    main()
