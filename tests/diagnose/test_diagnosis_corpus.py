"""Diagnosis of logs that other people posted, in a folder outside the project if one is named."""

from __future__ import annotations

import json
import os
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from deploykit.diagnose import cause_rules, scan
from deploykit.diagnose.ranking import Diagnosis

CORPUS = Path(os.environ.get("DEPLOYKIT_CORPUS", ""))
"""A folder with cases.jsonl, cases/ID.log and threads/*.toml (keys as in failures.toml)."""
ONCE = {
    "bad_arguments": "user_code_error",
    "cuda_library_init": "cuda_kernel_error",
    "data_corrupt": "user_code_error",
    "file_permission": "user_code_error",
    "process_limit": "fd_limit",
    "sagemaker_stopped": "slurm_cancelled",
    "service_unavailable": "network_offline",
    "storage_error": "file_not_found",
    "tracker_auth": "hf_auth",
    "tracker_failed": "network_offline",
}
"""Labels that the corpus does not know, and those that its cases have in their place."""
here = pytest.mark.skipif(
    "DEPLOYKIT_CORPUS" not in os.environ, reason="optional: DEPLOYKIT_CORPUS names no folder"
)


def first_label(text):
    known = cause_rules.load()
    diagnosis = Diagnosis(known)
    diagnosis.read("a.log", scan.lines(text.splitlines(keepends=True), known.literals))
    label = next((cause.rule.label for cause in diagnosis.causes()), "none")
    return ONCE.get(label, label)


@here
def test_causes_of_posted_logs():
    right = defaultdict(list)
    for row in map(json.loads, (CORPUS / "cases.jsonl").read_text().splitlines()):
        fine = {row["cause"], *(row["also_ok"] if row["cause"] != "none" else ())}
        first = first_label((CORPUS / "cases" / f"{row['id']}.log").read_bytes())
        right[row["cause"]].append(first in fine)
    for label, answers in sorted(right.items()):
        print(f"{label}: {sum(answers)} of {len(answers)}")  # noqa: T201 - the figures
    assert all(right.pop("none"))
    failures = [answer for answers in right.values() for answer in answers]
    assert sum(failures) >= 0.95 * len(failures)


@here
@pytest.mark.parametrize("name", ["failures", "threads", "healthy"])
def test_causes_of_threads(name):
    logs = tomllib.loads((CORPUS / f"threads/{name}.toml").read_text(encoding="utf-8"))["log"]
    wrong = []
    for number, log in enumerate(logs):
        first = first_label(log["text"].encode())
        if first not in {log.get("cause", "none"), *log.get("also", ())}:
            wrong.append((number, log.get("cause", "none"), first))
    assert len(wrong) <= (0 if name == "healthy" else 0.02 * len(logs)), wrong
