"""The actions of `sweep`, each a function of the command line. Imports Optuna."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.cli import output, sweep_report, sweep_watch
from deploykit.job import script as script_job
from deploykit.lib import paths as files
from deploykit.lib import shell, units
from deploykit.lib.errors import DeploykitError, NotFound, RunFailed, TryAgain, UsageError
from deploykit.run import lifecycle
from deploykit.sweep import file, folder, space, summary, trial_job
from deploykit.sweep.controller import Controller
from deploykit.sweep.file import SweepFile
from deploykit.sweep.folder import SweepRecord
from deploykit.sweep.summary import SweepSummary
from deploykit.sweep.trial_job import Defined, Request

INTERVAL, SHORTEST = 2.0, 0.5
"""Seconds between two updates of `watch`: default and minimum."""
_AGAIN = 0.2
"""Seconds between two attempts to take over from a controller that is ending."""


def start(args: argparse.Namespace) -> int:
    request = Request(
        tuple(args.set or ()), args.backend, args.sweep, tuple(args.arguments), dry=args.dry_run
    )
    defined = trial_job.define(_file(args), request)
    output.warnings(defined.warnings)
    _note_cost(defined)
    if args.dry_run:
        return _show_plan(defined, as_json=args.json)
    trial_job.keep(defined)
    return _control(defined.record, args)


def _note_cost(defined: Defined) -> None:
    """Print the maximum cost of the sweep, if it is billed, and how to limit it."""
    sweep = defined.record.sweep
    cost = trial_job.worst_cost(sweep, defined.base)
    if cost is None:
        return
    output.note(cost)
    if sweep.max_cost is None:
        output.note("  `max_cost` in the sweep file limits the total cost of all trials")
    if backend.offers(backend.find(defined.base.backend), "refresh_prices"):
        output.note("  `deploykit infra` can add an account budget with email alerts")


def _show_plan(defined: Defined, *, as_json: bool) -> int:
    """Print the plan of the first trial."""
    sweep, plan = defined.record.sweep, trial_job.first_plan(defined)
    trials = space.trials(sweep)
    if as_json:
        output.emit(
            {
                "sweep": defined.record.id,
                "backend": plan.backend,
                "trials": trials,
                "parallel": sweep.parallel,
                "cost": trial_job.worst_cost(sweep, defined.base),
                "run": plan.run,
                "text": plan.text,
                "warnings": [problem._asdict() for problem in defined.warnings],
            }
        )
        return 0
    output.note(f"{trials} trials on {plan.backend}, {sweep.parallel} at a time; first trial:")
    output.block(plan.text)
    return 0


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
        raise UsageError("a sweep file and --grid cannot be used together")
    if not args.metric:
        raise UsageError("--grid requires --metric", hint="--metric loss, or --metric accuracy")
    return file.from_grid(args.grid, keys)


def resume(args: argparse.Namespace) -> int:
    record = folder.find(args.name)
    record.ask_to_go_on()
    return _control(record, args)


def retry_failed(record: SweepRecord, *, as_json: bool) -> int:
    """Try each failed trial again with its values, and follow the sweep to its end.

    Raises UsageError if trials are left that have not run, if none has failed, or if each that has
    is tried again already; TryAgain while another process controls the sweep.
    """
    with folder.controlling(record):
        sweep = summary.of(record)
        if not record.finished or len(sweep.trials) < sweep.total:
            over = sum(one.state != "running" for one in sweep.trials)
            go_on = shell.command("deploykit", "sweep", "resume", record.id)
            raise UsageError(
                f"{over} of {units.plural(sweep.total, 'trial')} of {record.id} have ended",
                hint=f"run `{go_on}` first; --failed then reruns only the failed trials",
            )
        failed = [one.number for one in sweep.trials if one.state == "failed"]
        again = [number for number in failed if number not in record.retried]
        if not again:
            why = "all failed trials were already retried" if failed else "no trial has failed"
            raise UsageError(f"{record.id}: {why}")
        record.retry(again)
        record.ask_to_go_on()
    output.note(f"{record.id}: retrying trials {', '.join(map(str, again))}")
    return _run(record, as_json=as_json)


def _control(record: SweepRecord, args: argparse.Namespace) -> int:
    """Control a sweep to its end, here or in the background."""
    if args.detach:
        return _detach(record, as_json=args.json)
    return _run(record, as_json=args.json)


def _run(record: SweepRecord, *, as_json: bool) -> int:
    """Control a sweep to its end here."""
    go_on = shell.command("deploykit", "sweep", "resume", record.id)
    try:
        _follow(record)
    except KeyboardInterrupt:
        output.note(f"the runs continue; `{go_on}` resumes the sweep")
        raise
    except TryAgain:
        raise
    except DeploykitError as error:
        error.hint = "\n".join(filter(None, [error.hint, f"then resume the sweep with `{go_on}`"]))
        raise
    return _end(record, as_json=as_json)


def _follow(record: SweepRecord) -> None:
    with folder.controlling(record), trial_job.of(record) as base:
        trials = units.plural(record.total, "trial")
        output.note(f"{record.id}: {trials}, {record.sweep.parallel} at a time")
        Controller(record, folder.study(record), base, output.note).run()
        receivers = base.job.notify
    if receivers is not None:
        for sent in summary.notify_end(record, receivers):
            if sent.error:
                output.note(
                    f"{record.id}: {sent.receiver} did not receive the message: {sent.error}"
                )


def _end(record: SweepRecord, *, as_json: bool) -> int:
    """Show a sweep after its controller ended. Return the exit code."""
    sweep = summary.of(record)
    if as_json:
        output.emit(sweep.data())
    else:
        _show(sweep)
    stopped = record.stopping and not sweep.halted
    return 0 if sweep.best or stopped else RunFailed.exit_code


def _show(sweep: SweepSummary) -> None:
    output.say(*sweep_watch.lines(sweep))


def _detach(record: SweepRecord, *, as_json: bool) -> int:
    log = record.folder / "controller.log"
    shell.detach([sys.executable, "-P", "-m", "deploykit", "sweep", "resume", record.id], log)
    if as_json:
        output.emit({"sweep": record.id, "log": str(log)})
    else:
        output.say(f"{record.id}: running in the background; log: {log}")
    return 0


def status(args: argparse.Namespace) -> int:
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
            sweep_watch.settings(sweep.record, one),
            one.reason,
        ]
        for one in sweep.trials
    ]
    if rows:
        metric = sweep.record.sweep.objective.metric
        output.table(["trial", "state", metric, "run", "parameters", "reason"], rows)
    return 0


def list_(args: argparse.Namespace) -> int:
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


def stop(args: argparse.Namespace) -> int:
    record = folder.find(args.name)
    record.ask_to_stop()
    while True:
        try:
            _follow(record)  # cancels the remaining runs, and returns
            return _end(record, as_json=args.json)
        except TryAgain:  # its controller does that
            time.sleep(_AGAIN)


def best(args: argparse.Namespace) -> int:
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


def report(args: argparse.Namespace) -> int:
    record = folder.find(args.name)
    return sweep_report.write(record, args.output, force=args.force, as_json=args.json)


def watch(args: argparse.Namespace) -> int:
    record = folder.find(args.name)
    goes_on = output.is_live() and not (args.once or args.json)
    interval = max(args.interval or INTERVAL, SHORTEST) if goes_on else None
    return sweep_watch.show(record, interval, as_json=args.json)


def _write(record: SweepRecord, values: space.Values, path: Path) -> None:
    """Write the sweep's job file with a trial's values. Raises UsageError, NotFound."""
    passed = space.passed(record.sweep.parameters, values)
    overrides: list[str | tuple[str, str]] = list(record.overrides)
    overrides += [(f"env.{name}", one) for name, one in passed.env.items()]
    draft = lifecycle.read(Path(record.source), overrides)
    draft.data["backend"] = record.backend
    files.create(path, script_job.text(draft, passed.arguments, path.parent))
    output.note(f"wrote {path}")


ACTIONS = {
    "start": start,
    "status": status,
    "watch": watch,
    "list": list_,
    "stop": stop,
    "resume": resume,
    "best": best,
    "report": report,
}
