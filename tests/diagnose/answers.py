"""What diagnose answers to a text, for tests."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path

from deploykit.diagnose import cause_rules, scan
from deploykit.diagnose.log_forms import opened
from deploykit.diagnose.ranking import Diagnosis

LOGS = Path(__file__).with_name("logs")


def cases(name):
    """The logs of a file in `logs`, with their causes."""
    return tomllib.loads((LOGS / name).read_text(encoding="utf-8"))["log"]


def diagnosis(*texts):
    """The diagnosis of a run whose logs these are, as text or bytes in any form."""
    rules = cause_rules.load()
    found = Diagnosis(rules)
    for number, text in enumerate(texts):
        raw = text.encode() if isinstance(text, str) else text
        source = opened(io.BufferedReader(io.BytesIO(raw)), found.unread.append)
        found.read(f"{number}.log", scan.lines(source, rules.literals))
    return found


def first_cause(text):
    return next(iter(diagnosis(text).causes()), None)


def first_label(text):
    cause = first_cause(text)
    return cause.rule.label if cause else None
