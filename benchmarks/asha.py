"""ASHA beside a whole grid on the reference trainer: steps that are trained, and the best loss.

    python benchmarks/asha.py [digits | text]... [--save FILE]

Nine learning rates with two optimizers on this machine, each sweep in two slots. Counts the steps
in the metrics of every run, of which each must be there once. Prints JSON, and returns 1 when a
target is missed: ASHA finds the same loss with at most 40% of the steps. `make bench-asha`; ten
minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

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
        grid, asha = (searched(name, pruner) for pruner in ("none", "asha"))
        share = asha["steps"] / grid["steps"]
        met = share <= SHARE and asha["loss"] == grid["loss"]
        figures[name] = {"grid": grid, "asha": asha, "share_of_steps": share, "met": met}
        if options.save:
            options.save.write_text(json.dumps(figures))
    print(json.dumps(figures, indent=1))
    return 0 if all(one["met"] for one in figures.values()) else 1


def write(folder: Path, name: str, pruner: str) -> None:
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
        "pruner": pruner,
        "min_steps": least,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "sweep.yaml").write_text(json.dumps(sweep))


def searched(name: str, pruner: str) -> dict[str, object]:
    """One sweep over the learning rates and optimizers."""
    with tempfile.TemporaryDirectory(prefix="asha-") as text:
        folder = Path(text)
        write(folder, name, pruner)
        command = [sys.executable, "-m", "deploykit", "sweep", "start", "--json"]
        env = {**os.environ, "DEPLOYKIT_HOME": str(folder / "state")}
        done = subprocess.run(command, cwd=folder, env=env, stdout=subprocess.PIPE, check=True)
        found = json.loads(done.stdout)
        runs = [one["run"] for trial in found["trials"] for one in trial["runs"]]
        steps = [trained(folder / "state" / "runs" / run) for run in runs]
    best = found["best"]
    return {
        "loss": best["value"],
        "parameters": best["parameters"],
        "trials": len(found["trials"]),
        "runs": len(runs),
        "steps_by_run": steps,
        "steps": sum(steps),
    }


def trained(run: Path) -> int:
    """How many steps a run has trained, each of them once."""
    lines = map(json.loads, (run / "output" / "metrics.jsonl").read_text().splitlines())
    steps = [line["step"] for line in lines if "loss" in line]
    if steps != list(range(1, len(steps) + 1)):
        sys.exit(f"{run}: not each step was trained once")
    return len(steps)


if __name__ == "__main__":
    sys.exit(main())
