"""What a run folder keeps of what was sent: the plan, its job, its source, and its price."""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from deploykit import backend, bundle, paths, revision
from deploykit.decode import as_data
from deploykit.errors import DeploykitError, TryAgain
from deploykit.model import Plan

if TYPE_CHECKING:
    from deploykit.cost.estimate import Estimate

_NO_YAML = "[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]"
"""Characters of JSON that YAML knows only as escapes; it does not know JSON's pairs of surrogates.

https://yaml.org/spec/1.2.2/#51-character-set
"""


def write(plan: Plan, folder: Path, price: Estimate | None) -> None:
    """Write the plan, its job, and the source's changes since its commit, into the run folder.

    And its price now, since later prices may differ; None: nothing is billed.
    """
    paths.write(folder / f"plan.{plan.language}", plan.text)
    job = {**as_data(plan.job), plan.backend: as_data(plan.options)}
    text = json.dumps(job, indent=2, ensure_ascii=False) + "\n"
    paths.write(folder / backend.JOB, re.sub(_NO_YAML, lambda odd: f"\\u{ord(odd[0]):04x}", text))
    archive = bundle.store(plan.bundle)
    record: dict[str, Any] = {"bundle": plan.bundle.hash, "commit": plan.bundle.commit}
    if plan.bundle.commit is not None:
        try:
            patch = revision.patch(plan.bundle, archive)
        except DeploykitError as error:
            record["uncommitted"] = f"not recorded: {error}"
        else:
            paths.write(folder / "uncommitted.diff", patch.text)
            record["left_out"] = patch.left_out
    paths.write(folder / "source.json", json.dumps(record, indent=2) + "\n")
    if price is not None and (kept := price.record()):
        paths.write(folder / backend.PRICE, json.dumps(kept) + "\n")


@contextlib.contextmanager
def submitting(folder: Path, run: str) -> Iterator[None]:
    """Lock the run while it is submitted; the lock ends with the process. Raises TryAgain.

    A run whose folder was deleted, also just now by another process, is not being submitted.
    """
    with contextlib.ExitStack() as held:
        with contextlib.suppress(FileNotFoundError):
            path, opener = folder / "submitting", paths.private_opener
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
