"""Run a job on a backend. With --dry-run, print exactly what would be sent, and send nothing.

Arguments after `--` are passed to the script, after those of the job file. A script can run without
a job file; if one exists, the script replaces its entrypoint.

deploykit submit -- --lr 0.1
deploykit submit train.py --nodes 2 --processes-per-node 4 -- --lr 0.1
deploykit submit -m package.train --time-limit 1h --backend slurm --save job.yaml
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit.backends import base as backend
from deploykit.cli import arguments, describe, output
from deploykit.cost import cap
from deploykit.job import script as script_job
from deploykit.job.checks import DEBUGGER
from deploykit.job.file import Option, Overrides
from deploykit.job.model import DataFolder, Entry
from deploykit.lib import paths, units
from deploykit.lib.errors import UsageError
from deploykit.run import lifecycle
from deploykit.run.lifecycle import Prepared

if TYPE_CHECKING:
    from deploykit.cost.estimate import Estimate

_LARGE = 10_000_000
"""Bytes of a source above which its largest files are named."""
_SHOWN = 3
_LISTED = 20
"""Files of a folder of data that a dry run lists one by one."""
_SWITCHES = ("preflight", "debug", "stop_at_cap")
_VALUES = ("max_cost", "profile")
"""Options that are keys of a job: those without and with a value."""
SHARED = ("job", "backend", "strict", "sending")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="test the network between the nodes first, for at most 30 seconds",
    )
    parser.add_argument(
        "--debug", action="store_true", help="write debug output of NCCL and PyTorch to files"
    )
    parser.add_argument(
        "--profile",
        metavar="torch:FIRST:LAST",
        help="profile these optimizer steps on all ranks, for `deploykit profile`; nsys or "
        "nsys:FIRST:LAST uses Nsight Systems; memory saves a snapshot when a GPU runs out of "
        "memory",
    )
    parser.add_argument(
        "--debugger",
        nargs="?",
        type=arguments.rank,
        const=0,
        metavar="RANK",
        help="make this rank (default: 0) wait for a debugger; attach with "
        "`deploykit shell --debugger`; requires debugpy on the node",
    )
    parser.add_argument(
        "--max-cost",
        metavar="MONEY",
        help="refuse a job that could cost more than this, such as '50 USD'",
    )
    parser.add_argument(
        "--stop-at-cap",
        action="store_true",
        help="with --max-cost: submit the job anyway, and stop it before it exceeds the cap",
    )
    parser.add_argument(
        "--init-from",
        metavar="RUN|FOLDER",
        help="start from the weights of a run's last checkpoint, a package made by `deploykit "
        "export`, or a Hugging Face folder",
    )
    parser.add_argument(
        "--run", metavar="ID", help="run id; submitting the same id again never starts a second job"
    )
    parser.add_argument(
        "--yes", action="store_true", help="upload more than 10 GB of data without asking"
    )
    parser.add_argument(
        "--save", type=Path, metavar="FILE", help="also write this job to a new job file"
    )


def run(args: argparse.Namespace) -> int:
    """Submit the job, or print its plan; with --wait, return the job's exit code."""
    with _bars():
        prepared, overrides = _prepared(args)
    if args.strict:
        lifecycle.refuse(args.job, prepared.warnings)
    output.warnings(prepared.warnings)
    if args.job.suffix == ".py" and isinstance(prepared.source, Path) and prepared.source.exists():
        output.note(f"note: running {args.job} with the settings from {prepared.source}")
    if prepared.others:
        output.note(_default_used(prepared))
    if args.save:
        _save(args, overrides)
    if not args.json:
        _name_largest(prepared)
    if args.dry_run:
        show(prepared, as_json=args.json)
        return 0
    announce(prepared)
    yes = args.yes or _agreed(prepared, args)
    with _bars():
        row = lifecycle.submit(prepared.plan, yes=yes)
    if not args.wait:
        if args.json:
            output.emit(describe.run_data(row))
        else:
            describe.run_brief(row)
            output.note(f"source: {_files(prepared)}")
        return 0
    output.note(f"{row.run}: submitted as {row.handle}; its folder is {row.folder}")
    output.note(f"source: {_files(prepared)}")
    from deploykit.cli import wait  # not needed for a dry run

    return wait.follow(row, as_json=args.json, timeout=None)


def _prepared(args: argparse.Namespace) -> tuple[Prepared, Overrides]:
    """The plan, and the overrides that the command line has made."""
    overrides: Overrides = [*args.set, *_switches(args)]
    given = (args.backend, args.run, args.arguments)
    if not args.init_from:
        return lifecycle.prepare(args.job, overrides, *given, pack=not args.dry_run), overrides
    from deploykit.run import model_channel  # imports much

    overrides = model_channel.init_from(
        args.init_from, args.job, overrides, args.backend, fetch=not args.dry_run
    )
    prepared = lifecycle.prepare(args.job, overrides, *given, pack=not args.dry_run)
    model_channel.require_init_from(prepared.plan)
    return prepared, overrides


def _default_used(prepared: Prepared) -> str:
    """Say that the job has sections, of other backends than the default one, which it uses."""
    others, used = " or ".join(prepared.others), prepared.plan.backend
    return f"note: runs on {used}, the default backend; use -b to choose {others} instead"


def _bars() -> contextlib.AbstractContextManager[None]:
    """Bars meanwhile on a terminal, where much is packed or sent."""
    if not output.on_terminal():
        return contextlib.nullcontext()
    from deploykit.cli.progress_bar import watching

    return watching()


