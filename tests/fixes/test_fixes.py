"""Every command in a fix of diagnose is run by a test, or listed with the reason why not."""

from __future__ import annotations

import importlib
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from deploykit.diagnose import cause_rules, packages, placeholders, scan
from deploykit.diagnose.ranking import Diagnosis
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


NO_TORCH = (
    "PyTorch is not installed for {} on this node. "
    "Install it, or choose a Python environment that contains it."
)
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
        ("google.cloud", None),
        ("apex.amp", None),
        ("torhc", None),
        ("my_models", None),
        ("flash_attn", "flash-attn"),
        ("timm", "timm"),
    ],
)
def test_the_package_of_a_module(module, package):
    assert packages.of(module) == package


def fix(log):
    known = cause_rules.load()
    diagnosis = Diagnosis(known)
    diagnosis.read("a.log", scan.lines([line.encode() + b"\n" for line in log], known.literals))
    return diagnosis.causes()[0].fix


def missing(module):
    return fix([f"ModuleNotFoundError: No module named '{module}'"])


@pytest.mark.parametrize("module", ["torhc", "apex", "apex.amp", "amp_C", "my_models.layers", "x"])
def test_nothing_is_installed_but_known_packages(module):
    """Somebody else may own a package of that name: `apex` on PyPI is a web toolkit."""
    text = missing(module)
    assert "pip install" not in text
    assert "PACKAGE" not in text


def test_a_misspelled_module_is_not_to_be_installed():
    assert "Did you mean torch?" in missing("torhc")
    assert "Did you mean" not in missing("torch")
    assert "Did you mean" not in missing("my_models")
    assert "-m pip install scikit-learn\n" in missing("sklearn")


def test_what_replaces_modules_that_are_gone():
    assert "torch.amp" in missing("apex.amp")
    assert "torch.amp" in fix(["NameError: name 'amp_C' is not defined"])
    gone = missing("torch.distributed.pipeline.sync")
    assert "torch.distributed.pipelining" in gone
    assert "--strategy pp" in gone


def test_a_node_without_pytorch():
    """The launcher's own words name the Python."""
    text = fix([f"2026-05-04T08:00:04.100Z [node 1] error: {NO_TORCH.format('/opt/x/bin/python')}"])
    assert "/opt/x/bin/python -m pip install torch\n" in f"{text}\n"
    assert not {"MODULE", "PACKAGE"} & set(re.findall(r"\w+", text))


def test_a_step_without_its_value_is_left_out():
    assert placeholders.render("a\nb {module}\nc {rank|RANK}", {}) == "a\nc RANK"
    assert placeholders.render("a\nb {module}", {"module": "x"}) == "a\nb x"
