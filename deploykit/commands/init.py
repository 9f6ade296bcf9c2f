"""Write a commented job file to start from; with --schema, the JSON Schema for your editor."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from deploykit import backend, schema
from deploykit.commands import output
from deploykit.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the file, --force and --schema."""
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: job.yaml")
    parser.add_argument("--force", action="store_true", help="overwrite an existing file")
    parser.add_argument("--schema", action="store_true", help="write job.schema.json instead")


def run(args: argparse.Namespace) -> int:
    """Write the job file or its schema."""
    path = args.file or Path("job.schema.json" if args.schema else "job.yaml")
    sections = {name: backend.find(name).Options for name in backend.names()}
    text = schema.commented(sections)
    if args.schema:
        text = json.dumps(schema.json_schema(sections), indent=2) + "\n"
    if path.exists() and not args.force:
        raise UsageError(f"{path} already exists", hint="--force overwrites it")
    try:
        path.write_text(text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    if args.json:
        output.emit({"path": str(path)})
    else:
        output.say(f"wrote {path}")
        if not args.schema:
            output.say("next: set entrypoint.script, then `deploykit check`")
    return 0
