"""Every command in a fix of diagnose is run by a test, or listed with the reason why not."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from deploykit.diagnose import cause_rules, packages, placeholders
from tests.fixes.printed import code_of

TABLES = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))
RUN = ("local", "plain", "slurm", "aws")
BACKENDS = {"local", "slurm", "sagemaker"}


def steps(traits=()):
    """The steps of all fixes, for runs with these traits."""
    for cause in cause_rules.load().causes:
        yield from placeholders.fitting(cause.fix, traits).splitlines()


def test_every_command_is_run_by_a_test_or_listed_as_one_that_cannot_be():
    printed = {code for code in map(code_of, steps()) if code}
    listed = [code for table in TABLES.values() for code in table]
    assert len(listed) == len(set(listed))
    assert printed == set(listed)


@pytest.mark.parametrize("table", RUN)
def test_each_test_that_is_named_uses_the_command(table):
    module = importlib.import_module(f"tests.fixes.test_fixes_{table}")
    for command, name in TABLES[table].items():
        assert callable(getattr(module, name))
        first = re.sub(r"\{[^}]*\}", "", command).split()[0]
        assert first in inspect.getsource(module), command


def test_what_cannot_be_run_has_a_reason():
    assert all(len(reason.split()) >= 2 for reason in TABLES["elsewhere"].values())


@pytest.mark.parametrize("backend", sorted(BACKENDS))
def test_no_advice_for_another_backend(backend):
    """`{backend}` is this run's; programs and keys of others must not be printed."""
    foreign = {
        "local": (
            "slurm.",
            "sacct",
            "scontrol",
            "sinfo",
            "srun",
            "sbatch",
            "SageMaker",
            "sagemaker.",
        ),
        "slurm": ("SageMaker", "sagemaker.", "local.python", "requirements.txt"),
        "sagemaker": ("slurm.", "sacct", "scontrol", "sinfo", "srun", "local.python"),
    }[backend]
    for cause in cause_rules.load().causes:
        if cause.label.startswith(tuple(BACKENDS - {backend})) or cause.label in OF_A_BACKEND:
            continue  # only found in the logs of that backend
        fix = placeholders.fitting(cause.fix, {backend})
        assert [word for word in foreign if word in fix] == [], (cause.label, fix)


OF_A_BACKEND = {"environment_setup", "job_never_starts", "source_replaced"}


def test_lines_for_some_runs_only():
    text = "always\n@slurm queue\n@local,several one rank\n"
    assert placeholders.fitting(text, {"slurm"}) == "always\nqueue"
    assert placeholders.fitting(text, {"local"}) == "always\none rank"
    assert placeholders.fitting(text, {"slurm", "several"}) == "always\nqueue\none rank"
    assert placeholders.fitting(text, ()) == "always\nqueue\none rank"


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("sklearn.svm", "scikit-learn"),
        ("google.protobuf.message", "protobuf"),
        ("google.cloud", "google"),
        ("flash_attn", "flash-attn"),
        ("timm", "timm"),
    ],
)
def test_the_package_of_a_module(module, package):
    assert packages.of(module) == package
