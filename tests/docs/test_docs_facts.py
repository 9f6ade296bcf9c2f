"""Figures and claims in hand-written pages, compared with the code."""

from __future__ import annotations

import ast
import dataclasses
import datetime as dt
import re
import tomllib
from pathlib import Path

import pytest

from deploykit.backends import base as backend
from deploykit.backends.sagemaker import catalog
from deploykit.cli import diagnose, doctor
from deploykit.cli import main as cli
from deploykit.job.model import JobSpec

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *DOCS.rglob("*.md")]
)
NUMBERS = {"three": 3, "four": 4, "seven": 7, "ten": 10, "nine": 9}


def constant(name):
    """The value of the only constant or field of this name in the shipped code."""
    pattern = re.compile(rf"^ *{name}(?:: [\w.]+)? = (.+?)(?: +#.*)?$", re.MULTILINE)
    values = {
        match
        for folder in ("deploykit", "entrypoints")
        for path in (ROOT / folder).rglob("*.py")
        for match in pattern.findall(path.read_text(encoding="utf-8"))
    }
    assert len(values) == 1, f"{name}: {values}"
    return eval(compile(ast.parse(values.pop(), mode="eval"), name, "eval"), {"__builtins__": {}})


def section(name):
    return backend.find(name).Options


def facts():
    """(page, pattern with a group, the value that the group must have)."""
    requirements = (ROOT / "tests/doctor/infra/requirements.txt").read_text(encoding="utf-8")
    restarts = section("slurm").__dataclass_fields__["restarts"].default_factory()
    return [
        ("how-to/local.md", r"They have (\d+) seconds", constant("GRACE")),
        ("how-to/network.md", r"for at most (\d+) seconds", backend.PREFLIGHT),
        ("how-to/diagnose.md", r"\| `cause` \| (\d+) \|", diagnose.CAUSE_FOUND),
        ("how-to/diagnose.md", r"\| `unknown` \| (\d+) \|", diagnose.CAUSE_UNKNOWN),
        ("how-to/diagnose.md", r"\| `unfinished` \| (\d+) \|", diagnose.UNFINISHED),
        ("how-to/doctor.md", r"\| error \| .* \| (\d+) \|", doctor.FAULT_FOUND),
        ("how-to/doctor.md", r"\| (?:unseen|unchecked) \| .* \| (\d+) \|", doctor.FAULT_FOUND),
        *(
            ("how-to/slurm.md", rf"^  restarts: {{.*\b{name}: (\d+)", count)
            for name, count in dataclasses.asdict(restarts).items()
        ),
        ("how-to/infra.md", r"ParallelCluster ([\d.]+\d)", requirements.strip().split("==")[1]),
        ("how-to/sagemaker.md", r"older images, (\S+) to", next(iter(catalog.VERSIONS))),
        ("how-to/sagemaker.md", r"images, \S+ to ([\d.]+\d);", list(catalog.VERSIONS)[-1]),
        (
            "how-to/choose-a-strategy.md",
            r"shards over more than (\d+) nodes",
            constant("_WIDE_SHARDING"),
        ),
        ("explanation/strategies.md", r"after (\w+) exact steps", constant("UNCOMPRESSED_STEPS")),
    ]


@pytest.mark.parametrize(("page", "pattern", "value"), facts())
def test_a_figure_is_that_of_the_code(page, pattern, value):
    text = (DOCS / page).read_text(encoding="utf-8")
    match = re.search(pattern, text, re.MULTILINE)
    assert match, f"docs/{page} no longer says it: {pattern}"
    said = match[1]
    assert NUMBERS.get(said, said) == value or float(said) == value


DENIED = [
    (r"\bno (automatic )?requeue", "slurm.restarts"),
    (r"(nothing|nothing else) is copied to", "slurm.host"),
    (r"no (job )?arrays", "slurm.array"),
    (r"no spot", "sagemaker.spot"),
    (r"no preflight|does not test the network", "preflight"),
]
"""Denials that no page may contain while the job file has this key."""


@pytest.mark.parametrize(("denial", "key"), DENIED)
def test_no_page_denies_what_the_job_file_can_do(denial, key):
    owner, _, name = key.rpartition(".")
    fields = {field.name for field in dataclasses.fields(section(owner) if owner else JobSpec)}
    assert name in fields
    for path in PAGES:
        text = " ".join(path.read_text(encoding="utf-8").replace("*", "").split())
        assert re.search(denial, text, re.IGNORECASE) is None, path


def test_commands_that_pages_show_exist():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        shown = re.findall(r"(?:^\$ |`)deploykit ([a-z]+)\b", text, re.MULTILINE)
        assert set(shown) <= set(cli.VERBS), path


def test_keys_that_pages_show_exist():
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        for owner, key in re.findall(r"`(local|slurm|sagemaker)\.([a-z_]+)(?=[`.:])", text):
            if key not in {"amazonaws", "sh"}:  # a service's name, a file
                assert key in {field.name for field in dataclasses.fields(section(owner))}, path


def test_what_works_where_names_tests_that_exist():
    text = Path(__file__).with_name("what_works_where.md").read_text(encoding="utf-8")
    table, notes = text.split("\n1. ")
    named = re.findall(r"`(tests/\S+)` `(test_\w+)`", f"1. {notes}")
    assert {int(one) for one in re.findall(r"\((\d+)\)", table)} == {*range(1, len(named) + 1)}
    for path, name in named:
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), name
    page = (DOCS / "explanation/what-works-where.md").read_text(encoding="utf-8")
    assert page.partition("\n| |")[2] == re.sub(r" \(\d+\)", "", table.partition("\n| |")[2])


def test_old_images_get_no_patches_any_more():
    """What the SageMaker guide says of the images that `framework_version` can choose."""
    text = (DOCS / "how-to/sagemaker.md").read_text(encoding="utf-8")
    ended = all(
        catalog.PATCHED_UNTIL[catalog.minor(version)] < dt.datetime.now(tz=dt.UTC).date()
        for version in catalog.VERSIONS
    )
    assert ended == ("none of them still receives patches" in " ".join(text.split()))


def test_the_trainer_is_as_short_as_its_guide_says():
    text = (DOCS / "how-to/trainer.md").read_text(encoding="utf-8")
    most = int(re.search(r"fewer than (\d+) lines", text)[1])
    lines = (ROOT / "entrypoints/train.py").read_text(encoding="utf-8").count("\n")
    assert most - 100 < lines < most


def test_the_targets_of_the_trip_are_those_of_its_script():
    said = " ".join((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split())
    script = (ROOT / "benchmarks/trip.py").read_text(encoding="utf-8")
    targets = ast.literal_eval(re.search(r"^_TARGETS = (.*)$", script, re.MULTILINE)[1])
    (slurm, sagemaker) = targets["slurm"], targets["sagemaker"]
    assert f"{slurm[0]} files and {slurm[1]} switches for Slurm" in said
    assert f"{sagemaker[0]} and {sagemaker[1]} for SageMaker" in said


def test_versions_of_libraries_in_the_design_are_those_that_are_installed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needs = project["optional-dependencies"]["sagemaker"]
    assert needs == ["sagemaker>=2.257,<3"]  # the guide: "version 2.257 or a later 2.x"
    text = (DOCS / "how-to/sagemaker.md").read_text(encoding="utf-8")
    assert "2.257 or a later 2.x" in " ".join(text.split())
