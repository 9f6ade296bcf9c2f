"""Arguments that several verbs share, and the types of their values."""

from __future__ import annotations

import argparse
import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from deploykit.job.decode import DURATION
from deploykit.job.file import Option

_RESOURCES = (
    ("nodes", "N", "number of nodes, or a range such as 2:4"),
    ("processes-per-node", "N", "ranks per node"),
    ("gpus-per-node", "N", "GPUs per node"),
    ("time-limit", "TIME", "time limit, such as 30m or 1h30m"),
)
"""Options for keys of `resources`."""


def count(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(10**18)) and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def rank(text: str) -> int:
    """The number of a rank. Raises ArgumentTypeError."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(10**9))):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rank number such as 0")
    return int(text)


def seconds(text: str) -> float:
    """Seconds, from a number or a time such as 30m. Raises ArgumentTypeError."""
    try:
        number = float(text) if text.replace(".", "", 1).isdecimal() else DURATION.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a duration such as 90s or 30m") from None
    return float(number)


def _job(parser: ArgumentParser) -> None:
    parser.add_argument(
        "job",
        nargs="?",
        type=Path,
        default=Path("job.yaml"),
        metavar="FILE|SCRIPT",
        help="job file (YAML or TOML) or Python script (default: job.yaml)",
    )
    parser.add_argument(
        *("-m", "--module"),
        action="append",
        dest="set",
        default=[],
        type=lambda module: Option("-m", f"entrypoint={json.dumps({'module': module})}"),
        metavar="MODULE",
        help="run this module, as `python -m` does, instead of the job file's script",
    )
    _set(parser)
    for name, metavar, text in _RESOURCES:
        key = name.replace("-", "_")
        parser.add_argument(
            f"--{name}",
            action="append",
            dest="set",
            default=[],
            type=partial(_option, f"--{name}", f"resources.{key}"),
            metavar=metavar,
            help=text,
        )


def _option(option: str, key: str, value: str) -> Option:
    return Option(option, f"{key}={value}")


def _set(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, such as resources.nodes=2 or entrypoint.args='[--lr, 0.1]'",
    )


def _backend(parser: ArgumentParser) -> None:
    parser.add_argument(
        *("-b", "--backend"),
        metavar="BACKEND",
        help="local, slurm, sagemaker, or another backend that `deploykit backends` lists "
        "(default: from the job file, DEPLOYKIT_BACKEND or the config file, in that order, "
        "else local)",
    )


def _only_backend(parser: ArgumentParser) -> None:
    text = "use only this backend (default: each backend in the job file, else the default backend)"
    parser.add_argument(*("-b", "--backend"), metavar="BACKEND", help=text)


def _backends(parser: ArgumentParser) -> None:
    parser.add_argument(
        *("-b", "--backend"),
        action="append",
        default=[],
        metavar="BACKEND",
        help="backend to check the job for (repeatable; default: each backend in the job file)",
    )


def _strict(parser: ArgumentParser) -> None:
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")


def _again(parser: ArgumentParser) -> None:
    parser.add_argument(
        *("-b", "--backend"),
        metavar="BACKEND",
        help="submit to this backend instead (default: the original one)",
    )
    parser.add_argument("--run", dest="new_run", metavar="ID", help="id of the new run")


def _sending(parser: ArgumentParser) -> None:
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and exit")
    parser.add_argument(
        *("-w", "--wait"),
        action="store_true",
        help="follow the logs, and exit with the run's exit code",
    )


def _runs(parser: ArgumentParser, nargs: str, more: str) -> None:
    text = f"run id, or a unique prefix or suffix{more}"
    parser.add_argument("run", nargs=nargs, metavar="RUN", help=text)


def _exact_runs(parser: ArgumentParser) -> None:
    text = "run id, or a unique prefix of at least 4 characters"
    parser.add_argument("run", nargs="+", metavar="RUN", help=text)


def _metric(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--name",
        action="append",
        default=[],
        metavar="PATTERN",
        help="show only metrics with this name; * matches any text (repeatable)",
    )


def _rank(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--rank",
        type=rank,
        default=0,
        metavar="N",
        help="rank whose node and environment are used (default: 0)",
    )


def _limit(parser: ArgumentParser) -> None:
    parser.add_argument(
        *("-n", "--limit"), type=count, default=20, metavar="N", help="show at most N (default: 20)"
    )


def _query(parser: ArgumentParser) -> None:
    parser.add_argument(
        *("-q", "--query"),
        metavar="EXPR",
        help="print the part of the JSON that this JMESPath selects, such as [0].run; strings are "
        "printed without quotes, one per line",
    )
    parser.add_argument(
        "--format",
        metavar="TEXT",
        help="print one line per record in this format, such as '{run} {state:>9}'",
    )


_ADD: dict[str, Callable[[ArgumentParser], None]] = {
    "job": _job,
    "set": _set,
    "backend": _backend,
    "only_backend": _only_backend,
    "backends": _backends,
    "strict": _strict,
    "again": _again,
    "sending": _sending,
    "run": partial(_runs, nargs="?", more=" (default: the newest run)"),
    "runs": partial(_runs, nargs="*", more=""),
    "newest": partial(_runs, nargs="*", more=" (default: the newest run)"),
    "exact_runs": _exact_runs,
    "limit": _limit,
    "metric": _metric,
    "rank": _rank,
    "query": _query,
}
"""What declares each, by its name in a verb's `SHARED`."""


def add(parser: ArgumentParser, names: Iterable[str]) -> None:
    """Declare the shared arguments `names` of a verb."""
    for name in names:
        _ADD[name](parser)
