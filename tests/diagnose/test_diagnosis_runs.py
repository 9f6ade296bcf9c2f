"""Diagnosis on logs that were not written for it: of real runs, and such that people posted.

The excerpts of runs of the examples and frameworks here were packed by pack_runs.py. The posted
logs are in a folder outside the project, if one is named.
"""

from __future__ import annotations

import gzip
import json
import os
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

from tests.diagnose.answers import LOGS, first_label

HEALTHY = 200
"""At least."""
SPLIT = dict.fromkeys(
    ("assertion_failed", "device_mismatch", "division_by_zero", "shape_mismatch"), "user_code_error"
)
BEFORE = {"data_corrupt": "user_code_error", "file_permission": "file_not_found", **SPLIT}
"""Labels that are younger than those of the logs, and what they were split from."""
CORPUS = Path(os.environ.get("DEPLOYKIT_CORPUS", ""))
"""A folder with cases.jsonl, cases/ID.log and threads/*.toml (keys as in failures.toml)."""
ONCE = {
    **SPLIT,
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


@pytest.fixture(scope="module")
def logs():
    return [
        json.loads(row)
        for row in gzip.decompress((LOGS / "runs.jsonl.gz").read_bytes()).splitlines()
    ]


def test_no_alarm_in_logs_of_runs_that_went_well(logs):
    healthy = {log["name"]: log["text"] for log in logs if not log["causes"]}
    assert len(healthy) >= HEALTHY
    found = {name: first_label(text) for name, text in healthy.items()}
    assert {name: label for name, label in found.items() if label} == {}


def test_the_cause_of_runs_that_failed(logs):
    failed = [log for log in logs if log["causes"]]
    found = {log["name"]: first_label(log["text"]) for log in failed}
    wrong = {
        log["name"]: label
        for log in failed
        if BEFORE.get(label := found[log["name"]], label) not in log["causes"]
    }
    assert len(wrong) <= 0.05 * len(failed), wrong


def test_no_log_is_longer_than_an_excerpt(logs):
    assert max(len(log["text"].split("\n")) for log in logs) <= 60


def first_of_posted(text):
    label = first_label(text) or "none"
    return ONCE.get(label, label)


@here
def test_causes_of_posted_logs():
    right = defaultdict(list)
    for row in map(json.loads, (CORPUS / "cases.jsonl").read_text().splitlines()):
        fine = {row["cause"], *(row["also_ok"] if row["cause"] != "none" else ())}
        first = first_of_posted((CORPUS / "cases" / f"{row['id']}.log").read_bytes())
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
        first = first_of_posted(log["text"])
        if first not in {log.get("cause", "none"), *log.get("also", ())}:
            wrong.append((number, log.get("cause", "none"), first))
    assert len(wrong) <= (0 if name == "healthy" else 0.02 * len(logs)), wrong
