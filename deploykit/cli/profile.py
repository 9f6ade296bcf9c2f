"""Show the profile of a run: which ranks computed, which waited, and the costliest operators.

Request a profile with `deploykit submit --profile torch:20:25`. Nsight Systems reports and memory
snapshots are listed with the command that opens each.

deploykit profile exp-1
deploykit profile --from FOLDER     files copied from another machine
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from deploykit.cli import output
from deploykit.lib.errors import NotFound
from deploykit.observe import traces
from deploykit.observe.traces import RankProfile
from deploykit.run import registry

SHARED = ("run",)
_MOST = 10
_NAME = 60
"""Columns of an operator's name: those of kernels are long."""


class _File(NamedTuple):
    """A file that another program reads."""

    file: str
    how: str
    """The command that opens it, or where to drop it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="read the files in this folder, copied from a login node or a bucket",
    )


def run(args: argparse.Namespace) -> int:
    title, folder = _place(args)
    files, others = traces.files(folder), [*_others(folder)]
    if not files and not others:
        raise NotFound(
            f"no profile found in {folder}",
            hint="request one with `deploykit submit --profile torch:20:25`; the log says why a "
            "rank has no profile. If the files are on a login node or in a bucket, copy them and "
            "use --from",
        )
    ranks = [traces.read(path) for path in files]
    slowest = traces.slowest(ranks)
    if args.json:
        output.emit(_data(ranks, slowest) | {"files": [one._asdict() for one in others]})
    else:
        output.say(*(_lines(title, ranks, slowest) if ranks else ()))
        output.say(*_other_lines(title, others))
    return 0


def _others(folder: Path) -> Iterator[_File]:
    """The files that other programs read."""
    for path in traces.files(folder, traces.REPORTS):
        yield _File(str(path), f"nsys-ui {shlex.quote(str(path))}")
    for path in traces.files(folder, traces.SNAPSHOTS):
        yield _File(str(path), f"open in https://pytorch.org/memory_viz: {path}")


def _other_lines(title: str, others: Sequence[_File]) -> Iterator[str]:
    reports = [one for one in others if one.how.startswith("nsys-ui")]
    snapshots = others[len(reports) :]
    if reports:
        yield f"{title}: {_count(reports, 'Nsight Systems report')}"
        yield from (one.how for one in reports)
        yield f"summary in the terminal: nsys stats {shlex.quote(reports[0].file)}"
    if snapshots:
        yield f"{title}: {_count(snapshots, 'memory snapshot')} of GPUs that ran out of memory"
        yield from (one.how for one in snapshots)


def _count(several: Sequence[object], noun: str) -> str:
    return f"{len(several)} {noun}{'s' * (len(several) > 1)}"


def _place(args: argparse.Namespace) -> tuple[str, Path]:
    if args.folder is not None:
        return str(args.folder), args.folder
    row = registry.get(args.run)
    return row.run, Path(row.folder, traces.FOLDER)


def _lines(title: str, ranks: Sequence[RankProfile], slowest: RankProfile | None) -> Iterator[str]:
    where = "GPU" if ranks[0].on_gpu else "CPU"
    profiled = f"{_time(ranks[0].seconds)} profiled"
    yield f"{title}: {_count(ranks, 'rank')}, {profiled}, {where} times"
    yield ""
    yield "rank  computing  communicating  (waiting)   idle"
    for one in ranks:
        shares = (one.computing, one.communicating, one.waiting, one.idle)
        cells = [f"{100 * share / max(one.seconds, 1e-9):.0f}%" for share in shares]
        yield f"{one.rank:>4}  {cells[0]:>9}  {cells[1]:>13}  {cells[2]:>9}  {cells[3]:>5}"
    if slowest is not None:
        yield f"rank {slowest.rank} waits least: the others wait for it"
    yield ""
    yield "    time  share  calls  operator (self time)"
    total = sum(own for one in ranks for _, own in one.operators.values())
    for name, calls, own in traces.costliest(ranks, _MOST):
        short = name if len(name) <= _NAME else f"{name[: _NAME - 1]}…"
        yield f"{_time(own):>8}  {100 * own / max(total, 1e-9):>4.0f}%  {calls:>5}  {short}"
    yield ""
    yield f"open in https://ui.perfetto.dev: {(slowest or ranks[0]).file}"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _data(ranks: Sequence[RankProfile], slowest: RankProfile | None) -> dict[str, object]:
    return {
        "ranks": [
            {
                "rank": one.rank,
                "file": str(one.file),
                "on_gpu": one.on_gpu,
                "seconds": one.seconds,
                "computing_seconds": one.computing,
                "communicating_seconds": one.communicating,
                "waiting_seconds": one.waiting,
                "idle_seconds": one.idle,
            }
            for one in ranks
        ],
        "slowest_rank": slowest.rank if slowest else None,
        "operators": [
            {"name": name, "calls": calls, "seconds": own}
            for name, calls, own in traces.costliest(ranks, _MOST)
        ],
    }
