"""Diagnosis on excerpts of real runs of the examples and frameworks here (pack_runs.py)."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from deploykit.diagnose import cause_rules, scan
from deploykit.diagnose.ranking import Diagnosis

RUNS = Path(__file__).with_name("logs") / "runs.jsonl.gz"
HEALTHY = 200
"""At least."""
BEFORE = {"data_corrupt": "user_code_error", "file_permission": "file_not_found"}
"""Labels that are younger than those of the logs, and what they were split from."""


@pytest.fixture(scope="module")
def logs():
    return [json.loads(row) for row in gzip.decompress(RUNS.read_bytes()).splitlines()]


def first_label(text):
    known = cause_rules.load()
    diagnosis = Diagnosis(known)
    lines = text.encode().splitlines(keepends=True)
    diagnosis.read("a.log", scan.lines(lines, known.literals))
    return next((cause.rule.label for cause in diagnosis.causes()), None)


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
