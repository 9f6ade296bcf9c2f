"""Search for the best hyperparameters of a job: each trial is a run with different arguments.

deploykit sweep sweep.yaml                   start, and follow until all trials have ended
deploykit sweep --grid lr=0.1,0.01 --metric loss     a grid over job.yaml, without a file
deploykit sweep status [SWEEP]               show its trials; `list` shows all sweeps
deploykit sweep stop [SWEEP]                 cancel its runs
deploykit sweep resume [SWEEP]               continue after `stop`, Ctrl-C or a crash
deploykit sweep best [SWEEP] --write best.yaml
deploykit sweep report [SWEEP]               one HTML file; `watch` shows a sweep live

Ctrl-C stops the controller but no run. No trial is ever started twice.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from deploykit.cli import arguments, output
from deploykit.job import script as script_job
from deploykit.job.spelling import did_you_mean
from deploykit.lib import paths as files
from deploykit.lib import shell
from deploykit.lib.errors import DeploykitError, NotFound, RunFailed, TryAgain, UsageError
from deploykit.run import lifecycle
from deploykit.sweep import file, folder, space, trial_job
from deploykit.sweep.file import SweepFile
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.trial_job import Request

if TYPE_CHECKING:
    from deploykit.sweep.summary import SweepSummary

SHARED = ("backend",)
_ACTIONS = ("start", "status", "watch", "list", "stop", "resume", "best", "report")
_START = ("grid", "job", "metric", "maximize", "set", "sweep", "parallel", "trials", "backend")
_ONLY = {
    ("start",): _START,
    ("start", "resume"): ("detach",),
    ("best",): ("write",),
    ("report",): ("output", "force"),
    ("watch",): ("once", "interval"),
}
"""Options that only some of the actions take."""
_FILES = {".yaml", ".yml", ".toml"}
_INTERVAL, _SHORTEST = 2.0, 0.5
"""Seconds between two looks of `watch`: by default, and at least."""
_AGAIN = 0.2
"""Seconds between two attempts to take over from a controller that ends."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action",
        nargs="?",
        metavar="ACTION",
        help=f"{', '.join(_ACTIONS)}; with only a file or --grid: start",
    )
    parser.add_argument(
        "name",
        nargs="?",
        metavar="FILE|SWEEP",
        help="start: the sweep file (default: sweep.yaml); others: the sweep (default: the newest)",
    )
    _add_for_start(parser)
    parser.add_argument(
        "--detach", action="store_true", help="start, resume: run the controller in the background"
    )
    parser.add_argument(
        "--write", type=Path, metavar="FILE", help="best: write a job file with its values"
    )
    parser.add_argument(
        *("-o", "--output"), type=Path, metavar="FILE", help="report: default report-SWEEP.html"
    )
    parser.add_argument("--force", action="store_true", help="report: replace the file")
    parser.add_argument(
        "--once", action="store_true", help="watch: print the current state once, and exit"
    )
    parser.add_argument(
        "--interval", type=arguments.seconds, metavar="TIME", help="watch: time between updates"
    )


def _add_for_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--grid", action="append", metavar="NAME=V,V", help="start: values to try (repeatable)"
    )
    parser.add_argument(
        "--job", metavar="FILE|SCRIPT", help="start: the job of each trial (default: the file's)"
    )
    parser.add_argument("--metric", metavar="NAME", help="start: the metric to minimize")
    parser.add_argument(
        "--maximize", action="store_true", help="start: maximize the metric instead"
    )
    parser.add_argument(
        "--trials", type=arguments.count, metavar="N", help="start: total number of trials"
    )
    parser.add_argument(
        "--parallel", type=arguments.count, metavar="N", help="start: number of runs at a time"
    )
    parser.add_argument(
        "--set", action="append", metavar="KEY=VALUE", help="start: override a key of the job"
    )
    parser.add_argument(
        "--sweep", metavar="ID", help="start: id of the sweep; run ids begin with it"
    )


def run(args: argparse.Namespace) -> int:
    args.action, args.name = _chosen(args)
    _refuse_others(args)
    folder.require_optuna()
    return _RUN[args.action](args)


def _chosen(args: argparse.Namespace) -> tuple[str, str | None]:
    """The action and what it acts on; `start` for a sweep file or a grid. Raises UsageError."""
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
            if args.action not in actions and getattr(args, name) not in (None, False):
                known = " and ".join(f"`deploykit sweep {action}`" for action in actions)
                raise UsageError(f"--{name} is for {known}")


def _start(args: argparse.Namespace) -> int:
    request = Request(tuple(args.set or ()), args.backend, args.sweep)
    defined = trial_job.define(_file(args), request)
    output.warnings(defined.warnings)
    trial_job.keep(defined)
    return _control(defined.record, args)


def _file(args: argparse.Namespace) -> SweepFile:
    keys = [
        *([f"job={args.job}"] if args.job else []),
        *([f"objective.metric={args.metric}"] if args.metric else []),
        *(["objective.direction=maximize"] if args.maximize else []),
        *([f"trials={args.trials}"] if args.trials else []),
        *([f"parallel={args.parallel}"] if args.parallel else []),
    ]
    if not args.grid:
        return file.read(Path(args.name or "sweep.yaml"), keys)
    if args.name is not None:
        raise UsageError("a sweep file and --grid are both given", hint="choose one")
    if not args.metric:
        raise UsageError("--grid requires --metric", hint="--metric loss, or --metric accuracy")
    return file.from_grid(args.grid, keys)


def _resume(args: argparse.Namespace) -> int:
    record = folder.find(args.name)
    record.ask_to_go_on()
    return _control(record, args)


