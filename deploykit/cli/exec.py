"""Run a command next to a rank of a running run: on its node, in its folder and environment.

The command takes over this terminal, and `exec` exits with its exit code. The run is not
interrupted. With --json, the command's output and exit code are printed when it ends.

deploykit exec exp-1 -- nvidia-smi
deploykit exec exp-1 --rank 3 -- python -c 'import torch; print(torch.__version__)'
"""

from __future__ import annotations

import argparse

from deploykit.cli import output
from deploykit.lib import shell
from deploykit.lib.errors import UsageError
from deploykit.run import enter, registry

SHARED = ("run", "rank")
_LONGEST = 86400.0
"""Seconds for a command whose output is printed as JSON."""


def run(args: argparse.Namespace) -> int:
    """Become the command; with --json run it, and return its exit code."""
    if not args.arguments:
        raise UsageError("a command is required", hint="put it after `--`, as in `-- nvidia-smi`")
    row = registry.get(args.run)
    terminal = shell.has_person() and not args.json
    command = enter.argv(row, args.rank, args.arguments, terminal=terminal)
    if not args.json:
        shell.become(command)
    code, out, err = shell.run(command, timeout=_LONGEST)
    data = {"run": row.run, "rank": args.rank, "exit_code": code, "stdout": out, "stderr": err}
    output.emit(data)
    return code
