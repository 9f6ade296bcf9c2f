"""Run a command beside a rank of a running run: on its node, in its folder, with its environment.

It takes over this terminal, and its exit code is that of the command. The run is not disturbed, but
for what the command does. With --json it is waited for, and printed is what it wrote.

deploykit exec exp-1 -- nvidia-smi
deploykit exec exp-1 --rank 3 -- python -c 'import torch; print(torch.__version__)'
"""

from __future__ import annotations

import argparse

from deploykit import registry, run_shell, shell
from deploykit.commands import arguments, output
from deploykit.errors import UsageError

SHARED = ("run",)
_LONGEST = 86400.0
"""Seconds for a command whose output is printed as JSON."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare --rank."""
    parser.add_argument(
        "--rank", type=arguments.rank, default=0, metavar="N", help="beside this rank (default: 0)"
    )


def run(args: argparse.Namespace) -> int:
    """Become the command; with --json run it, and return its exit code."""
    if not args.arguments:
        raise UsageError("no command is given", hint="it follows `--`, as in `-- nvidia-smi`")
    row = registry.get(args.run)
    terminal = shell.has_person() and not args.json
    command = run_shell.argv(row, args.rank, args.arguments, terminal=terminal)
    if not args.json:
        shell.become(command)
    code, out, err = shell.run(command, timeout=_LONGEST)
    data = {"run": row.run, "rank": args.rank, "exit_code": code, "stdout": out, "stderr": err}
    output.emit(data)
    return code
