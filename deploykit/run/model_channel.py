"""Give a job the model of an earlier run, or of a folder, as a channel of its data.

The job reads the model from the folder in ``DEPLOYKIT_DATA_<CHANNEL>``, on every backend: a
checkpoint that the nodes can see is read where it is, one in S3 is copied by the nodes or the
service, and a folder of this machine is uploaded where data are.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from deploykit.backends import base as backend
from deploykit.job.file import Overrides, Source
from deploykit.job.model import Plan
from deploykit.lib import paths, shell
from deploykit.lib.errors import NotFound, UsageError
from deploykit.run import export, lifecycle, registry
from deploykit.run import fetch as fetch_run
from deploykit.run.export import Checkpoint
from deploykit.run.registry import Run

INIT_FROM = "init_from"
"""The channel of a model to start from."""
_FETCHED = "fetched"
"""In a run folder: checkpoints that another backend needs."""
_MAX_SCRIPT = 1 << 20


def variable(channel: str) -> str:
    """The variable with the folder of a channel on the node."""
    return f"DEPLOYKIT_DATA_{channel.upper()}"


def of_checkpoint(row: Run, checkpoint: Checkpoint, name: str, *, fetch: bool) -> dict[str, Any]:
    """The channel of a run's checkpoint for a job on the backend `name`.

    `fetch` copies it to this machine if the backend cannot read it where it is. Raises UsageError
    if it would have to and must not, and what the target raises.
    """
    if checkpoint.here:
        return at(str(checkpoint.folder(row, Path())), name)
    one = checkpoint.files[0].file
    location = one.address.removesuffix(one.name) + checkpoint.name
    if paths.is_address(location):
        return at(location.removesuffix("/."), name)
    if name == row.backend:
        return {"path": location.partition(":")[2]}  # a folder of the same host
    if not fetch:
        raise UsageError(
            f"{checkpoint.label} of {row.run} is at {location}, and must be fetched first",
            hint=f"omit --dry-run, or run `{shell.command('deploykit', 'fetch', row.run)}`",
        )
    return at(str(checkpoint.folder(row, Path(row.folder, _FETCHED))), name)


def at(location: str, name: str) -> dict[str, Any]:
    """The channel of a folder of this machine, or of a prefix, for a job on the backend `name`."""
    uploads = backend.offers(backend.find(name), "unsent_data")  # and reads buckets by itself
    stage = None if uploads or not paths.is_address(location) else "node"
    return {"path": location, "stage": stage}


def require_reachable(plan: Plan, channel: str) -> None:
    """Raise UsageError if the nodes of a plan cannot read the channel, a folder of this machine."""
    path = plan.job.data[channel].path
    host = getattr(plan.options, "host", None)
    if host is not None and not paths.is_address(path) and os.path.lexists(path):
        raise UsageError(
            f"the nodes of {host} cannot read {path} on this machine",
            hint=f"copy it there with `rsync -a {shell.command(path)} {host}:FOLDER`, then submit "
            f"with --set data.{channel}=FOLDER",
        )


def init_from(
    model: str, job: Source, overrides: Overrides, name: str | None, *, fetch: bool
) -> Overrides:
    """Overrides that give a job the model of a run or a folder, to start from.

    Raises NotFound if there is no such model, UsageError if it would have to be fetched.
    """
    draft = lifecycle.with_defaults(lifecycle.read(job, overrides))
    name = lifecycle.chosen(name, draft.data)
    if paths.is_address(model):
        channel = at(model, name)
    elif os.path.lexists(model) and not fetch_run.is_target(Path(model)):
        channel = at(os.path.abspath(model), name)  # noqa: PTH100 - keeps links
    elif os.sep in model:
        raise NotFound(f"--init-from {model} not found", hint="name a run, a folder or a file")
    else:
        row = registry.get(model)
        channel = of_checkpoint(row, export.choose(row, None), name, fetch=fetch)
    return [*overrides, (f"data.{INIT_FROM}", channel)]


def require_init_from(plan: Plan) -> None:
    """Raise UsageError if a job will not start from the model that `init_from` gave it.

    Its source must read the variable, and its nodes the folder.
    """
    name = variable(INIT_FROM).encode()
    scripts = (each for each in plan.bundle.entries if each.path.endswith(".py"))
    own = (Path(plan.bundle.source, each.path) for each in scripts if each.content is None)
    if not any(name in _read(path) for path in own):
        entry = plan.job.entrypoint
        raise UsageError(
            f"{entry.script or entry.module} cannot start from a model: no Python file of its "
            f"source reads {name.decode()}",
            hint="use the reference trainer (`deploykit init --trainer`), or add this to your "
            "script:\n"
            f'parser.add_argument("--init-from", default=os.environ.get("{name.decode()}"))\n'
            "and load the model from that folder or file unless it is None",
        )
    require_reachable(plan, INIT_FROM)


def _read(path: Path) -> bytes:
    try:
        return paths.read_regular(path, _MAX_SCRIPT)
    except OSError:
        return b""
