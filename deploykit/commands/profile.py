"""Show the profile of a run: who computed and who waited, and the costliest operators.

Its steps were profiled because the job asked for it: `deploykit submit --profile torch:20:25`.

deploykit profile exp-1
deploykit profile --from FOLDER     traces that were copied from elsewhere
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit import registry
from deploykit.commands import output
from deploykit.errors import NotFound
from deploykit.inspect import traces
from deploykit.inspect.traces import RankProfile

SHARED = ("run",)
_MOST = 10
_NAME = 60
"""Columns of an operator's name: those of kernels are long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare where the traces are."""
    parser.add_argument(
        "--from",
        dest="folder",
        type=Path,
        metavar="FOLDER",
        help="read the traces in this folder instead, copied from a login node or a bucket",
    )


def run(args: argparse.Namespace) -> int:
    """Print shares of each rank, the operators, and which file to open."""
    title, folder = _place(args)
    files = traces.files(folder)
    if not files:
        raise NotFound(
            f"there is no profile in {folder}",
            hint="ask for one with `deploykit submit --profile torch:20:25`; the log says why a "
            "rank has none. Copy traces from a login node or a bucket, and name them with --from",
        )
    ranks = [traces.read(path) for path in files]
    slowest = traces.slowest(ranks)
    if args.json:
        output.emit(_data(ranks, slowest))
    else:
        output.say(*_lines(title, ranks, slowest))
    return 0


def _place(args: argparse.Namespace) -> tuple[str, Path]:
    if args.folder is not None:
        return str(args.folder), args.folder
    row = registry.get(args.run)
    return row.run, Path(row.folder, traces.FOLDER)


def _lines(title: str, ranks: Sequence[RankProfile], slowest: RankProfile | None) -> Iterator[str]:
    where = "GPU" if ranks[0].on_gpu else "CPU"
    count = f"{len(ranks)} rank{'s' * (len(ranks) > 1)}"
    yield f"{title}: {count}, {_time(ranks[0].seconds)} profiled, times of the {where}"
    yield ""
    yield "rank  computing  communicating  of it waiting   idle"
    for one in ranks:
        shares = (one.computing, one.communicating, one.waiting, one.idle)
        cells = [f"{100 * share / max(one.seconds, 1e-9):.0f}%" for share in shares]
        yield f"{one.rank:>4}  {cells[0]:>9}  {cells[1]:>13}  {cells[2]:>13}  {cells[3]:>5}"
    if slowest is not None:
        yield f"rank {slowest.rank} waits least: the others wait for it"
    yield ""
    yield "    time  share  calls  operator, without those that it calls"
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
