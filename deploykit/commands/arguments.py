"""Arguments shared by several verbs."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime, timedelta
from pathlib import Path

from deploykit import backend as backends
from deploykit.decode import DURATION
from deploykit.errors import UsageError


def job_file(parser: argparse.ArgumentParser) -> None:
    """Declare the job file and --set."""
    parser.add_argument(
        "job",
        nargs="?",
        type=Path,
        default=Path("job.yaml"),
        metavar="FILE",
        help="job file, YAML or TOML (default: job.yaml)",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key, e.g. resources.nodes=2 or entrypoint.args='[--lr, 0.1]'",
    )


def backend(parser: argparse.ArgumentParser) -> None:
    """Declare --backend, which `chosen` reads."""
    parser.add_argument(
        "--backend",
        metavar="B",
        help="local, slurm, sagemaker, or another of `deploykit backends`",
    )


def chosen(args: argparse.Namespace) -> str:
    """The name after --backend. Raises UsageError, with all names, where it is missing."""
    if args.backend is None:
        names = ", ".join(backends.names())
        raise UsageError("--backend is required", hint=f"one of {names}")
    return str(args.backend)


def strict(parser: argparse.ArgumentParser) -> None:
    """Declare --strict."""
    parser.add_argument("--strict", action="store_true", help="treat warnings as errors")


def count(text: str) -> int:
    """A whole number of at least 1. Raises ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def moment(text: str) -> datetime:
    """A time in UTC: a duration before now (10m, 2h) or a date (2026-11-21T01:46).

    Raises ArgumentTypeError.
    """
    try:
        return datetime.now(UTC) - timedelta(seconds=DURATION.parse(text))
    except (ValueError, OverflowError):
        pass
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        message = f"{text!r} is not a time such as 10m (ago) or 2026-11-21T01:46"
        raise argparse.ArgumentTypeError(message) from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def one_run(parser: argparse.ArgumentParser) -> None:
    """Declare RUN, by default the newest one."""
    parser.add_argument(
        "run",
        nargs="?",
        metavar="RUN",
        help="run id, or its unique beginning or end (default: the newest run)",
    )
