"""Show your default settings, and the source of each value for the job in this folder.

The command line takes precedence, then the job file, the environment, and the config file
$XDG_CONFIG_HOME/deploykit/config.toml (by default ~/.config/deploykit/config.toml). --init writes a
config file for you to edit, with every setting commented out.

deploykit config --init                    write a config file to edit
deploykit config --backend slurm           show the settings of a submit with this option
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from deploykit.cli import output
from deploykit.job import file as jobfile
from deploykit.lib import paths
from deploykit.lib.errors import CannotWrite
from deploykit.run import config, lifecycle

SHARED = ("set", "backend")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "job",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="job file (default: job.yaml, if it exists)",
    )
    parser.add_argument(
        "--init", action="store_true", help="write a config file with every setting commented out"
    )


def run(args: argparse.Namespace) -> int:
    path = paths.config()
    if args.init:
        return _init(path, as_json=args.json)
    overrides = [*args.set, *([f"backend={args.backend}"] if args.backend else [])]
    exists = os.path.lexists(path)
    settings = config.settings(*_jobs(args.job, overrides), overrides)
    if args.json:
        rows = [one._asdict() for one in settings]
        output.emit({"file": str(path), "exists": exists, "settings": rows})
        return 0
    output.table(
        ["setting", "value", "from"],
        [[one.key, one.value or "-", _from(one)] for one in settings],
    )
    if not exists:
        output.note(f"{path} does not exist; `deploykit config --init` creates it")
    return 0


def _jobs(path: Path | None, overrides: list[str]) -> tuple[jobfile.Draft | None, jobfile.Draft]:
    """The job file alone, if there is one, and with the overrides and defaults."""
    path = path or Path(jobfile.DEFAULT) if path or Path(jobfile.DEFAULT).exists() else None
    if path is None:
        empty = jobfile.override(jobfile.Draft(Path(), {}, {}), overrides)
        return None, lifecycle.with_defaults(empty)
    return lifecycle.read(path, ()), lifecycle.with_defaults(lifecycle.read(path, overrides))


def _from(one: config.Setting) -> str:
    return ": ".join(filter(None, (one.source, one.where)))


def _init(path: Path, *, as_json: bool) -> int:
    """Write a config file that only the user can change. Raises UsageError where one exists."""
    try:
        paths.make_folder(path.parent)
    except OSError as error:
        raise CannotWrite(f"cannot create {path.parent}: {error.strerror}") from error
    paths.create(path, config.example(), "edit the existing file", private=True)
    if as_json:
        output.emit({"path": str(path)})
    else:
        output.say(f"wrote {path}")
    return 0