def _control(record: SweepRecord, args: argparse.Namespace) -> int:
    """Control a sweep to its end, here or in the background."""
    if args.detach:
        return _detach(record, as_json=args.json)
    go_on = shell.command("deploykit", "sweep", "resume", record.id)
    try:
        _follow(record)
    except KeyboardInterrupt:
        output.note(f"its runs continue; `{go_on}` continues the sweep")
        raise
    except TryAgain:
        raise
    except DeploykitError as error:
        error.hint = "\n".join(filter(None, [error.hint, f"then `{go_on}` continues the sweep"]))
        raise
    return _end(record, as_json=args.json)


def _follow(record: SweepRecord) -> None:
    from deploykit.sweep.controller import Controller  # imports Optuna

    with folder.controlling(record), trial_job.of(record) as base:
        trials = space.trials(record.sweep)
        output.note(f"{record.id}: {trials} trials, {record.sweep.parallel} at a time")
        Controller(record, folder.study(record), base, output.note).run()


def _end(record: SweepRecord, *, as_json: bool) -> int:
    """Show a sweep that is no longer controlled; whether a trial has succeeded."""
    from deploykit.sweep import summary

    sweep = summary.of(record)
    if as_json:
        output.emit(sweep.data())
    else:
        _show(sweep)
    return 0 if sweep.best or record.stopping else RunFailed.exit_code


def _show(sweep: SweepSummary) -> None:
    from deploykit.cli import sweep_watch  # imports Optuna

    output.say(*sweep_watch.lines(sweep))


def _detach(record: SweepRecord, *, as_json: bool) -> int:
    log = record.folder / "controller.log"
    shell.detach([sys.executable, "-P", "-m", "deploykit", "sweep", "resume", record.id], log)
    if as_json:
        output.emit({"sweep": record.id, "log": str(log)})
    else:
        output.say(f"{record.id}: controlled in the background; its log is {log}")
    return 0


def _status(args: argparse.Namespace) -> int:
    from deploykit.cli import sweep_watch  # imports Optuna
    from deploykit.sweep import summary

    sweep = summary.of(folder.find(args.name))
    if args.json:
        output.emit(sweep.data())
        return 0
    _show(sweep)
    rows = [
        [
            str(one.number),
            one.state,
            "-" if one.value is None else f"{one.value:.6g}",
            one.runs[-1].run if one.runs else "-",
            sweep_watch.settings(one),
            one.reason,
        ]
        for one in sweep.trials
    ]
    if rows:
        metric = sweep.record.sweep.objective.metric
        output.table(["trial", "state", metric, "run", "parameters", "reason"], rows)
    return 0


def _list(args: argparse.Namespace) -> int:
    from deploykit.sweep import summary

    sweeps = [summary.of(record) for record in folder.every()]
    unread = folder.unread()
    output.note(*(f"not listed: {name} {why}" for name, why in unread.items()))
    if args.json:
        output.emit([{**one.data(), "trials": len(one.trials)} for one in sweeps])
        return 0
    rows = [
        [one.record.id, one.state, f"{len(one.trials)}/{one.total}", one.record.backend]
        for one in sweeps
    ]
    output.table(["sweep", "state", "trials", "backend"], rows)
    if not rows and not unread:
        output.note("no sweeps yet; `deploykit sweep start` starts one")
    return 0


def _stop(args: argparse.Namespace) -> int:
    record = folder.find(args.name)
    record.ask_to_stop()
    while True:
        try:
            _follow(record)  # cancels what is left, and returns
            return _end(record, as_json=args.json)
        except TryAgain:  # its controller does that
            time.sleep(_AGAIN)


def _best(args: argparse.Namespace) -> int:
    from deploykit.cli import sweep_watch  # imports Optuna
    from deploykit.sweep import summary

    record = folder.find(args.name)
    sweep = summary.of(record)
    best = sweep.best
    if best is None:
        raise NotFound(
            f"no trial of {record.id} has succeeded",
            hint=f"`{shell.command('deploykit', 'sweep', 'status', record.id)}` shows why",
        )
    if args.write:
        _write(record, best.values, args.write)
    if args.json:
        run = best.runs[-1].run if best.runs else None
        output.emit({"sweep": record.id, "run": run, **best.data()})
        return 0
    output.say(
        f"{record.id}: trial {best.number}: {record.sweep.objective.metric} {best.value:.6g}"
    )
    output.say(*(f"  {name} = {value}" for name, value in best.values.items()))
    output.say(*sweep_watch.spread(sweep))
    output.say(*(f"  run     {row.run}" for row in best.runs))
    return 0


def _report(args: argparse.Namespace) -> int:
    from deploykit.cli import sweep_report  # imports Optuna

    record = folder.find(args.name)
    return sweep_report.write(record, args.output, force=args.force, as_json=args.json)


def _watch(args: argparse.Namespace) -> int:
    from deploykit.cli import sweep_watch  # imports Optuna

    record = folder.find(args.name)
    goes_on = output.is_live() and not (args.once or args.json)
    interval = max(args.interval or _INTERVAL, _SHORTEST) if goes_on else None
    return sweep_watch.show(record, interval, as_json=args.json)


def _write(record: SweepRecord, values: space.Values, path: Path) -> None:
    """Write the job file of the sweep with the values of a trial. Raises UsageError, NotFound."""
    passed = space.passed(record.sweep.parameters, values)
    overrides: list[str | tuple[str, str]] = list(record.overrides)
    overrides += [(f"env.{name}", one) for name, one in passed.env.items()]
    draft = lifecycle.read(Path(record.source), overrides)
    draft.data["backend"] = record.backend
    files.create(path, script_job.text(draft, passed.arguments, path.parent))
    output.note(f"wrote {path}")


_RUN = {
    "start": _start,
    "status": _status,
    "watch": _watch,
    "report": _report,
    "list": _list,
    "stop": _stop,
    "resume": _resume,
    "best": _best,
}
