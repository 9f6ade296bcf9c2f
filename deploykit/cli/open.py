"""Print the pages of a run, and open them in a browser if this machine has a desktop.

The pages are the job and its log in the console, the run in its trackers, and the report in the
current folder, if `deploykit report RUN` has written one. No backend is queried.

deploykit open exp-1
deploykit open exp-1 --only logs --print
"""

from __future__ import annotations

import argparse
import os

from deploykit.backends import base as backend
from deploykit.cli import output, report
from deploykit.job.spelling import did_you_mean
from deploykit.lib import shell
from deploykit.lib.errors import BackendUnavailable, UsageError
from deploykit.run import registry
from deploykit.run import tracking as run_tracking
from deploykit.run.registry import Run

SHARED = ("run",)
_OPENED = ("https://", "http://", "file://")
"""Other addresses are commands and folders: they are only printed."""
_REPORT = "report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="PAGE",
        help="use only this page, such as console, logs, mlflow or report (repeatable)",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the addresses without opening a browser"
    )


def run(args: argparse.Namespace) -> int:
    row = registry.get(args.run)
    pages = _chosen(_pages(row), args.only)
    if args.json:
        output.emit([{"run": row.run, "page": name, "address": at} for name, at in pages.items()])
        return 0
    width = max(map(len, pages), default=0)
    output.say(*(f"{name:<{width}}  {address}" for name, address in pages.items()))
    if not pages:
        output.note(f"{row.run} has no pages; {_how_to_write_one(row)}")
    elif not args.print and _has_desktop():
        _open([address for address in pages.values() if address.startswith(_OPENED)])
    return 0


def _pages(row: Run) -> dict[str, str]:
    """The addresses of a run, by the names of the pages."""
    pages: dict[str, str] = {}
    engine = backend.find(row.backend)
    if row.handle is not None and backend.offers(engine, "pages"):
        pages |= engine.pages(row.handle)
    pages |= run_tracking.pages(row)
    path = report.default_path(row.run)
    if path.is_file():
        pages[_REPORT] = path.absolute().as_uri()
    return pages


def _chosen(pages: dict[str, str], names: list[str]) -> dict[str, str]:
    """The pages with these names, or all. Raises UsageError for a page that does not exist."""
    for name in names:
        if name not in pages:
            hint = did_you_mean(name, pages) or f"pages of this run: {', '.join(pages) or 'none'}"
            raise UsageError(f"the run has no page {name!r}", hint=hint)
    return {name: pages[name] for name in names} if names else pages


def _how_to_write_one(row: Run) -> str:
    return f"`{shell.command('deploykit', 'report', row.run)}` writes one"


def _has_desktop() -> bool:
    return any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))


def _open(addresses: list[str]) -> None:
    """Open the addresses in the user's browser. Raises BackendUnavailable if there is none."""
    import webbrowser

    for address in addresses:
        if not webbrowser.open(address):
            raise BackendUnavailable(
                "could not start a browser",
                hint="open the address yourself, or use --print",
            )
