"""Seconds that records, the stall watch and `notify` add to the launcher's start and end.

    python benchmarks/launch_overhead.py [--turns 10] [--torchrun] [--beside FOLDER]

A program that does nothing, and one that fails, run on this machine by the launcher, in turns: bare
(without a run folder, so without records, stall watch and messages), with a run folder, and with
`notify` to a web server here. `--beside` adds the launcher in FOLDER, such as an earlier one:

    git archive COMMIT entrypoints | tar -x -C FOLDER

Each number is the median of the differences of one turn, in CPU time of the launcher and the
processes that have ended before it, and in real time, which counts on an idle machine only. The
program that sends a message is not waited for. Returns 1 if all together adds more than 0.2 s of
CPU time.
"""

from __future__ import annotations

import argparse
import http.server
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

TARGET = 0.2
_TOP = Path(__file__).resolve().parent.parent
_PROGRAMS = {"succeeds": ("pass", 0), "fails": ("raise ValueError('no')", 1)}
_EVENTS = ("started", "failed", "succeeded", "stalled", "preempted", "cap")


class Took(NamedTuple):
    cpu: float
    real: float


class Variant(NamedTuple):
    top: Path
    """The folder of ``entrypoints``."""
    options: tuple[str, ...]
    has_folder: bool = True
    env: Mapping[str, str] = {}


class _Receiver(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.received += 1  # type: ignore[attr-defined]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--turns", type=int, default=10, metavar="N", help="default: 10")
    parser.add_argument("--torchrun", action="store_true", help="instead of a plain program")
    parser.add_argument("--beside", type=Path, metavar="FOLDER", help="with other entrypoints/")
    options = parser.parse_args(argv)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Receiver)
    server.received = 0  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    notify = {"to": [f"http://127.0.0.1:{server.server_port}/"], "events": _EVENTS}
    words = ("python", "--nnodes=1", "--")
    if options.torchrun:
        words = ("torchrun", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=0", "--")
    variants = {
        "bare": Variant(_TOP, words, has_folder=False),
        "run folder": Variant(_TOP, words),
        "and notify": Variant(_TOP, words, env={"DEPLOYKIT_NOTIFY": json.dumps(notify)}),
    }
    if options.beside:
        variants["beside"] = Variant(options.beside, words)
    most = 0.0
    for how, (program, code) in _PROGRAMS.items():
        turns = []
        for number in range(options.turns + 1):
            with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
                Path(folder, "train.py").write_text(program)
                took = {
                    name: _took(Path(folder), name, variant, code)
                    for name, variant in variants.items()
                }
            turns += [took] if number else []  # the first one compiles and fills the page cache
        for name in variants:
            added = _added(turns, "bare", name)
            most = max(most, added.cpu if name == "and notify" else 0.0)
            own = statistics.median(took[name].cpu for took in turns)
            print(
                f"{how:9} {name:11} {own:6.3f} s of CPU, added to bare: {added.cpu:+.3f} s of CPU, "
                f"{added.real:+.3f} s of real time"
            )
        if options.beside:
            added = _added(turns, "beside", "and notify")
            print(f"{how:9} beside the other launcher: {added.cpu:+.3f} s of CPU")
    print(f"{server.received} messages arrived")  # type: ignore[attr-defined]
    print(f"added at most {most:.3f} s of CPU (target: {TARGET:g} s)")
    server.shutdown()
    return int(most > TARGET)


def _added(turns: list[dict[str, Took]], before: str, after: str) -> Took:
    """The median of the differences within each turn."""
    pairs = [(took[before], took[after]) for took in turns]
    return Took(*(statistics.median(late[n] - early[n] for early, late in pairs) for n in (0, 1)))


def _took(folder: Path, name: str, variant: Variant, code: int) -> Took:
    """Run the launcher of a variant once."""
    env = {"PATH": os.environ["PATH"], **variant.env}
    if variant.has_folder:
        run = folder / name
        run.mkdir()
        env |= {"DEPLOYKIT_RUN_DIR": str(run), "DEPLOYKIT_RUN": "one"}
    launch = str(variant.top / "entrypoints" / "launch.py")
    argv = [sys.executable, launch, *variant.options, "train.py"]
    begun = time.monotonic()
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(argv, cwd=folder, env=env, stdout=log, stderr=log)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != code:
        sys.exit(f"exit code {process.returncode}:\n{(folder / f'{name}.log').read_text()}")
    return Took(usage.ru_utime + usage.ru_stime, time.monotonic() - begun)


if __name__ == "__main__":
    sys.exit(main())
