"""Stacks by py-spy, which reads the memory of another process: no signal, no code in the program.

py-spy is one static program (https://github.com/benfred/py-spy, `pip install py-spy`). By default
it pauses the process for some milliseconds.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from deploykit_node.observe.stacks import Frame, NoStacks, Thread

_PATIENCE = 10.0
_PATIENCE_NATIVE = 60.0
"""Seconds; native stacks need the symbols of PyTorch's libraries, some hundred megabytes."""
_REFUSED = re.compile(r"EPERM|Permission [Dd]enied")
"""In what py-spy prints where the system refuses ptrace(2) or a file in /proc/PID."""
_UNPAUSABLE = "TtD"
"""States in which a process cannot be paused: stopped, traced, waiting for a file system."""


def program(given: str) -> str | None:
    """py-spy beside this Python, on PATH, or at the path `given`; None where there is none."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("py-spy", path=search) or (shutil.which(given) if given else None)


def take(spy: str, pid: int, state: str, *, native: bool = False) -> list[Thread]:
    """The stacks of a Python process, the main thread first. Raises NoStacks.

    `state` is the kernel's letter for it. `native` shows the calls of C and C++ too.
    """
    pause = state not in _UNPAUSABLE
    argv = [spy, "dump", "--json", "--pid", str(pid)]
    if native and pause:
        return _main_first(pid, _run([*argv, "--native"], _PATIENCE_NATIVE))
    try:
        return _main_first(pid, _run(argv if pause else [*argv, "--nonblocking"], _PATIENCE))
    except NoStacks:
        if not pause:
            raise
        return _main_first(pid, _run([*argv, "--nonblocking"], _PATIENCE))


def local_variables(spy: str, pid: int, function: str) -> dict[str, str]:
    """The local variables of a call of the main thread, as py-spy writes them. Raises NoStacks."""
    listed = _run([spy, "dump", "--json", "--locals", "--pid", str(pid)], _PATIENCE)
    for thread in sorted(listed, key=lambda one: one.get("os_thread_id") != pid):
        for frame in thread["frames"]:
            if frame["name"] == function:
                return {one["name"]: one["repr"] for one in frame.get("locals") or ()}
    raise NoStacks(f"py-spy: {function} is not running")


def _run(argv: list[str], patience: float) -> Any:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoStacks(f"py-spy did not answer within {patience:g} s") from None
    except OSError as error:
        raise NoStacks(f"py-spy cannot be started: {error.strerror}") from None
    try:
        return json.loads(done.stdout)
    except ValueError:
        raise NoStacks(_complaint(done.stderr.decode(errors="replace"))) from None


def _complaint(text: str) -> str:
    """What py-spy prints when it fails, as one line: the error and its last cause."""
    if _REFUSED.search(text):
        return (
            "py-spy may not read the program (kernel.yama.ptrace_scope, or a container without "
            "SYS_PTRACE)"
        )
    lines = [line.strip() for line in text.partition("Stack backtrace:")[0].splitlines()]
    lines = [line.removeprefix("Error: ") for line in lines if line and line != "Caused by:"]
    return f"py-spy: {': '.join(dict.fromkeys([*lines[:1], *lines[-1:]])) or 'no output'}"


def _main_first(pid: int, listed: Any) -> list[Thread]:
    threads = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
    if not threads:
        raise NoStacks("py-spy: the process runs no Python code")
    threads.sort(key=lambda one: one.get("os_thread_id") != pid)
    return [_thread(one) for one in threads]


def _thread(one: dict[str, Any]) -> Thread:
    name = one.get("thread_name") or f"thread {one.get('os_thread_id')}"
    return Thread(name=str(name), frames=[_frame(frame) for frame in one["frames"]])


def _frame(one: dict[str, Any]) -> Frame:
    line = one.get("line")
    line = line if isinstance(line, int) else 0
    return Frame(name=str(one["name"]), file=str(one["filename"]), line=line, source="")
