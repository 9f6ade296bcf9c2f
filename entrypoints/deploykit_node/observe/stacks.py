"""The stacks of all ranks of this node, written into the run folder.

    launch.py --dump-stacks RUN_FOLDER FOLDER [--native] [--py-spy PATH] [--ras]

`FOLDER` is a folder in ``stacks/`` of the run folder; the file there has this node's name. With
`--ras`, NCCL's own report follows in a second one.

py-spy reads the memory of another process: no signal, no code in the program. It is one static
program (https://github.com/benfred/py-spy, `pip install py-spy`), which by default pauses the
process for some milliseconds. Where it is missing or may not attach, the program's own
`faulthandler` writes the stacks, by the signal that `hook/sitecustomize.py` has registered.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypedDict

from deploykit_node import cluster, records
from deploykit_node.cluster import Environ
from deploykit_node.log import now
from deploykit_node.observe import processes, ras
from deploykit_node.records import ProcessRecord
from deploykit_node.signals import in_mask

_AT_ONCE = 8
"""Ranks whose stacks are taken at the same time."""
_LARGEST = 1 << 21
"""Bytes of a source file that is read for its lines."""
_LONGEST_LINE = 160
"""Characters of a source line."""
_FRAMES = _THREADS = 200
"""Most frames of a thread, and threads of a process, that are kept."""
_PATIENCE_SPY, _PATIENCE_NATIVE = 10.0, 60.0
"""Seconds; native stacks need the symbols of PyTorch's libraries, some hundred megabytes."""
_REFUSED = re.compile(r"EPERM|Permission [Dd]enied")
"""In what py-spy prints where the system refuses ptrace(2) or a file in /proc/PID."""
_UNPAUSABLE = "TtD"
"""States in which a process cannot be paused: stopped, traced, waiting for a file system."""
_PATIENCE = 5.0
"""Seconds for the program to write its stacks."""
_PAUSE = 0.01
_LONGEST = 1 << 22
"""Bytes that are read: 100 threads of 100 frames."""
_THREAD = re.compile(r"(?:Current t|T)hread 0x[0-9a-f]+[^\n]*\(most recent call first\):")
_FRAME = re.compile(r'  File "(.*)", line (\d{1,9}) in (.*)')
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
"""How `faulthandler` writes what is not ASCII."""


class Frame(TypedDict):
    """One call; `source` is its line of the file, empty where that cannot be read."""

    name: str
    file: str
    line: int
    source: str


class Thread(TypedDict):
    """One thread; `frames` begin with the innermost call."""

    name: str
    frames: list[Frame]


class ProcessStacks(TypedDict):
    """One process: its threads, the main one first, and the kernel's letter for its state."""

    pid: int
    name: str
    state: str
    threads: list[Thread]


class RankStacks(TypedDict):
    """The program of one rank and its child processes.

    `tool` is ``py-spy`` or ``faulthandler``; empty where neither worked, and `problem` says why.
    """

    rank: int
    tool: str
    problem: str
    process: ProcessStacks
    children: list[ProcessStacks]


class NodeStacks(TypedDict):
    """The dump of one node, a file in ``stacks/`` of the run folder."""

    host: str
    time: str
    world_size: int
    ranks: list[RankStacks]


class NoStacks(Exception):
    """The stacks of a process cannot be had in this way; the message says why."""


@dataclass(frozen=True)
class Options:
    """How to take stacks: py-spy's path (None: without it), and whether native calls are shown."""

    spy: str | None
    native: bool = False


def main(argv: Sequence[str]) -> None:
    """Write the dump of this node."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("run_folder")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--native", action="store_true")
    parser.add_argument("--py-spy", default="")
    parser.add_argument("--ras", action="store_true")
    values = parser.parse_args(argv)
    env = {**os.environ, "DEPLOYKIT_RUN_DIR": values.run_folder}
    write(env, values.folder, Options(spy_program(values.py_spy), values.native))
    if values.ras and (report := ras.query(env)):
        records.write_text(values.folder / f"{cluster.host_name(env)}.ras", report)


def write(env: Environ, folder: Path, options: Options) -> None:
    """Take the stacks of this node's ranks, and write them into `folder`."""
    from concurrent.futures import ThreadPoolExecutor  # not loaded in the launcher

    host = cluster.host_name(env)
    ranks = processes.here(env)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        taken = pool.map(partial(_of_rank, options), ranks, ranks.values())
        dump: NodeStacks = {
            "host": host,
            "time": now(),
            "world_size": max((record["world_size"] for record in ranks.values()), default=0),
            "ranks": list(taken),
        }
    records.write(folder / f"{host}.json", dump)


def _of_rank(options: Options, rank: int, record: ProcessRecord) -> RankStacks:
    """The stacks of a rank by the first way that works; `problem` says why another one did not."""
    process = _process(record["pid"])
    result = RankStacks(rank=rank, tool="", problem="", process=process, children=[])
    problems = []
    ways = {
        "py-spy": partial(_spied, options, process),
        "faulthandler": partial(by_signal, process["pid"], Path(record["stacks"])),
    }
    for tool, take in ways.items():
        try:
            process["threads"], result["tool"] = with_sources(take()), tool
            break
        except (NoStacks, OSError) as error:
            problems.append(str(error))
    if result["tool"] == "py-spy":
        below = processes.children(process["pid"])
        result["children"] = [_child(options, pid) for pid in below]
    result["problem"] = "; ".join(problems)
    return result