def _switches(args: argparse.Namespace) -> list[Option]:
    """The overrides that options of a submit are."""
    values = {name: "true" for name in _SWITCHES if getattr(args, name)}
    values |= {name: value for name in _VALUES if (value := getattr(args, name))}
    own = [Option(f"--{name.replace('_', '-')}", f"{name}={values[name]}") for name in values]
    if args.debugger is not None:
        own.append(Option("--debugger", f"env.{DEBUGGER}='{args.debugger}'"))
    return own


def _agreed(prepared: Prepared, args: argparse.Namespace) -> bool:
    """Whether a person at the terminal agrees to upload much data; False if that is not asked.

    Raises UsageError if they do not agree.
    """
    if args.json or not output.can_ask() or not (size := lifecycle.much_data(prepared.plan)):
        return False
    if output.ask(f"Upload {units.size(size)} of data?", ("no", "yes")) == "no":
        raise UsageError("nothing was sent")
    return True


def announce(prepared: Prepared) -> None:
    """Note where a job goes, which data are uploaded and what it may cost, before it is sent."""
    if prepared.plan.summary:
        output.note(prepared.plan.summary)
    _note_data(prepared)
    _note_cost(prepared)


def _note_data(prepared: Prepared, *, listed: bool = False) -> None:
    """Note each folder of data that is uploaded unless the target has it; `listed`: its files."""
    for folder in prepared.plan.data:
        counted = f"{units.plural(len(folder.files), 'file')}, {units.size(folder.size)}"
        price = _storage_price(prepared, folder)
        output.note(
            f"data.{folder.channel}: {counted} in {folder.source}",
            f"  uploaded once to {folder.target}" + (f"; {price}" if price else ""),
        )
        if listed:
            largest = sorted(folder.files, key=lambda file: -file.size)
            output.note(
                *(f"{units.size(file.size):>12}  {file.path}" for file in largest[:_LISTED])
            )
            if len(largest) > _LISTED:
                output.note(f"{'':>12}  and {len(largest) - _LISTED:,} more")


def _storage_price(prepared: Prepared, folder: DataFolder) -> str | None:
    engine = backend.find(prepared.plan.backend)
    return engine.storage_price(folder.size) if backend.offers(engine, "storage_price") else None


def _note_cost(prepared: Prepared) -> Estimate | None:
    """Note what a job may cost, where something is billed; and return that."""
    estimate = lifecycle.billed(prepared.plan)
    if estimate is not None:
        output.note(estimate.summary())
        if stop := cap.stop(prepared.plan.job, estimate):
            after = units.exact_span(stop[1])
            output.note(
                f"the run will be stopped after {after}, before it costs more than {stop[0]}"
            )
        if prepared.plan.job.budget is not None:
            output.note(str(describe.budget(prepared.plan.job.budget)))
    return estimate


def _files(prepared: Prepared) -> str:
    """How much travels, besides the node plane."""
    sizes = [entry.size for entry in _entries(prepared)]
    return f"{units.plural(len(sizes), 'file')}, {units.size(sum(sizes))}"


def _entries(prepared: Prepared) -> list[Entry]:
    """The source's own files and links."""
    return [entry for entry in prepared.plan.bundle.entries if entry.content is None]


def _name_largest(prepared: Prepared) -> None:
    """Note how large a large source is, and why."""
    entries = sorted(_entries(prepared), key=lambda entry: -entry.size)
    if sum(entry.size for entry in entries) > _LARGE:
        large = [entry for entry in entries if entry.size > _LARGE // 100] or entries
        largest = (f"{entry.path} ({units.size(entry.size)})" for entry in large[:_SHOWN])
        output.note(
            f"source: {_files(prepared)}; largest: {', '.join(largest)}",
            "  to exclude files that the job does not need, list them in .deploykitignore",
        )


def _save(args: argparse.Namespace, overrides: Overrides) -> None:
    """Write the job file of this job. Raises UsageError where the file exists."""
    draft = lifecycle.read(args.job, overrides)
    if args.backend:
        draft.data["backend"] = args.backend
    paths.create(args.save, script_job.text(draft, args.arguments, args.save.parent))
    output.note(f"wrote {args.save}")


def show(prepared: Prepared, *, as_json: bool) -> None:
    """Print the text of a plan, or all of it as JSON; what it may cost, as a remark."""
    plan, estimate = prepared.plan, _note_cost(prepared)
    if not as_json:
        if plan.sent_with:
            output.note(f"sent with {plan.sent_with}")
        _note_data(prepared, listed=True)
        output.block(plan.text)
        return
    output.emit(data(prepared, estimate))


def data(prepared: Prepared, estimate: Estimate | None) -> dict[str, Any]:
    """A plan as JSON, with what it may cost."""
    plan = prepared.plan
    return {
        "run": plan.run,
        "backend": plan.backend,
        "target": plan.target,
        "language": plan.language,
        "text": plan.text,
        "bundle": {
            "hash": plan.bundle.hash,
            "bytes": plan.bundle.size,
            "commit": plan.bundle.commit,
            "files": [entry.path for entry in plan.bundle.entries],
            "kept_back": list(plan.bundle.kept_back),
        },
        "data": [_folder_data(prepared, folder) for folder in plan.data],
        "cost": estimate and estimate.data(),
        "warnings": [problem._asdict() for problem in prepared.warnings],
    }


def _folder_data(prepared: Prepared, folder: DataFolder) -> dict[str, Any]:
    return {
        "channel": folder.channel,
        "source": str(folder.source),
        "target": folder.target,
        "bytes": folder.size,
        "files": [{"path": file.path, "bytes": file.size} for file in folder.files],
        "price": _storage_price(prepared, folder),
    }
