"""Send messages about a run to the receivers in `notify` of its job file, or test the receivers.

Each message is sent to each receiver once, so the command is safe to repeat. For a job with
`notify`, `submit` runs it in the background. --test sends a test message to the receivers in the
job file, if one exists, else to those in your config file, and shows each response. Exits with 69
if a message was not delivered.

deploykit notify --test
deploykit notify exp-1             send the messages that are due
deploykit notify exp-1 --follow    keep sending until the run ends
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from deploykit.cli import output
from deploykit.job import file as jobfile
from deploykit.job.model import Notify
from deploykit.lib.errors import BackendUnavailable, NotFound, UsageError
from deploykit.observe.receivers import Sent
from deploykit.run import lifecycle, registry
from deploykit.run import notify as run_notify
from deploykit.run import state as run_state

SHARED = ("run",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--test", action="store_true", help="send a test message to each receiver")
    parser.add_argument(
        "-f",
        "--file",
        type=Path,
        metavar="FILE",
        help=f"job file for --test (default: {jobfile.DEFAULT}, if it exists)",
    )
    parser.add_argument("--follow", action="store_true", help="keep sending until the run ends")


def run(args: argparse.Namespace) -> int:
    if args.file and not args.test:
        raise UsageError("--file applies only to --test")
    if args.run and args.test:
        raise UsageError(
            f"--test does not apply to a run, got {args.run!r}",
            hint="to test the receivers in a job file: deploykit notify --test --file job.yaml",
        )
    if args.test:
        sent = [("test", one) for one in run_notify.test(_of_file(args.file))]
    else:
        row = registry.get(args.run)
        if run_notify.settings(row) is None:
            raise NotFound(
                f"the job of {row.run} has no `notify`",
                hint=f"to use the receivers in your config file: deploykit wait {row.run} --notify",
            )
        if args.follow:
            return 0 if run_notify.follow(row, _say) else BackendUnavailable.exit_code
        sent = run_notify.Notices().see(run_state.refresh([row]))
    if args.json:
        output.emit(
            [
                {"run": run, "receiver": one.receiver, "error": one.error or None}
                for run, one in sent
            ]
        )
    else:
        _say(sent)
    return BackendUnavailable.exit_code if any(one.error for _, one in sent) else 0


def _of_file(path: Path | None) -> Notify:
    """`notify` of a job with the user's defaults, else of the config file alone."""
    if path is None and not Path(jobfile.DEFAULT).exists():
        return run_notify.of_user()
    job = lifecycle.load(path or Path(jobfile.DEFAULT), (), ()).job
    return job.notify or run_notify.of_user()


def _say(sent: Sequence[tuple[str, Sent]]) -> None:
    for run, one in sent:
        output.say(f"{run}: {one.receiver}: {one.error or 'delivered'}")
