"""Write a job file for the script in this folder; for an empty folder, write a small trainer too.

Never overwrites a file. On a terminal, it can ask which script to run, and where.

deploykit init                       # job.yaml, for the script that looks like the trainer
deploykit init evaluate.py           # job.yaml, for this script
deploykit init --trainer             # the reference trainer, and a task file for your model
deploykit init --inference           # inference.py, to serve your script's model
deploykit init --full all.yaml       # every key, each with a comment
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.cli import output
from deploykit.job import schema
from deploykit.job import script as starter
from deploykit.job.script import Script
from deploykit.lib import paths, shell, units
from deploykit.lib.errors import CannotWrite, UsageError

_SCHEMA = "job.schema.json"
_OFFERED = 8
"""Scripts that are listed."""
_KEPT = "init never overwrites a file; edit it, or choose another name"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE|SCRIPT",
        help="job file to write, or Python script to run (default: job.yaml)",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--full", action="store_true", help="write every key, each with a comment")
    kinds.add_argument(
        "--trainer",
        action="store_true",
        help=f"write the reference trainer and {starter.TASK}, in which you define your model and "
        "data",
    )
    kinds.add_argument(
        "--inference",
        action="store_true",
        help=f"write {starter.INFERENCE}, which serves your script's model",
    )
    kinds.add_argument(
        "--schema", action="store_true", help=f"write {_SCHEMA}, the JSON Schema of job files"
    )


def run(args: argparse.Namespace) -> int:
    sections = {name: backend.find(name).Options for name in backend.names()}
    if args.schema:
        return _write(args, args.file or Path(_SCHEMA), _schema_text(sections))
    if args.inference:
        path = args.file or Path(starter.INFERENCE)
        return _write(args, path, starter.inference(), "fill it in, then run `deploykit export`")
    if args.full:
        path = args.file or Path("job.yaml")
        command = shell.command("deploykit", "check", path)
        following = f"set entrypoint.script, then run `{command}`"
        return _write(args, path, schema.commented(sections), following)
    return _with_trainer(args, sections) if args.trainer else _start(args, sections)


def _write(args: argparse.Namespace, path: Path, text: str, following: str | None = None) -> int:
    paths.create(path, text, _KEPT)
    if args.json:
        output.emit({"path": str(path)})
        return 0
    output.say(f"wrote {path}")
    if following:
        output.say(f"next: {following}")
    return 0


def _start(args: argparse.Namespace, sections: Mapping[str, type[Any]]) -> int:
    """Write the short job file, and the trainer where there is no script."""
    given = args.file if args.file and args.file.suffix == ".py" else None
    path = Path("job.yaml") if given else args.file or Path("job.yaml")
    if path.exists():
        raise UsageError(f"{path} already exists", hint=_KEPT)
    folder = path.absolute().parent
    scripts = _found(folder, given)
    script, name = _choice(scripts, list(sections), args)
    if script is None:
        paths.create(path.parent / starter.TRAINER, starter.trainer(), _KEPT)
        script = starter.scripts(folder)[0]
    address = _schema_address(folder, sections)
    examples = [line for one, options in sections.items() for line in schema.brief(one, options)]
    text = starter.job_file(folder.name, script, schema=address, backend=name, sections=examples)
    paths.create(path, text, _KEPT)
    _tell(args, path, script, scripts)
    return 0


def _with_trainer(args: argparse.Namespace, sections: Mapping[str, type[Any]]) -> int:
    """Write the reference trainer, a first task, and the job file that trains it."""
    path = args.file or Path("job.yaml")
    texts = starter.reference_trainer()
    taken = [str(path.parent / name) for name in texts if (path.parent / name).exists()]
    if taken or path.exists():
        names = ", ".join([*([str(path)] if path.exists() else []), *taken[:_OFFERED]])
        raise UsageError(f"already exist: {names}", hint=_KEPT)
    for name, text in texts.items():
        (path.parent / name).parent.mkdir(exist_ok=True)
        paths.create(path.parent / name, text, _KEPT)
    folder = path.absolute().parent
    script = Script(starter.TRAINER, 0, distributed=True)
    text = starter.job_file(
        folder.name,
        script,
        schema=_schema_address(folder, sections),
        backend=None,
        sections=[],
        args=starter.TASK_ARGS,
    )
    paths.create(path, text, _KEPT)
    if args.json:
        output.emit({"path": str(path), "script": script.path, "new": list(texts)})
        return 0
    output.say(f"wrote {starter.TASK}: define your model and data here")
    output.say(f"wrote {starter.TRAINER} and trainer/: the reference trainer, which you can change")
    output.say(f"wrote {path}: runs the trainer on {starter.TASK}")
    _say_next(path)
    return 0


def _found(folder: Path, given: Path | None) -> list[Script]:
    """The scripts to choose from. Raises UsageError where there is none to read."""
    try:
        scripts = starter.scripts(folder)
    except OSError as error:
        raise UsageError(f"cannot read {folder}: {error.strerror}") from error
    if given is None:
        return scripts
    if not (folder / given).is_file():
        raise UsageError(
            f"script {given} not found", hint=f"scripts here: {_names(scripts) or 'none'}"
        )
    if given.is_absolute() or ".." in given.parts:
        raise UsageError(f"{given} is not in this folder", hint="change to its folder first")
    path = given.as_posix()
    deeper = starter.judge(folder, folder / given) or Script(path, 0, distributed=False)
    return [one for one in scripts if one.path == path] or [deeper]


def _choice(
    scripts: list[Script], backends: list[str], args: argparse.Namespace
) -> tuple[Script | None, str | None]:
    """The script, if there is one, and the backend: on a terminal, as the user chooses."""
    if args.json or not output.can_ask():
        return next(iter(scripts), None), None
    script = next(iter(scripts), None)
    if len(scripts) > 1:
        by_path = {one.path: one for one in scripts[:_OFFERED]}
        script = by_path[output.ask("Which script should run?", list(by_path))]
    name = output.ask("Where should it run?", backends)
    return script, name if name != backend.DEFAULT else None


def _schema_text(sections: Mapping[str, type[Any]]) -> str:
    return json.dumps(schema.json_schema(sections), indent=2) + "\n"


def _schema_address(folder: Path, sections: Mapping[str, type[Any]]) -> str | None:
    """Where editors find the schema: beside the job file, else in the state folder.

    There each `init` brings it up to date, and no project has a copy that grows old. None where it
    cannot be written.
    """
    if (folder / _SCHEMA).is_file():
        return _SCHEMA
    path = paths.state() / _SCHEMA
    try:
        paths.private_folder(path.parent)
        paths.write(path, _schema_text(sections))
    except (OSError, CannotWrite):
        return None
    return path.as_uri()  # no blanks, at which editors would stop reading


def _tell(args: argparse.Namespace, path: Path, script: Script, scripts: list[Script]) -> None:
    key, count = starter.ranks(script)
    new = [] if scripts else [str(path.parent / starter.TRAINER)]
    if args.json:
        output.emit({"path": str(path), "script": script.path, "new": new, key: count})
        return
    for one in new:
        output.say(f"wrote {one}: a small trainer to start from")
    each = ("GPU",) if key == "gpus_per_node" else ("process", "processes")
    output.say(f"wrote {path}: runs {script.path} with {units.plural(count, *each)}")
    if others := _names([other for other in scripts if other != script]):
        output.say(f"other scripts here: {others}")
    _say_next(path)


def _say_next(path: Path) -> None:
    file = [] if path == Path("job.yaml") else [path]
    output.say(f"next: `{shell.command('deploykit', 'submit', *file, '--wait')}`")


def _names(scripts: list[Script]) -> str:
    names = [script.path for script in scripts]
    more = [f"{len(names) - _OFFERED} more"] if len(names) > _OFFERED else []
    return ", ".join([*names[:_OFFERED], *more])
