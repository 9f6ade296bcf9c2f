"""What every plan tells the nodes, the same on every backend.

The other side of this contract is ``entrypoints/deploykit_node``; the reference is
``docs/reference/node.md``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from deploykit import paths
from deploykit.model import JobSpec, Problem

FOLDER = ".deploykit"
"""The folder of the node plane in every bundle."""

LAUNCH = f"{FOLDER}/launch.py"

FILES = f"{FOLDER}/files.json"
"""The list of a bundle's other files, by which a node can verify what it has unpacked."""

FOLDERS = ("logs", "output", "checkpoints", "exit_records")
"""Subfolders of a run folder."""

NODE_PLANE = ("launch.py", "deploykit_node")
"""The file and the package of ``entrypoints/`` that travel in every bundle."""

PREFLIGHT = 30
"""Seconds that the network test before the trainer may take."""

SECRET_KINDS = ("env", "file", "ssm", "secretsmanager")

_RESERVED = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_SETTABLE = ("DEPLOYKIT_GRACE", "DEPLOYKIT_PORTS")


def node_plane() -> dict[str, bytes]:
    """The content of the node plane's files, by their path inside the bundle, sorted."""
    here = paths.shipped("entrypoints")
    launch, package = NODE_PLANE
    files = [here / launch, *(here / package).rglob("*.py")]
    return {
        f"{FOLDER}/{path.relative_to(here).as_posix()}": path.read_bytes() for path in sorted(files)
    }


def environment(  # noqa: PLR0913 - one keyword for each location of the contract
    job: JobSpec,
    *,
    backend: str,
    run: str,
    output: str,
    checkpoints: str,
    data: Mapping[str, str],
    folder: str | None = None,
) -> dict[str, str]:
    """The variables that a plan sets on each node, sorted by name.

    `output`, `checkpoints` and `data` are folders as the node sees them. `folder` is the run's,
    where the nodes can see it: there the launcher writes its exit record. Secrets are not resolved:
    ``DEPLOYKIT_SECRETS`` carries the references, and the node looks them up.
    """
    plain = {name: value for name, value in job.env.items() if not is_secret(value)}
    secret = {name: value for name, value in sorted(job.env.items()) if is_secret(value)}
    variables = {
        "DEPLOYKIT_BACKEND": backend,
        "DEPLOYKIT_CHECKPOINT_DIR": checkpoints,
        "DEPLOYKIT_OUTPUT_DIR": output,
        "DEPLOYKIT_RUN": run,
        **{f"DEPLOYKIT_DATA_{name.upper()}": location for name, location in data.items()},
    }
    if secret:
        variables["DEPLOYKIT_SECRETS"] = json.dumps(secret)
    if folder is not None:
        variables["DEPLOYKIT_RUN_DIR"] = folder
    if job.debug:
        variables["DEPLOYKIT_DEBUG"] = "1"
    if job.preflight:
        variables["DEPLOYKIT_PREFLIGHT"] = str(PREFLIGHT)
    return dict(sorted({**plain, **variables}.items()))


def in_folder(job: JobSpec, backend: str, run: str, folder: Path) -> dict[str, str]:
    """`environment` for a backend whose nodes see the run's folder."""
    return environment(
        job,
        backend=backend,
        run=run,
        output=job.output or str(folder / "output"),
        checkpoints=job.checkpoints or str(folder / "checkpoints"),
        data=job.data,
        folder=str(folder),
    )


def locations(job: JobSpec) -> dict[str, str]:
    """The locations that a job file names, by their path in it."""
    data = {f"data.{name}": location for name, location in job.data.items()}
    others = {"output": job.output, "checkpoints": job.checkpoints}
    return data | {path: location for path, location in others.items() if location is not None}


def command(job: JobSpec) -> list[str]:
    """The arguments of ``launch.py``: torchrun's options, ``--``, the program and its arguments.

    The launcher adds what only the node knows: address, port, node rank.
    """
    return [
        "torchrun",
        f"--nnodes={job.resources.nodes}",
        f"--nproc-per-node={job.resources.processes}",
        f"--max-restarts={job.retries}",
        "--",
        *program(job),
    ]


def program(job: JobSpec) -> list[str]:
    """The user's program and its exact arguments: ``train.py a b`` or ``-m package a b``."""
    entry = job.entrypoint
    if entry.module is not None:
        return ["-m", entry.module, *entry.args]
    return [entry.script or "", *entry.args]


def is_secret(value: str) -> bool:
    """Whether an environment value is a reference, ``secret:KIND:NAME``."""
    return value.startswith("secret:")


def check(job: JobSpec) -> Iterator[Problem]:
    """Problems of the environment, the same on every backend."""
    yield from _same_variable(job.data)
    for name, value in job.env.items():
        if name in _RESERVED or (name.startswith("DEPLOYKIT_") and name not in _SETTABLE):
            yield Problem(
                f"env.{name}",
                "is set by the launcher on each rank and cannot be overridden",
                "remove it; docs/reference/node.md lists the variables that a trainer can read",
            )
        if is_secret(value) and _kind(value) is None:
            yield Problem(
                f"env.{name}",
                f"expected secret:KIND:NAME, with KIND one of {', '.join(SECRET_KINDS)}",
                "for example secret:env:HF_TOKEN",
            )


def _same_variable(names: Iterable[str]) -> Iterator[Problem]:
    """Problems of channels that would share a variable."""
    first: dict[str, str] = {}
    for name in names:
        other = first.setdefault(name.upper(), name)
        if other != name:
            yield Problem(
                f"data.{name}",
                f"sets the same variable as {other!r}, DEPLOYKIT_DATA_{name.upper()}",
                "choose names that differ in more than case",
            )


def _kind(reference: str) -> str | None:
    _, kind, name = (*reference.split(":", 2), "", "")[:3]
    return kind if kind in SECRET_KINDS and name else None
