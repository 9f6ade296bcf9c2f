"""The copy of a channel with `stage` to a node's disk, beside `cp -r` and `tar | tar`.

    python benchmarks/staging.py [--files 2000] [--size 100000] [--turns 6] [--folder FOLDER]

Source and copy are below a new folder in `--folder`, and what is read is in the page cache. Each
turn copies with all three: ours with all that it does besides (the listing, the hash of the
folder's name, the lock, the space, the check of each file), but without the start of Python.
What counts is the wall time, the median turn of each, because one and the same copy takes up to
four times as long in another turn. A copy larger than the kernel buffers measures the disk. Returns
1 if ours takes longer than the target times `cp -r`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "entrypoints"))

from deploykit_node import staging
from deploykit_node.cluster import Cluster

TARGET = 1.1


class Time(NamedTuple):
    wall: float
    cpu: float


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return 1 if ours is above the target."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--files", type=int, default=2000, metavar="N")
    parser.add_argument("--size", type=int, default=100_000, metavar="BYTES")
    parser.add_argument("--turns", type=int, default=6, metavar="N")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args(argv)
    times: dict[str, list[Time]] = {"ours": [], "cp -r": [], "tar | tar": []}
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        source, target = Path(name, "source"), Path(name, "target")
        _write(source, options.files, options.size)
        copies = [("ours", _staged), ("cp -r", _cp), ("tar | tar", _tar)]
        # what one leaves behind in memory slows the next: each follows each other one as often
        orders = itertools.cycle(itertools.permutations(copies))
        for order in itertools.islice(orders, options.turns):
            for who, copy in order:
                target.mkdir()
                os.sync()
                times[who].append(_time(copy, source, target))
                shutil.rmtree(target)
    median = {who: sorted(some)[len(some) // 2] for who, some in times.items()}
    print(f"{options.files} files of {options.size} bytes in {options.folder}:")
    for who, one in median.items():
        ratio = median["ours"].wall / one.wall
        print(f"{who:<9} {one.wall:6.2f} s, {one.cpu:6.2f} s of CPU; ours beside it: {ratio:.2f}")
    return 0 if median["ours"].wall <= TARGET * median["cp -r"].wall else 1


def _write(folder: Path, files: int, size: int) -> None:
    for number in range(files):
        path = folder / f"{number % 50:02}" / f"{number}.bin"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for start in range(0, size, 1 << 20):
                file.write(os.urandom(min(1 << 20, size - start)))


def _staged(source: Path, target: Path) -> None:
    channel = {"path": str(source), "stage": "node", "stage_folder": str(target)}
    env = {staging.VARIABLE: json.dumps({"train": channel})}
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):
        staging.run(env, Cluster("emulated", 0, ("here",)), elastic=False)


def _cp(source: Path, target: Path) -> None:
    os.execvp("cp", ["cp", "-r", str(source), str(target / "copy")])  # noqa: S606 - in a child


def _tar(source: Path, target: Path) -> None:
    command = 'tar -C "$0" -cf - . | tar -C "$1" -xf -'
    subprocess.run(["sh", "-c", command, str(source), str(target)], check=True)


def _time(copy: Callable[[Path, Path], None], source: Path, target: Path) -> Time:
    """Copy in a child process, whose own start does not count for much."""
    started, before = time.monotonic(), _cpu()
    child = os.fork()
    if not child:
        try:
            copy(source, target)
        except BaseException as error:  # noqa: BLE001 - the child must not go on as its parent
            print(error, file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{copy.__name__} failed")
    return Time(time.monotonic() - started, _cpu() - before)


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    sys.exit(main())
