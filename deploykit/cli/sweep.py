"""Search for the best hyperparameters of a job: each trial is a run with different arguments.

deploykit sweep sweep.yaml                   start, and follow until all trials have ended
deploykit sweep --grid lr=0.1,0.01 --metric loss     search a grid over job.yaml, without a file
deploykit sweep sweep.yaml -- --epochs 3     pass arguments to the script of every trial
deploykit sweep sweep.yaml --dry-run         show the maximum cost and one trial; start nothing
deploykit sweep status [SWEEP]               show a sweep's trials; `list` shows all sweeps
deploykit sweep stop [SWEEP]                 cancel a sweep's runs
deploykit sweep resume [SWEEP]               continue after `stop`, Ctrl-C or a crash
deploykit sweep best [SWEEP] --write best.yaml       write a job file with the best parameters
deploykit sweep report [SWEEP]               write an HTML report; `watch` shows a sweep live

Ctrl-C stops the controller, but not the runs. No trial is ever started twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.cli import arguments
from deploykit.job.spelling import did_you_mean
from deploykit.lib.errors import UsageError
from deploykit.sweep import folder

SHARED = ("backend",)
_ACTIONS = ("start", "status", "watch", "list", "stop", "resume", "best", "report")
_START = (
    *("grid", "job", "metric", "maximize", "set", "sweep", "parallel", "trials", "backend"),
    *("dry_run", "arguments"),
)
_ONLY = {
    ("start",): _START,
    ("start", "resume"): ("detach",),
    ("best",): ("write",),
    ("report",): ("output", "force"),
    ("watch",): ("once", "interval"),
}
"""Options of certain actions only."""
_FILES = {".yaml", ".yml", ".toml"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        metavar="ACTION",
        help=f"{', '.join(_ACTIONS)} (default with a file or --grid: start)",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="FILE|SWEEP",
        help="start: sweep file (default: sweep.yaml); other actions: sweep id (default: the "
        "newest)",
    )
    _add_for_start(parser)
    parser.add_argument(
        "--detach", action="store_true", help="start, resume: run the controller in the background"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="best: write a job file with the best parameters"
    )
    parser.add_argument(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="report: file to write (default: report-SWEEP.html)",
    )
    parser.add_argument("--force", action="store_true", help="report: replace an existing file")
    parser.add_argument(
        "--once", action="store_true", help="watch: print the current state once, and exit"
    )
    parser.add_argument(
        "--interval", type=arguments.seconds, metavar="TIME", help="watch: time between updates"
    )


def _add_for_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grid",
        action="append",
        metavar="NAME=V,V",
        help="start: values of a parameter to try (repeatable)",
    )
    parser.add_argument(
        "--job",
        metavar="FILE|SCRIPT",
        help="start: job of each trial (default: from the sweep file)",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="start: show the maximum cost and one trial; start nothing",
    )
    parser.add_argument("--metric", metavar="NAME", help="start: metric to minimize")
    parser.add_argument(
        "--maximize", action="store_true", help="start: maximize the metric instead"
    )
    parser.add_argument(
        "--trials", type=arguments.count, metavar="N", help="start: total number of trials"
    )
    parser.add_argument(
        "--parallel",
        type=arguments.count,
        metavar="N",
        help="start: maximum number of runs at a time",
    )
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="start: override a key of the job file"
    )
    parser.add_argument(
        "--sweep", metavar="ID", help="start: id of the sweep; run ids begin with it"
    )


def run(args: argparse.Namespace) -> int:
    args.action, args.name = _chosen(args)
    _refuse_others(args)
    folder.require_optuna()
    from deploykit.cli import sweep_actions  # imports Optuna, which was just found

    return sweep_actions.ACTIONS[args.action](args)


def _chosen(args: argparse.Namespace) -> tuple[str, str | None]:
    """Return the action and its object; `start` for a sweep file or a grid. Raises UsageError."""
    action: str | None = args.action
    if action in _ACTIONS:
        return action, args.name
    if action is None and args.grid:
        return "start", None
    if action is None:
        raise UsageError("an action is required", hint=", ".join(_ACTIONS))
    if Path(action).suffix in _FILES and args.name is None:
        return "start", action
    hint = did_you_mean(action, _ACTIONS) or f"actions: {', '.join(_ACTIONS)}"
    raise UsageError(f"unknown action {action!r}", hint=hint)


def _refuse_others(args: argparse.Namespace) -> None:
    """Raise UsageError for options of another action."""
    for actions, names in _ONLY.items():
        for name in names:
            if args.action not in actions and getattr(args, name) not in (None, False, []):
                known = " and ".join(f"`deploykit sweep {action}`" for action in actions)
                option = "an argument after `--`" if name == "arguments" else f"--{name}"
                raise UsageError(f"{option.replace('_', '-')} applies only to {known}")
