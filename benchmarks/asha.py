"""ASHA beside a whole grid on the reference trainer: steps that are trained, and the best loss.

    python benchmarks/asha.py [digits | text]... [--save FILE]

Nine learning rates with two optimizers on this machine, each sweep in two slots: the grid, ASHA,
and ASHA with promotions. Counts the steps in the metrics of all runs of a trial, of which each must
be there once. Prints JSON, and returns 1 when a target is missed: ASHA finds the same loss with at
most 40% of the steps, without and with promotions. `make bench-asha`; fifteen minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

TOP = Path(__file__).resolve().parent.parent
SHARE = 0.4
OPTIMIZERS = ["sgd", "adamw"]
RATES = ["0.0001", "0.0003", "0.001", "0.003", "0.01", "0.03", "0.1", "0.3", "1.0"]
SMALL = ["--layers", "1", "--width", "32", "--sequence", "64", "--heads", "2"]
TASKS = {
    "digits": (136, ["--epochs", "120"]),
    "text": (22, ["--task", "text", "--epochs", "12", "--batch-size", "64", *SMALL]),
}
"""The least steps of a trial, a tenth or less, and the arguments of the trainer."""
WAYS: dict[str, dict[str, object]] = {
    "grid": {},
    "asha": {"pruner": "asha"},
    "promote": {"pruner": "asha", "promote": True},
}
LETTERS = 100_000
"""Of Python's help topics, which the text trainer takes."""


def main() -> int:
    """Measure what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *TASKS], default=[])
    parser.add_argument("--save", type=Path, help="keep the figures, and take earlier ones from it")
    options = parser.parse_args()
    kept = options.save and options.save.exists()
    figures = json.loads(options.save.read_text()) if kept else {}
    for name in options.what or TASKS:
        found = {way: searched(name, keys) for way, keys in WAYS.items()}
        grid = found["grid"]
        shares = {way: one["steps"] / grid["steps"] for way, one in found.items()}
        same = all(one["loss"] == grid["loss"] for one in found.values())
        met = same and all(share <= SHARE for way, share in shares.items() if way != "grid")
        figures[name] = {**found, "share_of_steps": shares, "met": met}
        if options.save:
            options.save.write_text(json.dumps(figures))
    print(json.dumps(figures, indent=1))
    return 0 if all(one["met"] for one in figures.values()) else 1


def write(folder: Path, name: str, keys: dict[str, object]) -> None:
    """The job file, the sweep file, and the text that the text trainer takes."""
    least, arguments = TASKS[name]
    pages = "\n".join(page for _, page in sorted(topics.items()))
    (folder / "text").mkdir()
    (folder / "text" / "topics.txt").write_text(pages[:LETTERS])
    more = ["--log-every", "1", "--text", str(folder / "text")]
    job = {
        "name": name,
        "backend": "local",
        "source": str(TOP / "entrypoints"),
        "entrypoint": {"script": "train.py", "args": [*arguments, *more]},
        "resources": {"time_limit": "30m"},
        "env": {"OMP_NUM_THREADS": "1"},
    }
    sweep = {
        "parameters": {"optimizer": {"choice": OPTIMIZERS}, "lr": {"choice": RATES}},
        "objective": {"metric": "val_loss"},
        "sampler": "grid",
        "parallel": 2,
        "min_steps": least,
        **keys,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "sweep.yaml").write_text(json.dumps(sweep))


def searched(name: str, keys: dict[str, object]) -> dict[str, Any]:
    """One sweep over the learning rates and optimizers."""
    with tempfile.TemporaryDirectory(prefix="asha-") as text:
        folder = Path(text)
        write(folder, name, keys)
        command = [sys.executable, "-m", "deploykit", "sweep", "start", "--json"]
        env = {**os.environ, "DEPLOYKIT_HOME": str(folder / "state")}
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
        runs = [[one["run"] for one in trial["runs"]] for trial in found["trials"]]
        steps = [trained([folder / "state" / "runs" / run for run in each]) for each in runs]
    best = found["best"]
    return {
        "loss": best["value"],
        "parameters": best["parameters"],
        "trials": len(found["trials"]),
        "runs": sum(map(len, runs)),
        "steps_by_trial": steps,
        "steps": sum(steps),
    }


def trained(runs: Sequence[Path]) -> int:
    """How many steps the runs of a trial have trained, each of them once."""
    files = [run / "output" / "metrics.jsonl" for run in runs]
    texts = [file.read_text() for file in files if file.exists()]  # none where no step was left
    lines = [json.loads(line) for text in texts for line in text.splitlines()]
    steps = [line["step"] for line in lines if "loss" in line]
    if steps != list(range(1, len(steps) + 1)):
        sys.exit(f"{runs[0]}: not each step was trained once: {steps}")
    return len(steps)


if __name__ == "__main__":
    sys.exit(main())
