"""`complaints`, with complaints of sbatch recorded from Slurm 22.05."""

from __future__ import annotations

import pytest

from deploykit.backends.slurm import commands
from deploykit.lib.errors import BackendUnavailable, SubmitRefused, TryAgain


@pytest.mark.parametrize(
    ("text", "complaint", "hint"),
    [
        (
            (
                "sbatch: error: invalid partition specified: nope\n"
                "sbatch: error: Batch job submission failed: Invalid partition name specified"
            ),
            (
                "invalid partition specified: nope; "
                "Batch job submission failed: Invalid partition name specified"
            ),
            "slurm.partition",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Invalid account or account/partition "
                "combination specified"
            ),
            "Invalid account",
            "slurm.account",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Requested node configuration is not "
                "available"
            ),
            "not available",
            "request less per node",
        ),
        (
            (
                "sbatch: error: Batch job submission failed: Requested time limit is invalid "
                "(missing or exceeds some limit)"
            ),
            "time limit is invalid",
            "resources.time_limit",
        ),
        (
            "sbatch: error: Memory specification can not be satisfied",
            "Memory",
            "resources.memory",
        ),
        (
            "sbatch: error: Batch job submission failed: Invalid qos specification",
            "qos",
            "slurm.qos",
        ),
        (
            "sbatch: unrecognized option '--nope'\nTry \"sbatch --help\" for more information",
            "unrecognized option '--nope'",
            "slurm.extra",
        ),
        ("sbatch: error: Invalid --mail-type specification", "--mail-type", "slurm.mail_type"),
    ],
)
def test_a_refusal_names_the_key_to_change(text, complaint, hint):
    error = commands.error_for(text)
    assert isinstance(error, SubmitRefused)
    assert complaint in str(error)
    assert hint in error.hint


@pytest.mark.parametrize(
    ("text", "kind", "is_uncertain"),
    [
        ("Unable to contact slurm controller (connect failure)", BackendUnavailable, False),
        ("Socket timed out on send/recv operation", TryAgain, True),
        ("Slurm temporarily unable to accept job, sleeping and retrying", TryAgain, False),
    ],
)
def test_temporary_failures(text, kind, is_uncertain):
    text = f"sbatch: error: Batch job submission failed: {text}"
    assert type(commands.error_for(text)) is kind
    assert commands.is_uncertain(text) is is_uncertain
