"""Serve a packaged model over HTTP: `GET /ping` and `POST /invocations`, as SageMaker's endpoints.

The model is a package of `deploykit export`, or a run: its package is then made first, and kept in
the run folder. The server has no passwords and no encryption, and listens only on this machine
unless you set --host. Each replica is a process with its own model. Requires
`pip install 'deploykit[serve]'`.

deploykit deploy exp-1                                 the last checkpoint of a run
deploykit deploy model --port 9000 --replicas 2
deploykit deploy model --device cuda:0,cuda:1 --replicas 2
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.backends.base import Serving
from deploykit.cli import arguments, export, output
from deploykit.cli.progress_bar import watching
from deploykit.job.decode import SIZE
from deploykit.lib import shell
from deploykit.lib.errors import NotFound, UsageError
from deploykit.run import export as run_export
from deploykit.run import registry

_MAX_PORT = 2**16 - 1
_DIGITS = 18


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        metavar="RUN|FOLDER",
        help="a package of `deploykit export`, or a run (default: the newest run)",
    )
    parser.add_argument(
        *("-b", "--backend"),
        default=backend.DEFAULT,
        metavar="BACKEND",
        help="where to serve it (default: this machine)",
    )
    export.add_choice(parser)
    for name, kind, value, metavar, text in (
        ("host", str, "127.0.0.1", "ADDRESS", "address to listen on"),
        ("port", _port, 8080, "PORT", "port to listen on; 0: a free one"),
        ("replicas", arguments.count, 1, "N", "processes, each with the model"),
        ("max-body", _size, 64 << 20, "SIZE", "largest request"),
        (
            "concurrency",
            arguments.count,
            64,
            "N",
            "requests in progress, above which others get status 503",
        ),
        (
            "timeout",
            arguments.seconds,
            60.0,
            "TIME",
            "time to wait for a free replica, and again for the answer",
        ),
    ):
        shown = {"max-body": "64MiB", "timeout": "60s"}.get(name, value)
        help_text = f"{text} (default: {shown})"
        parser.add_argument(f"--{name}", type=kind, default=value, metavar=metavar, help=help_text)
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="cpu, cuda, or one for each replica in turn: cuda:0,cuda:1 (default: a GPU, if any)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="print the command of the server, and start nothing"
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:_DIGITS]) <= _MAX_PORT):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port, 0 to {_MAX_PORT}")
    return int(text)


def _size(text: str) -> int:
    try:
        return SIZE.parse(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not {SIZE.meaning}") from None


def run(args: argparse.Namespace) -> int:
    """Become the server; returns only after a dry run."""
    engine = backend.require(args.backend, "serve")
    package, python = _package(args)
    serving = Serving(
        args.host,
        args.port,
        args.replicas,
        args.device,
        args.max_body,
        args.concurrency,
        args.timeout,
        python,
    )
    argv = [*engine.serve(package, serving), *(["--json"] if args.json else [])]
    if not args.dry_run:
        shell.become(argv)
    if args.json:
        output.emit({"package": str(package), "command": argv})
    else:
        output.say(shell.command(*argv))
    return 0


def _package(args: argparse.Namespace) -> tuple[Path, str]:
    """The package, which is written for a run, and the Python that loads it."""
    folder = Path(args.model or "")
    if args.model and (folder / run_export.MANIFEST).is_file():
        if args.checkpoint or args.inference:
            hint = "name a run, or pass them to `deploykit export`"
            raise UsageError("--checkpoint and --inference do not apply to a package", hint=hint)
        return folder.absolute(), args.python or sys.executable
    if args.model and folder.is_dir():
        raise NotFound(
            f"{folder} is not a package: it has no {run_export.MANIFEST}",
            hint="deploykit export RUN --to FOLDER",
        )
    row = registry.get(args.model)
    prepared = run_export.in_run_folder(
        row, checkpoint=args.checkpoint, inference=args.inference, python=args.python
    )
    if not args.dry_run:
        with watching():
            prepared.write_once()
    return Path(prepared.to), prepared.python
