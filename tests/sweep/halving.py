"""A script that keeps each step that it trains, and trains no further than its rung."""

from __future__ import annotations

from deploykit.lib import paths

STEPS = 27
TRAIN = f"""\
import json, os, sys, time
from pathlib import Path

folder = Path.cwd().parent
journal = folder.parents[1] / "sweeps/s/journal.log"
trained = Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"], "trained")


def rung():
    known = 0
    for line in journal.read_text().splitlines(keepends=True):
        record = json.loads(line) if line.endswith("\\n") else {{}}
        if record.get("trial_id") == int(folder.name.split("-")[1]):
            known = record.get("user_attr", {{}}).get("rung", known)
    return known


lr = float(sys.argv[2])
done = len(trained.read_text().split()) if trained.exists() and "FORGETS" not in os.environ else 0
for step in range(done + 1, {STEPS} + 1):
    with trained.open("a") as file:
        file.write(f"{{step}}\\n")
    print(f"step {{step}}/{STEPS} loss={{(lr - 0.03) ** 2 + 1 / step:.9f}}", flush=True)
    while step in (1, 3, 9) and (may := rung()) is not None and step >= 3**may:
        time.sleep(0.02)
    if step == 10 and os.environ.get("FAILS") == sys.argv[2]:
        raise ValueError
    while step == 4 and (folder.parent / "hold").exists():
        time.sleep(0.02)
"""
"""Appends each step that it trains to its only checkpoint, and waits at a rung for its end."""
RATES = ["0.01", "0.02", "0.03", "0.04", "0.05", "0.06", "0.07", "0.08", "0.09"]


def trained():
    """The steps that each trial has trained, in order, by its number."""
    steps = {}
    for path in paths.state().glob("runs/s-*/checkpoints/trained"):
        steps.setdefault(int(path.parts[-3].split("-")[1]), []).extend(path.read_text().split())
    return {number: [int(step) for step in several] for number, several in steps.items()}


def counts(found):
    """How many steps each trial has trained, each once, by its learning rate."""
    for number, steps in trained().items():
        assert steps == list(range(1, len(steps) + 1)), number
    rates = {one["trial"]: one["parameters"]["lr"] for one in found["trials"]}
    return {rates[number]: len(steps) for number, steps in trained().items()}


LENGTHS = dict.fromkeys(RATES, 1) | {"0.02": 3, "0.03": 27, "0.04": 3}