def _spied(options: Options, process: ProcessStacks) -> list[Thread]:
    if options.spy is None:
        raise NoStacks("py-spy is not installed on the node")
    return by_spy(options.spy, process["pid"], process["state"], native=options.native)


def _process(pid: int) -> ProcessStacks:
    status = processes.stat(pid)
    name, state = (status.name, status.state) if status else ("", "")
    return ProcessStacks(pid=pid, name=name, state=state, threads=[])


def _child(options: Options, pid: int) -> ProcessStacks:
    """A process that a rank has started: a worker of its data loader, or any other program."""
    process = _process(pid)
    with contextlib.suppress(NoStacks):  # it runs no Python, or has ended
        process["threads"] = with_sources(_spied(replace(options, native=False), process))
    return process


def with_sources(threads: Iterable[Thread]) -> list[Thread]:
    """The threads, as many as are kept, with the source line of each frame."""
    kept = [Thread(name=one["name"], frames=one["frames"][:_FRAMES]) for one in threads][:_THREADS]
    for thread in kept:
        for frame in thread["frames"]:
            file, line = frame["file"], frame["line"]
            lines = _lines(file) if Path(file).is_absolute() else ()
            frame["source"] = (
                lines[line - 1].strip()[:_LONGEST_LINE] if 0 < line <= len(lines) else ""
            )
    return kept


@lru_cache(256)
def _lines(file: str) -> tuple[str, ...]:
    """The lines of a regular file; none of one that cannot be read."""
    try:
        path = Path(file)
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > _LARGEST:
            return ()
        return tuple(path.read_text(encoding="utf-8", errors="replace").splitlines())
    except (OSError, ValueError):
        return ()


def spy_program(given: str = "") -> str | None:
    """py-spy beside this Python, on PATH, or at the path `given`; None where there is none."""
    search = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return shutil.which("py-spy", path=search) or (shutil.which(given) if given else None)


def by_spy(spy: str, pid: int, state: str, *, native: bool = False) -> list[Thread]:
    """The stacks of a Python process, the main thread first. Raises NoStacks.

    `state` is the kernel's letter for it. `native` shows the calls of C and C++ too.
    """
    pause = state not in _UNPAUSABLE
    argv = [spy, "dump", "--json", "--pid", str(pid)]
    if native and pause:
        return _spy_threads(pid, _run_spy([*argv, "--native"], _PATIENCE_NATIVE))
    if pause:
        with contextlib.suppress(NoStacks):
            return _spy_threads(pid, _run_spy(argv))
    return _spy_threads(pid, _run_spy([*argv, "--nonblocking"]))


def local_variables(spy: str, pid: int, function: str) -> dict[str, str]:
    """The local variables of a call of the main thread, as py-spy writes them. Raises NoStacks."""
    listed = _run_spy([spy, "dump", "--json", "--locals", "--pid", str(pid)])
    for thread in sorted(listed, key=lambda it: it.get("os_thread_id") != pid):
        for frame in thread["frames"]:
            if frame["name"] == function:
                return {local["name"]: local["repr"] for local in frame.get("locals") or ()}
    raise NoStacks(f"py-spy: {function} is not running")


def _run_spy(argv: list[str], patience: float = _PATIENCE_SPY) -> Any:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=patience, check=False
        )
    except subprocess.TimeoutExpired:
        raise NoStacks(f"py-spy did not respond within {patience:g} s") from None
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
            "py-spy is not permitted to read the program (kernel.yama.ptrace_scope, or a container "
            "without SYS_PTRACE)"
        )
    lines = [line.strip() for line in text.partition("Stack backtrace:")[0].splitlines()]
    lines = [line.removeprefix("Error: ") for line in lines if line and line != "Caused by:"]
    return f"py-spy: {': '.join(dict.fromkeys([*lines[:1], *lines[-1:]])) or 'no output'}"


def _spy_threads(pid: int, listed: Any) -> list[Thread]:
    """What py-spy has printed, the main thread first."""
    listed = [it for it in listed if isinstance(it, dict)] if isinstance(listed, list) else []
    if not listed:
        raise NoStacks("py-spy: the process is not running Python code")
    threads = []
    for thread in sorted(listed, key=lambda it: it.get("os_thread_id") != pid):
        frames = [
            Frame(name=it["name"], file=it["filename"], line=it.get("line") or 0, source="")
            for it in thread["frames"]
        ]
        name = thread.get("thread_name") or f"thread {thread.get('os_thread_id')}"
        threads.append(Thread(name=name, frames=frames))
    return threads


def by_signal(pid: int, file: Path) -> list[Thread]:
    """The stacks of a process with the hook, the main thread first. Raises NoStacks."""
    if sys.platform != "linux":
        raise NoStacks("a program can be asked for its stacks only on Linux")
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
        raise NoStacks("`dump` lacks permission to read the program's open files") from None
    except (OSError, ValueError):
        pass
    if not ready:
        raise NoStacks("the program has not started Python yet, or replaced the SIGURG handler")


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
