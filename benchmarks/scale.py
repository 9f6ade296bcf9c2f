"""How the registry, `logs`, `diagnose`, bundles and the relay grow, beside a yardstick for each.

    python benchmarks/scale.py
    python benchmarks/scale.py --small --tree ../an-older-checkout

Writes a registry of 1,000 to 100,000 runs, logs of 32 to 512 ranks and of 500 to 8,000 files,
sources of 100 to 10,000, and runs commands of the checkout `--tree` on them. Wall and CPU seconds
and the peak memory are those of the whole command, with what it starts. The exponent is the slope
of CPU seconds over sizes on logarithmic axes: 0 is constant, 1 is linear. Nothing is required: it
prints a table.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_TOP = Path(__file__).resolve().parent.parent
_COLUMNS = "run, name, backend, target, folder, plan, bundle, created, output, id, state"
_FIRST = (
    "from deploykit.run import registry\n"
    "registry.add(registry.Run('seed', 'j', 'local', 'h', '/', '', '', None, 0.0, ''))\n"
    "registry.remove('seed')"
)
_SQLITE = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute(sys.argv[2]).fetchall())"
_BUNDLE = (
    "import sys; from pathlib import Path; from deploykit.bundle import archive as bundle\n"
    "if sys.argv[1:]: bundle.store(bundle.scan(Path(sys.argv[1]), 10**9))"
)
_LOST = "CUDA out of memory. Tried to allocate 2.00 GiB.\n"


class Cost(NamedTuple):
    """What a command took, with all that it started."""

    wall: float
    cpu: float
    memory: float
    """MB."""


class Figure(NamedTuple):
    """One line of the table."""

    what: str
    size: int
    cost: Cost


def cost(argv: Sequence[str | Path], tree: Path, home: Path) -> Cost:
    """Run a command with the deploykit of a checkout, and count."""
    env = {**os.environ, "PYTHONPATH": str(tree), "DEPLOYKIT_HOME": str(home), "LC_ALL": "C"}
    begin = time.monotonic()
    with tempfile.TemporaryFile() as output:  # into /dev/null, grep ends with the first match
        process = subprocess.Popen([str(word) for word in argv], env=env, cwd="/", stdout=output)
        _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0  # waited for
    wall = time.monotonic() - begin
    return Cost(wall, used.ru_utime + used.ru_stime, used.ru_maxrss / 1000)


def _row(home: Path, number: int) -> tuple[object, ...]:
    run = f"exp-{number:06}-20261121-014608-7kq2"
    folder = f"{home}/runs/{run}"
    return (
        *(run, "exp", "local", os.uname().nodename, folder, "a" * 64, f"{number // 10:064x}"),
        *(1.7e9 + number, f"{folder}/output", run, "succeeded"),
    )


def registry(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """One run asked for, and a list, in a registry of so many ended runs."""
    home = folder / f"home-{size}"
    cost([sys.executable, "-c", _FIRST], tree, home)
    with sqlite3.connect(home / "runs.sqlite") as database:
        marks = ", ".join("?" * 11)
        rows = (_row(home, number) for number in range(size))
        insert = f"INSERT INTO runs ({_COLUMNS}) VALUES ({marks})"  # noqa: S608 - ours
        database.executemany(insert, rows)
    run = _row(home, size // 2)[0]
    ours = [sys.executable, "-m", "deploykit"]
    yield Figure("status of a run", size, cost([*ours, "status", str(run)], tree, home))
    yield Figure("list", size, cost([*ours, "list"], tree, home))
    select = f"SELECT * FROM runs WHERE run = '{run}'"  # noqa: S608 - ours
    plain = [sys.executable, "-c", _SQLITE, home / "runs.sqlite", select]
    yield Figure("  yardstick: python, one row", size, cost(plain, tree, home))


def logs(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """The logs of so many ranks, 10,800 lines each; of a rank, three lines have the same time."""
    home, run, ours = _logs(folder / "together", tree, size, 0)
    for words in ([], ["--rank", "5"], ["--tail", "100"]):
        yield Figure(" ".join(["logs", *words]), size, cost([*ours, *words], tree, home))
    yield Figure("  yardstick: sort -m", size, cost(_sort(run), tree, home))


def logs_apart(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """The same where each line of a rank has a time of its own."""
    home, run, ours = _logs(folder / "apart", tree, size, 300)
    yield Figure("logs, times of their own", size, cost(ours, tree, home))
    yield Figure("  yardstick: sort -m", size, cost(_sort(run), tree, home))


def _logs(folder: Path, tree: Path, size: int, apart: int) -> tuple[Path, Path, list[str | Path]]:
    """A state folder, the folder of a run with such logs, three lines a second, and `logs`."""
    home, run = folder / "home", folder / "run"
    (run / "logs").mkdir(parents=True)
    for rank in range(size):
        lines = (
            f"2026-11-21T01:{s // 60:02}:{s % 60:02}.{n * apart + rank % 300:03}Z [rank {rank}] "
            f"step {n} | loss {1 / (n + 1):.4f} | tokens/s {n}\n"
            for s in range(3600)
            for n in range(3)
        )
        (run / f"logs/node-{rank}.log").write_text("".join(lines))
    make = (
        "import os, sys; from deploykit.run import registry\n"
        "from deploykit.job.model import Status, State\n"
        "row = registry.Run('r-1', 'j', 'local', os.uname().nodename, sys.argv[1], '', '', None,"
        " 0.0, '')\n"
        "registry.add(row), registry.confirm('r-1', 'r-1', Status(State.SUCCEEDED))"
    )
    cost([sys.executable, "-c", make, run], tree, home)
    return home, run, [sys.executable, "-m", "deploykit", "logs", "r-1"]


def _sort(run: Path) -> list[str | Path]:
    files = sorted((run / "logs").iterdir())
    return ["sort", "-m", f"--batch-size={len(files) + 10}", *files]


def diagnose(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """So many small files, one of them with a failure."""
    home, many = folder / "home", folder / f"files-{size}"
    many.mkdir()
    for rank in range(size):
        end = _LOST if rank == size // 2 else "done\n"
        steps = "".join(f"[rank{rank}]: step {step}\n" for step in range(40))
        (many / f"rank-{rank:05}.log").write_text(steps + end)
    files = sorted(many.iterdir())
    ours = [sys.executable, "-m", "deploykit", "diagnose"]
    yield Figure("diagnose, files", size, cost([*ours, *files], tree, home))
    grep = ["grep", "-a", "-c", "-F", "out of memory", *files]
    yield Figure("  yardstick: grep -F -c", size, cost(grep, tree, home))


def matching(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """So many lines that each match a rule, in one file."""
    log = folder / f"matching-{size}.log"
    with log.open("w") as file:
        file.writelines(f"[rank{n % 64}]: RuntimeError at step {n}: {_LOST}" for n in range(size))
    ours = [sys.executable, "-m", "deploykit", "diagnose", log]
    yield Figure("diagnose, matching lines", size, cost(ours, tree, folder / "home"))
    grep = ["grep", "-a", "-c", "-F", "out of memory", log]
    yield Figure("  yardstick: grep -F -c", size, cost(grep, tree, folder / "home"))


def long_line(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """One line of so many MB."""
    log = folder / f"long-{size}.log"
    with log.open("wb") as file:
        for _ in range(size):
            file.write(b"x" * 10**6)
        file.write(b"\n" + _LOST.encode())
    ours = [sys.executable, "-m", "deploykit", "diagnose", log]
    yield Figure("diagnose, a line of MB", size, cost(ours, tree, folder / "home"))
    grep = ["grep", "-a", "-c", "-F", "out of memory", log]
    yield Figure("  yardstick: grep -F -c", size, cost(grep, tree, folder / "home"))


def bundle(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """So many files of 2 kB in a repository, packed; then nothing but Python and its imports."""
    source, home, rng = folder / f"source-{size}", folder / f"home-{size}", random.Random(1)
    for number in range(size):
        file = source / f"part-{number // 1000}" / f"module-{number // 100 % 10}" / f"{number}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        words = rng.choices(range(5000), k=240)
        file.write_text("".join(f"name_{n}{' ' if n % 9 else chr(10)}" for n in words))
    name, who = shlex.quote(str(source)), "-c user.name=a -c user.email=a@b.c"
    init = f"cd {name} && git init -q && git config gc.auto 0 && git add ."
    init += f" && git {who} commit -q -m a"
    cost(["sh", "-c", init], tree, home)
    pack = [sys.executable, "-c", _BUNDLE]
    yield Figure("bundle, files", size, cost([*pack, source], tree, home))
    yield Figure("  of that Python and imports", size, cost(pack, tree, home))
    git = f"git -C {name} archive HEAD | gzip -1"
    yield Figure("  yardstick: archive | gzip", size, cost(["sh", "-c", git], tree, home))


def relay(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """So many lines that a program prints, through the relay of a rank into a file."""
    program = folder / f"prints-{size}.py"
    line = "step {n} | loss 0.1234 | tokens/s 123456 | lr 0.0001"
    program.write_text(f"for n in range({size}):\n    print(f'{line}')\n")
    home, buffered = folder / "home", ["env", "PYTHONUNBUFFERED="]
    relayed = [*buffered, *_rank(tree), program]
    yield Figure("relay, lines", size, cost(relayed, tree, home))
    plain = [*buffered, sys.executable, program]
    yield Figure("  yardstick: into the file", size, cost(plain, tree, home))


def relays(folder: Path, tree: Path, size: int) -> Iterator[Figure]:
    """The memory of a node's launcher and of the process above each of its ranks.

    Each shared page counts once.
    """
    program, begin = folder / "sleeps.py", time.monotonic()
    program.write_text("import time\nprint('started', flush=True)\ntime.sleep(3600)\n")
    words = ["torchrun", "--nnodes=1", f"--nproc-per-node={size}", "--max-restarts=2", "--"]
    launch = [sys.executable, tree / "entrypoints/launch.py", *words, program]
    node = subprocess.Popen(list(map(str, launch)), stdout=subprocess.PIPE)
    assert node.stdout is not None  # noqa: S101 - for type checkers
    for _ in range(size):
        node.stdout.readline()
    memory = sum(_proportional_kib(pid) for pid in [node.pid, *_ranks(node.pid)]) / 1000
    node.terminate()
    node.communicate()
    yield Figure("relays of a node", size, Cost(time.monotonic() - begin, 0, memory))


def _ranks(pid: int) -> Iterator[int]:
    """The processes above the ranks of a node, by that of its launcher."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        if b"--torchrun" in words:
            yield from _ranks(child)
        elif b"--rank" in words:
            yield child


