"""A program in the place of ``nsys profile``, which needs NVIDIA's driver.

It refuses what the real one does not know, and keeps to what is documented of the options that it
takes. Its report is a JSON text. It ends with code 0 whatever its program's is, and drops its
report at SIGTERM: what a launcher must not count on.
https://docs.nvidia.com/nsight-systems/UserGuide/index.html#cli-profile-command-switch-options
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

VALUES = {
    "--capture-range": {"none", "cudaProfilerApi", "nvtx", "hotkey"},
    "--capture-range-end": {"none", "stop", "stop-shutdown"},
    "--cpuctxsw": {"process-tree", "system-wide", "none"},
    "--force-overwrite": {"true", "false"},
    "--kill": {"none", "sigkill", "sigterm"},
    "--sample": {"process-tree", "system-wide", "none"},
    "--wait": {"primary", "all"},
}
TRACES = {"cuda", "nvtx", "osrt", "cudnn", "cublas", "opengl", "mpi", "none"}
RANGE = "NSYS_STAND_IN_RANGE"
"""Variable of the folder in which files ``begin-PID`` and ``end-PID`` are the calls of CUDA's."""
WRITES = 0.7
"""Seconds to write a report, in which the program has ended."""


def install(folder, *, refuse=""):
    """Put ``nsys`` into a folder for PATH; one that refuses everything tells why."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "nsys"
    run = f"exec '{sys.executable}' '{__file__}' \"$@\""
    program.write_text(f"#!/bin/sh\n{f'echo {refuse!r} >&2; exit 1' if refuse else run}\n")
    program.chmod(0o755)
    return folder


def options_of(argv):
    """The options of ``profile``, and the program with its arguments."""
    if argv[:1] != ["profile"]:
        sys.exit(f"unknown command {argv[:1]}")
    count = next(number for number, word in enumerate([*argv[1:], ""]) if word[:2] != "--")
    given = dict(word.split("=", 1) for word in argv[1 : count + 1])
    for name, value in given.items():
        traces = name == "--trace" and TRACES.issuperset(value.split(","))
        if not (name == "--output" or traces or value in VALUES.get(name, ())):
            sys.exit(f"unrecognised option {name}={value}")
    return given, argv[count + 1 :]


def dropped(*_):
    """Say that a signal came, and end without a report."""
    os.write(1, b"nsys: the report is dropped\n")
    os._exit(1)


def main(argv):
    """Run the program, and write the report."""
    given, program = options_of(argv)
    signal.signal(signal.SIGTERM, dropped)
    child = subprocess.Popen(program)
    begun, ended = "--capture-range" not in given, False
    while child.poll() is None and not ended:
        time.sleep(0.05)
        if not begun or "--capture-range" in given:
            calls = Path(os.environ.get(RANGE) or "/nowhere")
            begun, ended = any(calls.glob("begin-*")), any(calls.glob("end-*"))
    if begun:
        time.sleep(WRITES)
        file = Path(given["--output"].replace("%%", "%") + ".nsys-rep")
        file.write_text(json.dumps({"options": given, "program_ended": child.returncode}))
        os.write(1, f"Generated:\n    {file}\n".encode())


if __name__ == "__main__":
    main(sys.argv[1:])
