"""The benchmark measures what it claims, and does not count a failed command as fast."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
BUSY = "import time\nwhile time.process_time() < {}: pass\nprint('done')"
ASLEEP = """
import pathlib, time
time.sleep(1.5)
pathlib.Path({!r}).write_text(str(time.process_time()))
print('done')
"""


@pytest.fixture
def start_up(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import start_up

    return start_up


def python(start_up, code, proof="done"):
    return start_up.Command((sys.executable, "-c", code), proof)


def test_cpu_time_is_measured_and_not_wall_time(start_up, tmp_path):
    """The sleeping program knows its own CPU time, which on a slow machine may be anything."""
    own = tmp_path / "own"
    env = start_up.environment(tmp_path)
    measured = start_up.cpu_ms(python(start_up, ASLEEP.format(str(own))), tmp_path, env)
    assert abs(measured - float(own.read_text()) * 1000) < 1500
    assert start_up.cpu_ms(python(start_up, BUSY.format(0.6)), tmp_path, env) >= 600


def test_programs_that_a_command_starts_count_too(start_up, tmp_path):
    code = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BUSY.format(0.6)!r}])"
    command = python(start_up, code)
    assert start_up.cpu_ms(command, tmp_path, start_up.environment(tmp_path)) >= 600


@pytest.mark.parametrize("code", ["print('done'); exit(3)", "print('something else')"])
def test_a_command_that_does_not_do_its_work_is_an_error(start_up, tmp_path, code):
    with pytest.raises(start_up.CommandFailedError, match="'done' expected"):
        start_up.cpu_ms(python(start_up, code), tmp_path, start_up.environment(tmp_path))


def test_each_run_gets_a_folder_of_its_own(start_up, tmp_path):
    code = "import os, sys; os.mkdir(sys.argv[1]); print('done')"
    command = start_up.Command((sys.executable, "-c", code, "{fresh}"), "done")
    for _ in range(2):
        start_up.cpu_ms(command, tmp_path, start_up.environment(tmp_path))


def test_commands_write_bytecode_and_see_no_settings_of_the_user(start_up, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("AWS_PROFILE", "mine")
    env = start_up.environment(tmp_path)
    assert not {"PYTHONDONTWRITEBYTECODE", "AWS_PROFILE"} & env.keys()
    assert (env["HOME"], env["PATH"]) == (str(tmp_path), os.environ["PATH"])


def test_a_missed_target_is_said_and_ends_with_1(start_up, monkeypatch, capsys):
    slow, quick = python(start_up, BUSY.format(1.0)), python(start_up, "print('done')")
    compared = [
        start_up.Comparison("quick beside slow", quick, slow, 0.5),
        start_up.Comparison("slow beside quick", slow, quick, 0.5),
    ]
    monkeypatch.setattr(start_up, "comparisons", lambda torchx: compared)
    assert start_up.main(["--json", "--repeats", "1"]) == 1
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["met"] for row in rows] == [True, False]
    for row in rows:
        assert row["ratio"] == pytest.approx(row["ours_ms"] / row["peer_ms"], 0.02, abs=0.002)

    monkeypatch.setattr(start_up, "comparisons", lambda torchx: compared[:1])
    assert start_up.main(["--repeats", "1"]) == 0
    assert "yes" in capsys.readouterr().out.splitlines()[-1]


def test_without_torchx_there_is_no_figure(start_up, tmp_path, capsys):
    assert start_up.main(["--repeats", "1", "--torchx", str(tmp_path / "torchx")]) == 2
    assert "make bench" in capsys.readouterr().err


def test_a_large_log_is_read_in_little_memory_and_its_cause_found(tmp_path):
    argv = [sys.executable, str(BENCHMARKS / "diagnose.py"), "--megabytes", "8"]
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    told = subprocess.run(argv, capture_output=True, text=True, env=env, check=False).stdout
    *rows, last = told.splitlines()
    assert "['cuda_oom']" in last
    assert "lines of 64 ranks" in rows[0]
    assert [float(row.split()[-1]) <= 200 for row in rows[-3:]] == [True] * 3


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("slurm", marks=[pytest.mark.slurm, pytest.mark.xdist_group("slurm")]),
        pytest.param("sagemaker", marks=pytest.mark.aws),
    ],
)
def test_a_submit_goes_through_no_more_files_than_one_can_read(backend, needs_slurm, tmp_path):
    """The trip ends with 1 where a limit of CONTRIBUTING.md is passed."""
    argv = [sys.executable, str(BENCHMARKS / "trip.py"), backend, "--count"]
    env = {**os.environ, "DEPLOYKIT_HOME": str(tmp_path)}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