def _rank(tree: Path) -> list[str | Path]:
    """The words that start a rank below another launcher, without those of its program."""
    numbers = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    env = {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}
    variables = [f"{name}={value}" for name, value in env.items()]
    return ["env", *variables, sys.executable, tree / "entrypoints/launch.py", "--"]


def _proportional_kib(pid: int) -> int:
    """The memory of a process, with its share of what it shares (proc_pid_smaps(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


PARTS: dict[str, tuple[Callable[[Path, Path, int], Iterator[Figure]], tuple[int, int, int]]] = {
    "registry": (registry, (1000, 10_000, 100_000)),
    "logs": (logs, (32, 128, 512)),
    "logs-apart": (logs_apart, (32, 128, 512)),
    "diagnose": (diagnose, (500, 2000, 8000)),
    "matching": (matching, (10_000, 100_000, 1_000_000)),
    "long-line": (long_line, (30, 100, 300)),
    "bundle": (bundle, (100, 1000, 10_000)),
    "relay": (relay, (30_000, 300_000, 3_000_000)),
    "relays": (relays, (1, 4, 8)),
}


def exponent(figures: Sequence[Figure]) -> float | None:
    """The slope of CPU seconds over sizes on logarithmic axes; None for a single size."""
    if len(figures) < 2:  # noqa: PLR2004 - a slope needs two
        return None
    sizes = [math.log(each.size) for each in figures]
    seconds = [math.log(max(each.cost.cpu, 1e-3)) for each in figures]
    return statistics.linear_regression(sizes, seconds).slope


def table(figures: Sequence[Figure]) -> Iterator[str]:
    """The lines of the table: each thing by size, its exponent in the last line."""
    row = "{:<30}{:>9}{:>10}{:>10}{:>8}{:>10}".format
    yield row("", "size", "wall (s)", "CPU (s)", "MB", "exponent")
    by_name: dict[str, list[Figure]] = defaultdict(list)
    for each in figures:
        by_name[each.what].append(each)
    for name, group in by_name.items():
        slope = exponent(group)
        for each in group:
            took = each.cost
            is_last = each is group[-1] and slope is not None
            shown = (f"{took.wall:.2f}", f"{took.cpu:.2f}", f"{took.memory:.0f}")
            yield row(name, each.size, *shown, f"{slope:.2f}" if is_last else "")


def main() -> None:
    """Measure the parts, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("part", nargs="*", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--tree", type=Path, default=_TOP, help="the checkout to measure")
    parser.add_argument("--small", action="store_true", help="leave out the largest size")
    args = parser.parse_args()
    for name in args.part or PARTS:
        measure, sizes = PARTS[name]
        figures: list[Figure] = []
        for size in sizes[:-1] if args.small else sizes:
            with tempfile.TemporaryDirectory(prefix="scale-") as folder:
                figures += measure(Path(folder), args.tree.resolve(), size)
        print(f"{name}\n", *(f"{line}\n" for line in table(figures)), sep="", flush=True)


if __name__ == "__main__":
    main()
