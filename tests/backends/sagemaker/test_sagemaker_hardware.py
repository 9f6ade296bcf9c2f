"""The table of hardware, and that `check` refuses each image that cannot start on a type."""

from __future__ import annotations

import collections
import itertools
import re
from dataclasses import replace
from urllib.parse import urlparse

import pytest

from benchmarks import hardware as generator
from deploykit.advise import gpus
from deploykit.backends import sagemaker
from deploykit.backends.sagemaker import catalog, hardware, service_model
from deploykit.backends.sagemaker.doctor import requirements_of

TYPES = service_model.shapes()["TrainingInstanceType"]["enum"]
EARLY = ("2.0.1", "2.1.0", "2.2.0", "2.3.0", "2.5.1", "2.6.0", "2.7.1", "2.8.0")
LATER = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14")
DISTRIBUTIONS = (
    *("torch_distributed", "pytorchddp", "smdistributed.dataparallel"),
    *("smdistributed.modelparallel", "mpi"),
)
CANNOT_START = {
    "ml.p2.xlarge": {*EARLY, *LATER},  # Kepler
    "ml.p3.16xlarge": set(LATER),  # CUDA 13 has no Volta
    "ml.p4d.24xlarge": set(),
    "ml.p5.48xlarge": set(),
    "ml.p5en.48xlarge": set(),
    "ml.g4dn.12xlarge": set(),
    "ml.g5.12xlarge": set(),
    "ml.g6e.12xlarge": set(),
    "ml.g7.12xlarge": set(EARLY) - {"2.7.1", "2.8.0"},  # Blackwell
    "ml.g7e.12xlarge": set(EARLY) - {"2.7.1", "2.8.0"},
    "ml.p6-b200.48xlarge": set(EARLY) - {"2.7.1", "2.8.0"},
    "ml.p6-b300.48xlarge": set(EARLY) - {"2.7.1", "2.8.0"},
    "ml.p6e-gb200.36xlarge": {*EARLY, *LATER},  # Grace
}
"""Type -> PyTorch versions whose image of AWS cannot start there."""
REASONS = {
    "gpu-too-new": r"PyTorch .* does not support the",
    "gpu-too-old": r"the image has PyTorch .* do not support the",
    "arm-host": r"has arm64 CPUs, but AWS builds",
    "smddp-version": r"supports PyTorch 2\.0\.0",
    "smddp-on-p5": r"does not support ml\.p5\.48xlarge",
    "smp-version": r"no image for PyTorch .* includes the model parallel library",
    "image-without-smp": r"does not include the model parallel library",
}
HARDWARE = ("gpu-too-new", "gpu-too-old", "arm-host")


def changes(version, kind, distribution="torch_distributed"):
    chosen = {"instance_type": kind, "distribution": distribution, "processes_per_node": 1}
    if version in EARLY:
        return {**chosen, "framework_version": version}
    image = catalog.later_image(version, "us-east-1", "ml.g5.xlarge")
    return {**chosen, "framework_version": None, "image_uri": image}


def errors(job, options):
    return [problem for problem in sagemaker.check(job, options) if problem.severity == "error"]


def reasons(problems):
    """The id of each problem in `REASONS`."""
    found = set()
    for problem in problems:
        found |= {name for name, text in REASONS.items() if re.search(text, problem.message)}
    return found


def test_each_type_of_botocore_has_a_row_that_says_where_it_is_from():
    """If this fails, botocore has new types: run benchmarks/hardware.py."""
    table = hardware.table()
    assert list(table) == sorted(TYPES)
    for row in table.values():
        day, page = hardware.SOURCES[row.source]
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", day)
        assert urlparse(page).scheme == "https"
        assert row.architecture in {"x86_64", "arm64"}
        assert (row.gpus or 0) > 0 if row.gpu else row.gpus == 0
        assert bool(row.capability) == bool(row.gpu)


def test_the_table_is_what_ec2_says_of_these_types():
    lines = [",".join(generator.COLUMNS), *map(",".join, generator.rows())]
    assert generator.FILE.read_text(encoding="utf-8") == "\n".join(lines) + "\n"


def test_advise_calls_the_same_gpus_by_the_same_names():
    """It knows the speed of those that the table names, but for the newest and the oldest."""
    named = {row.gpu for row in hardware.table().values() if row.gpu}
    assert named - set(gpus.known()) == {"b300", "gb200", "k80", "rtx-pro-4500", "rtx-pro-6000"}
    assert set(gpus.known()) - named == {"cpu"}


