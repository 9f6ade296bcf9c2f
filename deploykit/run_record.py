"""What a run folder keeps of what was sent: the plan, its job, its source, and its price."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from deploykit import backend, bundle, paths, revision
from deploykit.decode import as_data
from deploykit.errors import DeploykitError, TryAgain
from deploykit.model import Bundle, Plan

if TYPE_CHECKING:
    from deploykit.cost.estimate import Estimate

LOCK = "submitting"
"""In a run folder: the file that is locked while the run is submitted."""
_NO_YAML = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
"""Characters of JSON that YAML knows only as escapes; it does not know JSON's pairs of surrogates.

https://yaml.org/spec/1.2.2/#51-character-set
"""


class Source(NamedTuple):
    """What a run folder keeps of the source: ``source.json``, and its changes since its commit."""

    record: str
    patch: bytes | None = None


def source(bundled: Bundle) -> Source:
    """The record of a bundle, which is stored for it: the same for all runs of the bundle."""
    archive = bundle.store(bundled)
    record: dict[str, Any] = {"bundle": bundled.hash, "commit": bundled.commit}
    patch = None
    if bundled.commit is not None:
        try:
            found = revision.patch(bundled, archive)
        except DeploykitError as error:
            record["uncommitted"] = f"not recorded: {error}"
        else:
            patch = found.text
            record["left_out"] = found.left_out
    return Source(json.dumps(record, indent=2) + "\n", patch)


def write(plan: Plan, folder: Path, price: Estimate | None, known: Source | None = None) -> None:
    """Write the plan, its job, and the source's changes since its commit, into the run folder.

    And its price now, since later prices may differ; None: nothing is billed. `known` is the
    record of its source, where it was made for another run.
    """
    paths.write(folder / f"plan.{plan.language}", plan.text)
    job = {**as_data(plan.job), plan.backend: as_data(plan.options)}
    text = json.dumps(job, indent=2, ensure_ascii=False) + "\n"
    paths.write(folder / backend.JOB, re.sub(_NO_YAML, lambda odd: f"\\u{ord(odd[0]):04x}", text))
    record = known or source(plan.bundle)
    if record.patch is not None:
        paths.write(folder / "uncommitted.diff", record.patch)
    paths.write(folder / "source.json", record.record)
    if price is not None and (kept := price.record()):
        paths.write(folder / backend.PRICE, json.dumps(kept) + "\n")


@contextlib.contextmanager
def submitting(folder: Path, run: str) -> Iterator[None]:
    """Lock the run while it is submitted; the lock ends with the process. Raises TryAgain.

    A run whose folder was deleted, also just now by another process, is not being submitted.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):
            path, opener = folder / LOCK, paths.private_opener
            _lock(held.enter_context(open(path, "w", encoding="utf-8", opener=opener)), run)
        yield


def _lock(file: TextIO, run: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise TryAgain(
            f"{run} is being submitted or removed by another process",
            hint="try again in a moment",
        ) from error
