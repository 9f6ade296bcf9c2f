"""Open a shell next to a rank of a running run: on its node, in its folder and environment.

Type `exit` to leave; the run continues. With --json, print the command that opens the shell. With
--debugger, connect your editor to a rank that waits for a debugger (`submit --debugger`): prints
the settings for VS Code, and forwards its connections until the run ends.

deploykit shell                    rank 0 of the newest run
deploykit shell exp-1 --rank 3
deploykit shell exp-1 --debugger
"""

from __future__ import annotations

import argparse

from deploykit.cli import arguments, output
from deploykit.lib import shell as programs
from deploykit.lib.errors import UsageError
from deploykit.run import enter, registry
from deploykit.run.registry import Run

SHARED = ("run", "rank")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--debugger",
        action="store_true",
        help="connect an editor to the rank that waits for a debugger",
    )
    parser.add_argument(
        "--port",
        type=arguments.count,
        default=enter.DEBUGGER_PORT,
        metavar="N",
        help=f"local port for the editor (default: {enter.DEBUGGER_PORT})",
    )


def run(args: argparse.Namespace) -> int:
    row = registry.get(args.run)
    if args.debugger:
        return _debug(row, args.port, as_json=args.json)
    if not args.json and not programs.has_person():
        hint = "`deploykit exec RUN -- COMMAND` works without one"
        raise UsageError("a shell requires a terminal for input and output", hint=hint)
    command = enter.argv(row, args.rank, (), terminal=True)
    if not args.json:
        output.note(f"{row.run}, rank {args.rank}: type `exit` to leave this shell")
        programs.become(command)
    output.emit({"run": row.run, "rank": args.rank, "command": command})
    return 0


def _debug(row: Run, port: int, *, as_json: bool) -> int:
    """Print what the editor needs as soon as the rank runs, and pass its connections on."""
    rank = enter.debugged_rank(row)
    output.note(f"{row.run}: waiting for rank {rank} to start; Ctrl-C stops the wait, not the run")
    remote = enter.working_folder(row, rank)
    with enter.listen_for_editor(port) as server:
        configuration = enter.editor_configuration(row, rank, remote, port)
        if not as_json:
            output.note(
                "add this to `configurations` in .vscode/launch.json, then press F5 in VS Code"
            )
        output.emit(configuration, foreign=True)
        for _ in enter.serve_debugger(row, rank, server):
            output.note("editor connected")
    output.note(f"{row.run} has ended")
    return 0
