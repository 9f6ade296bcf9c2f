"""30 runs that stall and 30 healthy ones: whether each stall is found, at its rank and line.

    python benchmarks/stalls/measure.py [--at-once 4] [--only spins,epochs] [--minimum 5]

Each is a real run of two ranks on this machine. A stall counts as found if the kept stacks have the
stalled rank alone in a group, at a line of the function that stalls, and if it was found within
60 s of the limit. Prints a line for each run, then the figures.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from deploykit.observe import stacks

HERE = Path(__file__).resolve().parent
STALLS = (
    *("loads", "reads", "receives", "locks", "joins", "stops", "spins", "resolves", "connects"),
    *("gets", "waits", "retries", "flocks", "pipes", "naps"),
)
"""Kinds of stalls: functions of stalls.py, which the report must name by a line."""
HEALTHY = ("evaluation", "checkpoint", "compilation", "epochs", "downloads")
TIMES = (0.5, 0.8, 1.1, 1.4, 1.7, 2.0)
"""How long a healthy run is slow, in times of the shortest pause that is too long."""
PATIENCE = 300.0
LATEST = 60.0
"""Seconds after the adapted limit within which a stall must be found."""


class Outcome(NamedTuple):
    """One run: whether the rule was right, and what it said."""

    name: str
    right: bool
    text: str


class Runs:
    """Starts runs below a state folder of their own."""

    def __init__(self, state: Path, minimum: float) -> None:
        self._env = {**os.environ, "DEPLOYKIT_HOME": str(state), "CI": "true"}
        self.state, self.minimum = state, minimum

    def deploykit(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a verb."""
        argv = [sys.executable, "-m", "deploykit", *words]
        return subprocess.run(
            argv, env=self._env, cwd=HERE, capture_output=True, text=True, check=False
        )

    def start(self, script: str, name: str, *arguments: str) -> Path:
        """Submit a script; its run folder."""
        settings = (
            *("name=stalls", "resources.processes_per_node=2", f"entrypoint.script={script}"),
            f"env.DEPLOYKIT_STALL_SECONDS='{self.minimum:g}'",
        )
        own = [word for setting in settings for word in ("--set", setting)]
        base = ("submit", script, "--backend", "local", "--time-limit", "20m", "--run", name)
        done = self.deploykit(*base, *own, "--", *arguments)
        if done.returncode:
            sys.exit(done.stderr)
        return self.state / "runs" / name


def stalled(runs: Runs, kind: str, victim: int) -> Outcome:
    """Whether one stall is found at its rank and function."""
    name = f"{kind}-{victim}"
    folder = runs.start("stalls.py", name, kind, str(victim))
    record, end = folder / "exit_records/stall-0.json", time.monotonic() + PATIENCE
    while not record.exists() and time.monotonic() < end:
        time.sleep(0.5)
    outcome = Outcome(name, right=False, text="not found")
    if record.exists():
        outcome = _judged(runs, folder, name, json.loads(record.read_text()))
    runs.deploykit("cancel", name)
    for path in folder.glob("exit_records/process-*.json"):
        with contextlib.suppress(OSError, ValueError):  # it has ended just now
            os.kill(json.loads(path.read_text())["pid"], signal.SIGCONT)
    runs.deploykit("wait", name)
    return outcome


def _judged(runs: Runs, folder: Path, name: str, record: dict[str, float | str]) -> Outcome:
    kind, _, victim = name.partition("-")
    first = stacks.groups(stacks.read(folder / "stacks" / str(record["dump"])).ranks)
    limit = max(runs.minimum, 3 * float(record["longest"])) * (4 if kind == "spins" else 1)
    late = float(record["seconds"]) - limit
    text = f"{late:5.0f} s after the limit of {limit:.0f} s: {stacks.sentence(first)}"
    briefs = [one.place.brief for one in first if tuple(one.numbers) == (int(victim),)]
    at_victim = any(f"(stalls.py:{line})" in brief for brief in briefs for line in _lines(kind))
    return Outcome(name, at_victim and late <= LATEST, text)


def _lines(kind: str) -> range:
    """The lines of a function of stalls.py."""
    for node in ast.parse((HERE / "stalls.py").read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name == kind:
            return range(node.lineno, (node.end_lineno or node.lineno) + 1)
    raise ValueError(kind)


def healthy(runs: Runs, kind: str, times: float) -> Outcome:
    """Whether a run that is merely slow ends without an alarm."""
    name = f"{kind}-{times:g}".replace(".", "-")
    folder = runs.start("healthy.py", name, kind, f"{times * runs.minimum:g}")
    code = runs.deploykit("wait", name).returncode
    log = (folder / "logs/node-0.log").read_text()
    alarms = [line for line in log.splitlines() if "no progress for" in line]
    return Outcome(name, code == 0 and not alarms, "; ".join(alarms) or f"exit code {code}")


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--only", default="", help="kinds, separated by commas")
    parser.add_argument("--minimum", type=float, default=5.0, metavar="SECONDS")
    values = parser.parse_args()
    only = set(filter(None, values.only.split(",")))
    with tempfile.TemporaryDirectory() as state, ThreadPoolExecutor(values.at_once) as pool:
        runs = Runs(Path(state), values.minimum)
        tasks = [
            pool.submit(stalled, runs, kind, victim)
            for kind in STALLS
            for victim in (0, 1)
            if not only or kind in only
        ]
        tasks += [
            pool.submit(healthy, runs, kind, times)
            for kind in HEALTHY
            for times in TIMES
            if not only or kind in only
        ]
        outcomes = []
        for task in tasks:
            outcomes.append(task.result())
            one = outcomes[-1]
            print(f"{'right' if one.right else 'WRONG'}  {one.name:<16} {one.text}", flush=True)
    for title, kinds in (("stalls found", set(STALLS)), ("healthy without alarm", set(HEALTHY))):
        chosen = [one for one in outcomes if one.name.partition("-")[0] in kinds]
        if chosen:
            print(f"{title}: {sum(one.right for one in chosen)} of {len(chosen)}")


if __name__ == "__main__":
    main()
