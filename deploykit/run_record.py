"""What a run folder keeps of what was sent: the plan, its job, its source, and its price."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploykit import backend, bundle, paths, revision
from deploykit.decode import as_data
from deploykit.errors import DeploykitError
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
