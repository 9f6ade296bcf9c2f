"""Stacks by a signal: the program's own `faulthandler` writes them, where no tracer may attach.

`hook/sitecustomize.py` registers the signal when the program starts.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from deploykit_node.cluster import Environ
from deploykit_node.observe.stacks import Frame, NoStacks, Thread
from deploykit_node.signals import in_mask

_HOOK = Path(__file__).with_name("hook")
VARIABLES = ("DEPLOYKIT_STACK_FILE", "DEPLOYKIT_TRACE_FILE", "DEPLOYKIT_DEBUG_FILE")
"""Those that tell the hook what to do, each with the file for it."""
_PATIENCE = 5.0
"""Seconds for the program to write its stacks."""
_PAUSE = 0.01
_LONGEST = 1 << 22
"""Bytes that are read: 100 threads of 100 frames."""
_THREAD = re.compile(r"(?:Current t|T)hread 0x[0-9a-f]+[^\n]*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
"""How `faulthandler` writes what is not ASCII."""


def environment(env: Environ, folder: Path, rank: int) -> tuple[dict[str, str], Path]:
    """The variables of a program with the hook, and the file for its stacks in `folder`."""
    file = folder / f"rank-{rank}.stacks"
    file.unlink(missing_ok=True)
    return hooked(env, "DEPLOYKIT_STACK_FILE", file), file


def hooked(env: Environ, name: str, file: Path) -> dict[str, str]:
    """The variables of a program whose hook finds `file` in the variable `name`."""
    if any(other in env for other in VARIABLES):
        return {**env, name: str(file)}
    own = env.get("PYTHONPATH")
    added = {name: str(file), "PYTHONPATH": f"{_HOOK}{os.pathsep}{own}" if own else str(_HOOK)}
    if own is not None:
        added["DEPLOYKIT_PYTHONPATH"] = own
    return {**env, **added}


def take(pid: int, file: Path) -> list[Thread]:
    """The stacks of a process with the hook, the main thread first. Raises NoStacks."""
    if sys.platform != "linux":
        raise NoStacks("only Linux tells whether the program can write its stacks")
    _check_ready(pid, file)
    before, busy = file.stat().st_size, _threads_with(pid, "SigBlk")
    os.kill(pid, signal.SIGURG)
    end = time.monotonic() + _PATIENCE
    while _is_pending(pid) or _threads_with(pid, "SigBlk") - busy or file.stat().st_size == before:
        if time.monotonic() > end:
            raise NoStacks(f"the program did not write its stacks within {_PATIENCE:g} s")
        time.sleep(_PAUSE)
    with file.open("rb") as written:
        written.seek(before)
        text = written.read(_LONGEST).decode("ascii", "replace")
    return _main_first(list(parse(text)))


def parse(text: str) -> Iterator[Thread]:
    """The threads in what `faulthandler` wrote, in its order: the newest thread first."""
    blocks = _THREAD.split(text)[1:]
    for number, block in enumerate(blocks, 1):
        frames = [
            Frame(name=_decoded(name), file=_decoded(file), line=int(line), source="")
            for file, line, name in _FRAME.findall(block)
        ]
        yield Thread(name=f"thread {len(blocks) - number + 1}", frames=frames)


def _check_ready(pid: int, file: Path) -> None:
    """Raise NoStacks unless the signal has a handler and its file is still the program's."""
    ready = False
    try:
        descriptor = int(file.read_bytes().split(b"\n")[0])
        link = Path(f"/proc/{pid}/fd/{descriptor}")
        status = Path(f"/proc/{pid}/status")
        ready = link.samefile(file) and bool(in_mask(status, "SigCgt", signal.SIGURG))
    except PermissionError:
        raise NoStacks(
            "the program may have more rights than `dump`: the system hides its open files"
        ) from None
    except (OSError, ValueError):
        pass
    if not ready:
        raise NoStacks("the program has not started Python yet, or dropped the handler of SIGURG")


def _main_first(threads: list[Thread]) -> list[Thread]:
    """The main thread is the oldest one that no other thread has started."""
    started = [
        thread
        for thread in threads
        if thread["frames"] and thread["frames"][-1]["name"] == "_bootstrap"
    ]
    main = [thread for thread in threads if thread not in started][-1:] or threads[-1:]
    for thread in main:
        thread["name"] = "MainThread"
    return [*main, *(thread for thread in threads if thread not in main)]


def _is_pending(pid: int) -> bool:
    shared = in_mask(Path(f"/proc/{pid}/status"), "ShdPnd", signal.SIGURG)
    return bool(shared or _threads_with(pid, "SigPnd"))


def _threads_with(pid: int, mask: str) -> set[str]:
    """The threads in whose mask SIGURG is; it is blocked while its handler runs."""
    statuses = Path(f"/proc/{pid}/task").glob("*/status")
    return {status.parent.name for status in statuses if in_mask(status, mask, signal.SIGURG)}


def _decoded(text: str) -> str:
    return _ESCAPE.sub(lambda code: chr(int(code[1] or code[2] or code[3], 16)), text)
