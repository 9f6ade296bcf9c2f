"""Open a shell next to a rank of a running run: on its node, in its folder and environment.

It ends with `exit`; the run goes on. With --json, print the command that opens it instead. With
--debugger connect your editor to the rank that waits for it (`submit --debugger`): the settings of
VS Code are printed, and connections are passed on until the run ends.

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

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the rank, and what its editor needs."""
    parser.add_argument(
        "--rank", type=arguments.rank, metavar="N", help="rank to open it next to (default: 0)"
    )
    parser.add_argument(
        "--debugger", action="store_true", help="connect an editor to the rank that waits for it"
    )
    parser.add_argument(
        "--port",
        type=arguments.count,
        default=enter.DEBUGGER_PORT,
        metavar="N",
        help=f"port of this machine for the editor (default: {enter.DEBUGGER_PORT})",
    )


def run(args: argparse.Namespace) -> int:
    """Become the shell, or print its command; or serve an editor."""
    row = registry.get(args.run)
    if args.debugger:
        return _debug(row, args.port, as_json=args.json)
    if not args.json and not programs.has_person():
        hint = "`deploykit exec RUN -- COMMAND` needs none"
        raise UsageError("a shell needs a terminal for its input and output", hint=hint)
    rank = args.rank or 0
    command = enter.argv(row, rank, (), terminal=True)
    if not args.json:
        output.note(f"{row.run}, rank {rank}: `exit` ends this shell")
        programs.become(command)
    output.emit({"run": row.run, "rank": rank, "command": command})
    return 0


def _debug(row: Run, port: int, *, as_json: bool) -> int:
    """Print what the editor needs as soon as the rank runs, and pass its connections on."""
    rank = enter.debugged_rank(row)
    output.note(f"{row.run}: waiting until rank {rank} runs; Ctrl-C ends this, the run goes on")
    remote = enter.working_folder(row, rank)
    with enter.listen_for_editor(port) as server:
        configuration = enter.editor_configuration(row, rank, remote, port)
        if not as_json:
            output.note("in VS Code: .vscode/launch.json, below `configurations`; then F5")
        output.emit(configuration)
        for _ in enter.serve_debugger(row, rank, server):
            output.note("an editor has connected")
    output.note(f"{row.run} has ended")
    return 0
