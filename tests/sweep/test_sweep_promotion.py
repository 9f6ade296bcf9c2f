"""`promote: true`: trials pause at their rung, and resume their checkpoints when they go on."""

from __future__ import annotations

import json

import pytest

from deploykit import paths

STEPS = 27
TRAIN = f"""\
import json, os, sys, time
from pathlib import Path

_, _, number, *again = Path.cwd().parent.name.split("-")[-3:] if False else ["", "", *Path.cwd().parent.name.split("-")[1:]]
journal = Path.cwd().parents[2] / "sweeps/s/journal.log"
trained = Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"], "trained")


def rung():
    known = 0
    for line in journal.read_text().splitlines(keepends=True):
        if line.endswith("\\n"):
            record = json.loads(line)
            if record.get("trial_id") == int(number):
                known = record.get("user_attr", {{}}).get("rung", known)
    return known


lr = float(sys.argv[2])
for step in range(trained.exists() and len(trained.read_text().split()) + 1 or 1, {STEPS} + 1):
    with trained.open("a") as file:
        file.write(f"{{step}}\\n")
    print(f"step {{step}}/{STEPS} loss={{(lr - 0.03) ** 2 + 1 / step:.9f}}", flush=True)
    while step in (1, 3, 9) and (may := rung()) is not None and step >= 3**may:
        time.sleep(0.02)
"""
"""Appends each step that it trains to its only checkpoint, and waits at a rung for its end."""
RATES = ["0.01", "0.02", "0.03", "0.04", "0.05", "0.06", "0.07", "0.08", "0.09"]


@pytest.fixture
def halving(write, toy):
    (toy / "train.py").write_text(TRAIN)
    keys = {"sampler": "grid", "trials": 9, "pruner": "asha", "promote": "true"}
    write(**keys, parameters=json.dumps({"lr": {"choice": RATES}}))


def trained():
    """The steps that each trial has trained, in order, by its number."""
    steps = {}
    for path in paths.state().glob("runs/s-*/checkpoints/trained"):
        steps.setdefault(int(path.parts[-3].split("-")[1]), []).extend(path.read_text().split())
    return {number: [int(step) for step in several] for number, several in steps.items()}


def test_promotions_resume_and_train_no_step_twice(halving, sweep):
    found = sweep("start", "--json", "--sweep", "s")
    steps = trained()
    print(steps, found["counts"], sweep.notes)
    assert all(several == list(range(1, len(several) + 1)) for several in steps.values())
