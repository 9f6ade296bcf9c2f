"""Copy the results of a run to this machine, from S3 or from the cluster's login node.

By default, only the results (`--output`) are copied. Unchanged files are skipped, so an interrupted
fetch continues where it stopped. SageMaker's archives are unpacked into output/ and model/.

deploykit fetch                                      the newest run's results
deploykit fetch exp-1                                results, into exp-1/output and exp-1/model
deploykit fetch exp-1 --checkpoints -p 'step-01*'    some checkpoints, into exp-1/checkpoints
deploykit fetch exp-1 --output --checkpoints --logs --to /data/exp-1
"""

from __future__ import annotations

import argparse
from pathlib import Path

from deploykit.backends import base as backend
from deploykit.cli import describe, output
from deploykit.cli.progress_bar import watching
from deploykit.lib import units
from deploykit.observe import exit_records
from deploykit.run import fetch as run_fetch
from deploykit.run import log_selection, registry
from deploykit.run.log_selection import Selection
from deploykit.run.registry import Run

SHARED = ("run",)
_SHOWN = 20
"""Files that a dry run lists one by one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for part, text in (
        ("output", "copy the results (default)"),
        ("checkpoints", "copy the checkpoints"),
        ("logs", "copy the merged logs of all ranks, as logs.txt"),
    ):
        parser.add_argument(f"--{part}", action="store_true", help=text)
    parser.add_argument(
        *("-p", "--pattern"),
        action="append",
        default=[],
        metavar="PATTERN",
        help="copy only files whose path or parent folder matches; * matches any text (repeatable)",
    )
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="destination folder (default: ./RUN)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="list what would be copied, and what it costs"
    )


def run(args: argparse.Namespace) -> int:
    row = registry.get(args.run)
    parts = [part for part in run_fetch.PARTS if getattr(args, part)]
    if not parts and not args.logs:
        parts = ["output"]
    target = args.to or Path(row.run)
    listing = run_fetch.listing(row, parts)
    if not (listing.files or args.json):
        output.note(*describe.written_lines(row))
    if args.to is None and parts and listing.here.issuperset(parts):
        return _say_where(row, parts, as_json=args.json)
    files = run_fetch.matching(row, listing.files, args.pattern)
    wanted = run_fetch.missing(files, target)
    if not args.dry_run:
        with watching():
            run_fetch.fetch(row, wanted, listing.here, target)
        if args.logs:
            _write_logs(row, target)
    _report(row, files, wanted, target, args)
    return 0


def _say_where(row: Run, parts: list[str], *, as_json: bool) -> int:
    """The files are here already: nothing is copied without a place to copy them to."""
    folders = {part: str(run_fetch.folder_here(row, part)) for part in parts}
    if as_json:
        output.emit({"run": row.run, "on_this_machine": folders})
    else:
        output.say(
            *(f"{part}: already on this machine, in {folder}" for part, folder in folders.items())
        )
        written = exit_records.written(Path(row.folder))
        only = written and written.checkpoints.count and not written.output.count
        if only and parts == ["output"]:
            output.note("to copy the checkpoints, use --checkpoints --to FOLDER")
        else:
            output.note("to copy them, use --to FOLDER")
    return 0


def _write_logs(row: Run, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    temporary = target / ".logs.txt.part"
    with temporary.open("w", encoding="utf-8", errors="replace") as file:
        for line in log_selection.of_run(row, Selection(), follow=False):
            file.write(f"{line.origin}{line.text}\n")
    temporary.replace(target / "logs.txt")


def _report(
    row: Run,
    files: list[run_fetch.Listed],
    wanted: list[run_fetch.Listed],
    target: Path,
    args: argparse.Namespace,
) -> None:
    size = sum(one.file.size for one in wanted)
    engine = backend.find(row.backend)
    price = None
    if wanted and backend.offers(engine, "transfer_price"):
        price = engine.transfer_price(size)
    if args.json:
        listed = [{"path": one.path, "bytes": one.file.size} for one in wanted]
        data = {"run": row.run, "to": str(target), "files": listed, "bytes": size}
        output.emit({**data, "unchanged": len(files) - len(wanted), "price": price})
        return
    counted = f"{units.plural(len(wanted), 'file')}, {units.size(size)}"
    unchanged = len(files) - len(wanted)
    kept = f"; {units.plural(unchanged, 'unchanged file')} skipped" if unchanged else ""
    if args.dry_run:
        largest = sorted(wanted, key=lambda one: -one.file.size)
        output.say(*(f"{units.size(one.file.size):>10}  {one.path}" for one in largest[:_SHOWN]))
        if len(largest) > _SHOWN:
            output.say(f"{'':>10}  and {len(largest) - _SHOWN} more")
        output.say(f"would copy {counted} to {target}{kept}")
    elif not files and not args.logs:
        output.say(f"{row.run}: no files were found to copy")
    else:
        output.say(f"{row.run}: copied {counted} to {target}{kept}")
    if price:
        output.note(price)
