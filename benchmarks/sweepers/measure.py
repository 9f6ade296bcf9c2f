"""A sweep of 40 uneven trials beside Ray Tune and Hydra's Optuna sweeper: idle slots, CPU time.

    python benchmarks/sweepers/measure.py [deploykit | ray | hydra]... [--save FILE]

Each sweeps over the same objective (`objective.py`, which sleeps) on this machine, in four slots;
Ray Tune and Hydra are in `.venv-sweepers`. `make bench-sweepers` makes that and runs this, in six
minutes. Prints JSON, and returns 1 when a target is missed. CPU time is that of the whole machine,
less what it uses when nothing is measured: it is right on a quiet machine only. The objective needs
next to none, so it is that of the sweeper and of whatever starts the trials.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from objective import TRIALS, seconds

HERE = Path(__file__).resolve().parent
TOP = HERE.parents[1]
PEERS = ["env", f"PYTHONPATH={HERE}", str(TOP / ".venv-sweepers" / "bin" / "python")]
SLOTS = 4
IDLE, SHARE_OF_RAY = 0.05, 1 / 3
"""The targets: idle slots, and CPU time of a trial beside Ray Tune's, at most."""
QUIET = 5.0
"""Seconds for which the machine is measured alone."""


def main() -> int:
    """Measure what the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="*", choices=[[], *COMMANDS], default=[])
    parser.add_argument("--save", type=Path, help="keep the figures, and take earlier ones from it")
    options = parser.parse_args()
    kept = options.save and options.save.exists()
    figures = json.loads(options.save.read_text()) if kept else {}
    for name in options.what or COMMANDS:
        with tempfile.TemporaryDirectory(prefix="sweepers-") as folder:
            figures[name] = measure(COMMANDS[name], Path(folder))
    text = json.dumps(figures, indent=1)
    print(text)
    if options.save:
        options.save.write_text(text)
    return 0 if all(met(figures)) else 1


def met(figures: dict[str, dict[str, float]]) -> list[bool]:
    """Whether each target is met, as far as it was measured."""
    ours, ray = figures.get("deploykit"), figures.get("ray")
    found = [ours["idle_slots"] <= IDLE] if ours else []
    if ours and ray:
        found.append(ours["cpu_s_per_trial"] <= SHARE_OF_RAY * ray["cpu_s_per_trial"])
    return found


def measure(command: Callable[[Path, Path], list[str]], folder: Path) -> dict[str, float]:
    """One sweep by one sweeper."""
    log = folder / "log.jsonl"
    argv = command(folder, log)
    before = machine_cpu()
    time.sleep(QUIET)
    per_second = (machine_cpu() - before) / QUIET
    before, began = machine_cpu(), time.time()
    env = {**os.environ, "DEPLOYKIT_HOME": str(folder / "state")}
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    ended, used = time.time(), machine_cpu() - before
    trials = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    if done.returncode or sorted(one["index"] for one in trials) != list(range(TRIALS)):
        sys.exit(f"{argv[0]}: not each of {TRIALS} trials ran once\n{done.stderr}{done.stdout}")
    return {
        "seconds": ended - began,
        "least_seconds": sum(map(seconds, range(TRIALS))) / SLOTS,
        "idle_slots": idle(trials),
        "cpu_s_per_trial": (used - per_second * (ended - began)) / TRIALS,
        "cpu_s_of_machine_alone_per_s": per_second,
    }


def idle(trials: list[dict[str, float]]) -> float:
    """The share of the slots' time without a trial, as long as a trial was still to begin."""
    begin, end = min(one["began"] for one in trials), max(one["began"] for one in trials)
    busy = sum(min(one["ended"], end) - one["began"] for one in trials)
    return 1 - busy / (SLOTS * (end - begin))


def machine_cpu() -> float:
    """Seconds that all processors of this machine have worked."""
    user, nice, system, *_ = Path("/proc/stat").read_text().split()[1:]
    return (int(user) + int(nice) + int(system)) / os.sysconf("SC_CLK_TCK")


def deploykit(folder: Path, log: Path) -> list[str]:
    """Our sweep, with processes of this machine."""
    (folder / "objective.py").write_text((HERE / "objective.py").read_text())
    job = {
        "name": "uneven",
        "backend": "local",
        "entrypoint": {"script": "objective.py", "args": ["--log", str(log)]},
        "resources": {"time_limit": "5m"},
    }
    sweep = {
        "parameters": {"index": {"choice": [str(index) for index in range(TRIALS)]}},
        "objective": {"metric": "loss"},
        "sampler": "grid",
        "parallel": SLOTS,
    }
    (folder / "job.yaml").write_text(json.dumps(job))
    (folder / "sweep.yaml").write_text(json.dumps(sweep))
    return [sys.executable, "-m", "deploykit", "sweep", "start"]


def ray(_: Path, log: Path) -> list[str]:
    """Ray Tune, with a runtime of Ray of its own."""
    return [*PEERS, str(HERE / "ray_tune.py"), str(log), str(SLOTS)]


def hydra(folder: Path, log: Path) -> list[str]:
    """Hydra's Optuna sweeper with the submitit launcher, with processes of this machine."""
    return [
        *(*PEERS, str(HERE / "hydra_app.py"), "--multirun"),
        *("hydra/sweeper=optuna", "hydra/sweeper/sampler=grid", "hydra/launcher=submitit_local"),
        *(f"hydra.sweeper.n_jobs={SLOTS}", f"hydra.sweeper.n_trials={TRIALS}"),
        f"hydra.sweep.dir={folder}/hydra",
        f"+log={log}",
        f"+index=choice({','.join(map(str, range(TRIALS)))})",
    ]


COMMANDS = {"deploykit": deploykit, "ray": ray, "hydra": hydra}

if __name__ == "__main__":
    sys.exit(main())
