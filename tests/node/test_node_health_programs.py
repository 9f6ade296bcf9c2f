"""The health of nodes: what DCGM says of the GPUs, and how many processors cgroups allow."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from deploykit_node.preflight.health import dcgm, processors
from deploykit_node.preflight.health.record import Health
from tests.node.test_node_preflight import HELLO, emulated

V1_CPU = Path("/sys/fs/cgroup/cpu")


@pytest.fixture
def dcgmi(tmp_path, monkeypatch):
    """Puts a `dcgmi` on PATH that prints a text, and returns what the check finds."""

    def check(text, code=0, seconds=0):
        (tmp_path / "output").write_text(text)
        program = tmp_path / "dcgmi"
        program.write_text(
            f'#!/bin/sh\n[ "$*" = "diag --run 1 --json" ] || exit 9\n'
            f"cat {tmp_path}/output\nexec 2>&1 >/dev/null\nsleep {seconds}\nexit {code}\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
        found = Health()
        dcgm.check(found)
        return found

    return check


def diagnostic(*tests):
    """As DCGM 4 prints it: categories of tests, of each a result for each GPU, and a summary."""
    return json.dumps(
        {"DCGM Diagnostic": {"test_categories": [{"category": "Deployment", "tests": tests}]}}
    )


def result(gpu, status, *warnings):
    return {"entity_group": "GPU", "entity_id": gpu, "status": status, "warnings": [*warnings]}


BAD_ROW = {"warning": "GPU 3 needs a reset", "error_id": 83, "error_severity": 6}


def test_what_dcgm_finds_is_named(dcgmi):
    failed = [result(0, "Pass"), result(3, "Fail", BAD_ROW)]
    tests = [
        {"name": "software", "results": [result(0, "Pass")], "test_summary": {"status": "Pass"}},
        {"name": "memory", "results": failed, "test_summary": {"status": "Fail"}},
    ]
    assert dcgmi("a line before\n" + diagnostic(*tests), code=226).faults == [
        ("DCGM's test memory of GPU 3 has failed: GPU 3 needs a reset", True)
    ]


def test_an_older_dcgm_is_understood(dcgmi):
    """Versions 2 and 3: capitals, `gpu_ids`, and warnings as texts."""
    old = {"name": "Inforom", "results": [{"gpu_ids": "0,1", "status": "FAIL", "warnings": "bad"}]}
    text = json.dumps({"DCGM GPU Diagnostic": {"test_categories": [{"tests": [old]}]}})
    assert dcgmi(text).faults == [("DCGM's test Inforom of GPU 0,1 has failed: bad", False)]


@pytest.mark.parametrize("status", ["Pass", "Skip", "Warn", "Not Run", None, 7])
def test_what_has_not_failed_is_no_fault(dcgmi, status):
    found = dcgmi(diagnostic({"name": "software", "results": [result(0, status, "a hint")]}))
    assert (found.faults, found.skipped) == ([], [])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Error: unable to connect to the host engine", "DCGM (Error: unable to connect"),
        ("", "DCGM (no output)"),
        ("{" * 20_000, "DCGM ({{"),
        ('{"status": "fa', "DCGM ("),
    ],
)
def test_a_dcgm_that_does_not_answer_is_no_fault(dcgmi, text, says):
    found = dcgmi(text, code=255)
    assert found.faults == []
    assert found.skipped[0].startswith(says)
    assert len(found.skipped[0]) < 200


def test_a_dcgm_that_hangs_is_left(dcgmi, monkeypatch):
    monkeypatch.setattr(dcgm, "_SECONDS", 0.3)
    assert dcgmi(diagnostic(), seconds=60).skipped == ["DCGM (no result in 0 s)"]


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Files of cgroups by name, and the process's own groups."""

    def make(own, **files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            path = tmp_path / "groups" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        monkeypatch.setattr(processors, "OWN", tmp_path / "own")
        monkeypatch.setattr(processors, "GROUPS", tmp_path / "groups")
        return processors.limit()

    return make


def test_the_smallest_limit_of_the_groups_around_counts(groups):
    files = {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n", "cpu.max": "9 1\n"}
    assert groups("0::/a/b\n", **files) == 1.5


def test_version_1_and_a_container(groups):
    files = {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}
    assert groups("4:memory:/x\n3:cpu,cpuacct:/docker/77\n0::/\n", **files) == 0.5


@pytest.mark.parametrize("text", ["", "max 100000", "-1 100000", "x y", "5", "1 0"])
def test_no_limit(groups, text):
    assert groups("0::/\n", **{"cpu.max": text}) == float("inf")


@pytest.fixture
def half_a_processor():
    """A real group with that limit."""
    group = V1_CPU / f"deploykit-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_quota_us").write_text("50000")
    except OSError:
        pytest.skip("optional: needs root and cgroups of version 1")
    yield group
    group.rmdir()


def test_a_node_with_a_limit_is_named(bundle, tmp_path, half_a_processor):
    """Another version stops the test before PyTorch is imported, which takes long."""
    bundle.write("hello.py", HELLO)
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho $$ > {half_a_processor}/cgroup.procs\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    (tmp_path / "torch-1.2.3.dist-info").mkdir()
    (tmp_path / "torch-1.2.3.dist-info" / "METADATA").write_text("Name: torch\nVersion: 1.2.3\n")
    first, _ = emulated(bundle, per_node=[{}, {"python": str(python), "PYTHONPATH": tmp_path}])
    assert first.code == 78
    usual = len(os.sched_getaffinity(0))
    named = f"warning: node 1 (127.0.0.1, 127.0.0.2): 1 CPUs, where most nodes have {usual}"
    assert (named in first.log) == (usual > 1), first.log
