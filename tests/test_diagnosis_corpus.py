"""Diagnosis of real logs, if their folder exists."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest

from deploykit.diagnosis import cause_rules, scan
from deploykit.diagnosis.ranking import Diagnosis

ROOT = Path(__file__).parent.parent
CORPUS = Path(os.environ.get("DEPLOYKIT_CORPUS") or ROOT.parent / "shared/corpus")


@pytest.mark.skipif(not CORPUS.is_dir(), reason="optional: the corpus of logs is not here")
def test_causes_of_real_logs():
    known = cause_rules.load()
    right = defaultdict(list)
    for row in map(json.loads, (CORPUS / "cases.jsonl").read_text().splitlines()):
        diagnosis = Diagnosis(known)
        path = CORPUS / "cases" / f"{row['id']}.log"
        diagnosis.read(path.name, scan.file(path, known.literals))
        first = next((cause.rule.label for cause in diagnosis.causes()), "none")
        fine = {row["cause"], *(row["also_ok"] if row["cause"] != "none" else ())}
        right[row["cause"]].append(first in fine)
    for label, answers in sorted(right.items()):
        print(f"{label}: {sum(answers)} of {len(answers)}")  # noqa: T201 - the figures
    assert all(right.pop("none"))
    failures = [answer for answers in right.values() for answer in answers]
    assert sum(failures) >= 0.95 * len(failures)
