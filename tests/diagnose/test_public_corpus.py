"""A public corpus of failed GPU jobs: 474 logs in 15 classes, labelled by others.

`logs/gpualert.jsonl.gz` is https://github.com/Parv-01/gpualert-eval (arXiv 2607.01409) with its
licence. Its authors' own classifier, which was written for these classes, has a macro-F1 of 0.9979.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.diagnose.answers import first_cause

CORPUS = Path(__file__).parent / "logs/gpualert.jsonl.gz"
CLASSES = {
    "cuda_oom": "cuda_oom",
    "collective_timeout": "nccl",
    "cuda_kernel_error": "cuda_runtime",
    "segfault": "segfault",
    "file_not_found": "file_not_found",
    "file_permission": "permission",
    "missing_module": "missing_module",
    "division_by_zero": "div_zero",
    "device_mismatch": "device_mismatch",
    "nan_loss": "nan_loss",
    "assertion_failed": "assertion",
    # classes that are coarser than a cause
    "lib_incompatible": "missing_module",
    "gpu_arch_unsupported": "runtime_error",
    "checkpoint_mismatch": "runtime_error",
}
"""The corpus's class of a cause."""


def predicted(log):
    """The class of a log's first cause."""
    cause = first_cause(log)
    if cause is None:
        return "none"
    if cause.rule.label == "host_oom":
        allocation = cause.rule.means == "the program could not allocate host (CPU) memory"
        return "ram_oom" if allocation else "oom_killer"
    if cause.rule.label == "user_code_error":
        return "runtime_error" if "RuntimeError" in cause.evidence[0].text else "traceback"
    return CLASSES.get(cause.rule.label, cause.rule.label)


def f1(pairs, name):
    hits = sum(true == guess == name for true, guess in pairs)
    total = sum((true == name) + (guess == name) for true, guess in pairs)
    return 2 * hits / total


@pytest.mark.nightly
def test_the_classes_of_a_public_corpus_are_told_apart():
    _, *logs = map(json.loads, gzip.decompress(CORPUS.read_bytes()).splitlines())
    pairs = [(one["mode"], predicted(one["log"])) for one in logs]
    names = sorted({true for true, _ in pairs})
    wrong = [
        (one["id"], guess) for one, (true, guess) in zip(logs, pairs, strict=True) if true != guess
    ]
    assert (len(logs), len(names)) == (474, 15)
    assert sum(f1(pairs, name) for name in names) / len(names) >= 0.997, wrong