def test_every_gpu_type_has_a_number_of_gpus():
    with_gpus = [name for name in TYPES if catalog.has_gpu(name)]
    assert len(with_gpus) == 58
    assert [name for name in with_gpus if not hardware.of(name).gpus] == []
    assert {name for name, row in hardware.table().items() if row.gpus} == set(with_gpus)


def test_of_910_combinations_those_that_cannot_start_are_refused_and_no_others(vary):
    outcomes = collections.Counter()
    for kind, version, distribution in itertools.product(
        CANNOT_START, (*EARLY, *LATER), DISTRIBUTIONS
    ):
        found = reasons(problems := errors(*vary(**changes(version, kind, distribution))))
        assert bool(found) == bool(problems), problems
        starts = version not in CANNOT_START[kind]
        assert not found & set(HARDWARE) if starts else found, (kind, version, distribution)
        outcomes["refused" if found else "accepted"] += 1
        for name in found:
            outcomes[name] += 1
    assert outcomes["refused"] + outcomes["accepted"] == 910
    assert outcomes == {
        "accepted": 420,
        "refused": 490,
        "gpu-too-new": 150,
        "gpu-too-old": 96,
        "arm-host": 70,
        "smddp-version": 130,
        "smddp-on-p5": 28,
        "smp-version": 52,
        "image-without-smp": 78,
    }


@pytest.mark.parametrize("kind", CANNOT_START)
def test_no_hint_names_an_image_that_cannot_start_there(vary, kind):
    """Also not the hints of warnings, and of a job for which no image is chosen."""
    for version in (*EARLY, *LATER, "2.4.0", "2.12.0", None):
        for distribution in DISTRIBUTIONS:
            job, options = vary(**changes(version or "2.8.0", kind, distribution))
            if version not in {*EARLY, *LATER}:
                options = replace(options, image_uri=None, framework_version=version)
            for problem in sagemaker.check(job, options):
                assert hinted_hardware_errors(job, options, problem.hint or "") == set(), problem


def hinted_hardware_errors(job, options, hint):
    """What `check` says of the hardware of the job with the image, version and type of a hint."""
    image = re.search(r"image_uri: ([^;\s]+)", hint)
    version = re.search(r"framework_version: ([\d.]+\d)", hint)
    other = re.search(r"type such as (ml\.[\w.-]+\w)", hint)
    if not image and not version:
        return set()
    changed = replace(
        options,
        image_uri=image[1] if image else None,
        framework_version=version[1] if version else None,
        instance_type=other[1] if other else options.instance_type,
    )
    return reasons(errors(job, changed)) & set(HARDWARE)


def test_what_is_unknown_is_a_warning_and_never_refused(vary, monkeypatch):
    """A type of a newer botocore, of which this version of deploykit has no row."""
    rest = {name: row for name, row in hardware.table().items() if name != "ml.g5.12xlarge"}
    monkeypatch.setattr(hardware, "table", lambda: rest)
    job, options = vary(gpus_per_node=4, encrypt_inter_container_traffic=True)
    problems = list(sagemaker.check(job, options))
    assert {problem.severity for problem in problems} == {"warning"}
    assert any("the hardware of ml.g5.12xlarge is unknown" in str(one) for one in problems)
    assert any("whether training jobs use EFA on ml.g5.12xlarge" in str(one) for one in problems)


@pytest.mark.parametrize(
    ("kind", "efa", "said"),
    [
        ("ml.p4d.24xlarge", True, "has EFA"),
        ("ml.g6e.12xlarge", None, "whether training jobs use EFA"),
        ("ml.g5.xlarge", False, ""),
    ],
)
def test_check_and_doctor_read_the_same_efa(vary, kind, efa, said):
    job, options = vary(
        instance_type=kind, processes_per_node=1, encrypt_inter_container_traffic=True
    )
    found = [p.message for p in sagemaker.check(job, options) if "EFA" in p.message]
    assert bool(found) == bool(said)
    assert said in "".join(found)
    assert requirements_of(job, options, "us-east-1").efa is efa


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ("pytorch-training:2.8.0-gpu-py312", None),
        ("pytorch-training:2.10.0-gpu-py313", "gpu-too-old"),
        ("pytorch-training:2.9.0-gpu-py312-cu126-ubuntu22.04-sagemaker", None),  # by its tag
        ("pytorch:2.13-cu133-amzn2023-sagemaker", "gpu-too-old"),
        ("pytorch-training:2.10.0-cpu-py313", None),
    ],
)
def test_the_cuda_of_an_image_is_that_of_its_tag(vary, image, expected):
    name = f"763104351884.dkr.ecr.us-east-1.amazonaws.com/{image}"
    job, options = vary(framework_version=None, image_uri=name, instance_type="ml.p3.16xlarge")
    assert reasons(errors(job, options)) == ({expected} if expected else set())
