"""Open a shell next to a rank of a running run: on its node, in its folder and environment.

`exit` ends the shell; the run continues. With --json, print the command that would open it.

deploykit shell                 rank 0 of the newest run
deploykit shell exp-1 --rank 3
"""

from __future__ import annotations

import argparse

from deploykit import registry, run_shell
from deploykit import shell as programs
from deploykit.commands import arguments, output
from deploykit.errors import UsageError

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --rank."""
    parser.add_argument(
        "--rank",
        type=arguments.rank,
        default=0,
        metavar="N",
        help="rank to open it next to (default: 0)",
    )


def run(args: argparse.Namespace) -> int:
    """Become the shell, or print its command."""
    row = registry.get(args.run)
    if not args.json and not programs.has_person():
        hint = "`deploykit exec RUN -- COMMAND` needs none"
        raise UsageError("a shell needs a terminal for its input and output", hint=hint)
    command = run_shell.argv(row, args.rank, (), terminal=True)
    if not args.json:
        output.note(f"{row.run}, rank {args.rank}: `exit` ends this shell")
        programs.become(command)
    output.emit({"run": row.run, "rank": args.rank, "command": command})
    return 0
