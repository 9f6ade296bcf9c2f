"""Remove old runs, and files that no run needs. Unfinished runs and sweeps are kept.

Without options, removes only leftovers of interrupted submits, unused bundles, and source files of
finished runs that their bundles also contain. With options, also removes the selected runs.

deploykit prune --older 30d --keep-last 10 --dry-run  what would be removed
deploykit prune --state failed --yes                  in a script
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deploykit.cli import arguments, output
from deploykit.job.model import State
from deploykit.lib import shell, units
from deploykit.lib.errors import CannotWrite, DeploykitError, UsageError
from deploykit.run import registry, storage
from deploykit.run import state as run_state
from deploykit.run.registry import Run
from deploykit.sweep import folder
from deploykit.sweep.folder import SweepRecord

_STATES = [state.value for state in State if state.final]


@dataclass(frozen=True)
class Removal:
    """What would be removed: its kind and name for people, and its size in bytes."""

    kind: str
    name: str
    state: str
    time: float
    size: int
    remove: Callable[[], None]
    left: Sequence[tuple[str, str | None]] = ()
    """Places elsewhere, and the command that removes each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--older",
        type=arguments.seconds,
        metavar="TIME",
        help="remove runs submitted longer ago than this, such as 30d or 12h, and equally old "
        "crash logs and ended sweeps without runs",
    )
    parser.add_argument(
        "--keep-last", type=_count, metavar="N", help="remove all matching runs except the newest N"
    )
    parser.add_argument(
        "--state",
        action="append",
        choices=_STATES,
        help=f"remove runs in this state: {', '.join(_STATES)} (repeatable)",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would be removed")
    parser.add_argument("--yes", action="store_true", help="remove without asking")


def run(args: argparse.Namespace) -> int:
    can_ask = sys.stdin.isatty() and output.on_terminal() and not args.json
    if not (args.dry_run or args.yes or can_ask):
        raise UsageError(
            "cannot ask for confirmation without a terminal",
            hint="add --yes, or --dry-run to see what would be removed",
        )
    removals = _found(args)
    if not args.json:
        _show(removals)
    go = not args.dry_run and removals and (args.yes or _agreed(len(removals)))
    outcomes = [(one, _removed(one)) for one in removals] if go else []
    removed = [one for one, outcome in outcomes if outcome]
    if args.json:
        output.emit({"found": list(map(_data, removals)), "removed": list(map(_data, removed))})
    elif removed:
        output.note(
            f"removed {units.plural(len(removed), 'item')}, "
            f"{units.size(sum(one.size for one in removed))}"
        )
    if not args.dry_run:
        storage.tidy_all()
    failed = any(outcome is False for _, outcome in outcomes)
    return CannotWrite.exit_code if failed else 0


def _found(args: argparse.Namespace) -> list[Removal]:
    """What goes: runs, the oldest last, then what no other run needs."""
    rows = run_state.refresh(registry.every())
    chosen = _but_needed(_selected(args, rows))
    names = {row.run for row in chosen}
    used = storage.references(rows)
    kept = storage.references(row for row in rows if row.run not in names)
    archives = storage.bundles().items()
    bundles = [path for name, path in archives if name in used and name not in kept]
    left = {row.run for row in rows} - names
    sweeps = [one for one in folder.every() if _is_old(args, one) and not _has_runs(one, left)]
    old = [path for path in storage.crashes() if args.older and _age(path) > args.older]
    return [
        *map(_of_run, chosen),
        *(_of_path("bundle", path) for path in bundles),
        *(_of_path("left over", path) for path in storage.leftovers(rows)),
        *map(_of_sweep, sweeps),
        *(_of_path("crash", path) for path in old),
    ]


def _selected(args: argparse.Namespace, rows: Sequence[Run]) -> list[Run]:
    """The runs that the options select; none without options."""
    if args.older is None and args.keep_last is None and not args.state:
        return []
    ended = [
        row
        for row in rows
        if storage.removable(row) and (not args.state or row.state in args.state)
    ]
    beyond = ended[args.keep_last or 0 :]
    return [
        row for row in beyond if args.older is None or registry.now() - row.created > args.older
    ]


def _but_needed(rows: Sequence[Run]) -> list[Run]:
    """Those of the runs that no sweep needs. Notes each sweep that needs others."""
    needed = storage.needed_by_sweeps(rows)
    for sweep in sorted(set(needed.values())):
        whole = shell.command("deploykit", "rm", sweep)
        output.note(
            f"the unfinished sweep {sweep} keeps its runs; `{whole}` removes the sweep and its runs"
        )
    return [row for row in rows if row.run not in needed]


def _of_run(row: Run) -> Removal:
    used = storage.run_usage(row.run)
    return Removal(
        *("run", row.run, row.state, row.created, used.size if used else 0),
        *(partial(storage.remove_run, row), storage.left_elsewhere(row)),
    )


def _is_old(args: argparse.Namespace, sweep: SweepRecord) -> bool:
    """Whether a sweep has ended, and `--older` selects it."""
    is_old = args.older is not None and registry.now() - sweep.created > args.older
    return is_old and sweep.finished


def _has_runs(sweep: SweepRecord, runs: Iterable[str]) -> bool:
    """Whether one of these runs is a trial of the sweep."""
    return any(storage.sweep_of(run, {sweep.id}) for run in runs)


def _of_sweep(sweep: SweepRecord) -> Removal:
    remove = partial(folder.remove, sweep)
    return Removal("sweep", sweep.id, "", sweep.created, storage.size(sweep.folder), remove)


def _of_path(kind: str, path: Path) -> Removal:
    name = f"{path.parent.name}/{path.name}"
    changed = registry.now() - _age(path)
    return Removal(kind, name, "", changed, storage.size(path), partial(storage.discard, path))


def _age(path: Path) -> float:
    """Seconds since the last change; 0 for what has just gone."""
    try:
        return registry.now() - path.lstat().st_mtime
    except OSError:
        return 0


def _show(removals: Sequence[Removal]) -> None:
    if not removals:
        output.note("nothing to remove")
        return
    rows = [
        [units.size(one.size), output.when(one.time)[:10], one.kind, one.state, one.name]
        for one in removals
    ]
    output.table(["size", "date", "what", "state", "name"], rows)
    output.note(
        f"{units.plural(len(removals), 'item')} to remove, "
        f"{units.size(sum(one.size for one in removals))}"
    )


def _agreed(count: int) -> bool:
    """Whether a person says yes."""
    output.note(f"Remove {units.plural(count, 'item')}? Type y and press Enter:")
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _removed(one: Removal) -> bool | None:
    """Remove one; whether that succeeded, None where another process has it. Notes the reason."""
    try:
        one.remove()
    except DeploykitError as error:
        output.note(f"{one.name}: {error}{f' ({error.hint})' if error.hint else ''}")
        return None if error.transient else False
    for location, command in one.left:
        if command:
            output.note(f"{one.name}: {location} remains; to remove it: {command}")
    return True


def _data(one: Removal) -> dict[str, object]:
    changed = output.when(one.time)
    return {
        "kind": one.kind,
        "name": one.name,
        "state": one.state,
        "bytes": one.size,
        "time": changed,
    }


def _count(text: str) -> int:
    """A whole number. Raises ArgumentTypeError."""
    return 0 if text == "0" else arguments.count(text)
