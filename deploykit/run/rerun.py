"""Submit the job of a run again: with all its overrides and arguments, and the bundle it sent.

`submit` writes the job, with all overrides and arguments, into the run folder as ``job.json``,
which is a job file like any other. The source is unpacked from the archive of the bundle.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploykit.backends.base import JOB
from deploykit.bundle import archive as bundle
from deploykit.job.decode import read_json
from deploykit.job.file import Overrides
from deploykit.job.spelling import UNKNOWN_KEY
from deploykit.lib import paths
from deploykit.lib.errors import JobFileError, NotFound
from deploykit.lib.problem import Problem
from deploykit.lib.version import __version__
from deploykit.run import lifecycle
from deploykit.run.lifecycle import Prepared
from deploykit.run.registry import Run

UPGRADE = "pip install -U deploykit, or use the one that made it"


@contextlib.contextmanager
def prepare(
    row: Run,
    overrides: Overrides,
    run: str | None,
    arguments: Sequence[str],
    backend: str | None = None,
) -> Iterator[Prepared]:
    """The plan of a new run like `row`, with `overrides`, and `arguments` after its own.

    It goes to `backend`, by default that of `row`.

    The plan can be submitted within the context, while its source is unpacked. Raises NotFound
    where the job or the source of the run was not kept, and what `lifecycle.prepare` raises.
    """
    job = Path(row.folder, JOB)
    if not job.is_file():
        raise NotFound(
            f"{row.run} has no record of its job: {job} does not exist",
            hint="submit its job file again; attached runs and runs of deploykit 0.2 have none",
        )
    archive = bundle.kept(row.bundle)
    if archive is None:
        raise NotFound(
            f"the source that {row.run} sent is no longer in {paths.bundles()}",
            hint="submit its job file again; that sends the source as it is now",
        )
    with tempfile.TemporaryDirectory(dir=paths.private_folder(paths.bundles())) as scratch:
        source = Path(scratch, "source")
        bundle.unpack(archive, source)
        chosen = [*overrides, f"source={json.dumps(str(source))}"]
        try:
            prepared = lifecycle.prepare(job, chosen, backend or row.backend, run, arguments)
        except JobFileError as error:
            if _is_newer(job, error.problems):
                what = f"{row.run} was made by a newer deploykit than this one ({__version__})"
                raise JobFileError(what, error.problems, hint=UPGRADE) from error
            raise
        yield prepared


def _is_newer(job: Path, problems: Sequence[Problem]) -> bool:
    """Whether the file, which a deploykit wrote, has keys that this one does not know."""
    return any(
        problem.message == UNKNOWN_KEY and _has(read_json(job), problem.path.split("."))
        for problem in problems
    )


def _has(data: object, keys: Sequence[str]) -> bool:
    for key in keys:
        if not isinstance(data, dict) or key not in data:
            return False
        data = data[key]
    return True
