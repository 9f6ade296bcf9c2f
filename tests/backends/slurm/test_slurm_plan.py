"""The batch script: golden files, hostile values, and what bash makes of it.

`UPDATE_GOLDEN=1 pytest tests/backends/slurm/test_slurm_plan.py` rewrites the golden files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.job.model import Entrypoint
from tests.backends.slurm.plans import CASES, HOSTILE, PYTHON, directives, job, script
from tests.programs import need

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.parametrize("name", CASES)
def test_golden(home, name):
    path = GOLDEN / f"{name}.sbatch"
    text = script(*CASES[name])
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_bytes(text.encode())
    assert text == path.read_bytes().decode()


def test_no_golden_file_is_left_over():
    assert {path.stem for path in GOLDEN.iterdir()} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_scripts_pass_shellcheck(home, name, tmp_path):
    path = tmp_path / "script.sh"
    path.write_bytes(script(*CASES[name]).encode())
    subprocess.run(["bash", "-n", path], check=True)
    need("shellcheck")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("name", CASES)
def test_cases_have_no_errors(home, name):
    """Warnings are about their folders, Python and module, which are not on this machine."""
    problems = slurm.check(*CASES[name])
    assert [problem for problem in problems if problem.severity == "error"] == []


@pytest.mark.parametrize(
    ("seconds", "minutes", "notice"),
    [(60, 1, 30), (61, 2, 60), (120, 2, 60), (180, 3, 90), (3600, 60, 90)],
)
def test_time_is_rounded_up_and_the_notice_fits(home, seconds, minutes, notice):
    options = directives(script(job(resources={"time_limit": seconds})))
    assert (options["time"], options["signal"]) == (str(minutes), f"USR2@{notice}")


RECORD = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('record', 'w'))"


def run_by_bash(text, folder, job_id, srun=f"#!{sys.executable}\n{RECORD}\n"):
    """Run a script with an srun that records its arguments and environment."""
    fake = folder / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "srun").write_text(srun)
    (fake / "srun").chmod(0o755)
    env = {"PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": job_id}
    return subprocess.run(
        ["bash", "-c", text], env=env, capture_output=True, text=True, check=False
    )


def test_every_value_arrives_unchanged(tmp_path):
    env = {f"V{number}": value for number, value in enumerate(HOSTILE)}
    spec = job(entrypoint=Entrypoint("train.py", args=HOSTILE), env=env)
    folder = tmp_path / "state folder/runs/digits-1"
    for name in ("source", "logs"):
        (folder / name).mkdir(parents=True)
    done = run_by_bash(script(spec, Options(python="my python")), tmp_path, "7")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    words, environ = json.loads((folder / "source/record").read_text())
    assert words[words.index("my python") :] == [
        *("my python", ".deploykit/launch.py", "torchrun"),
        *("--nnodes=1", "--nproc-per-node=1", "--max-restarts=0", "--", "train.py", *HOSTILE),
    ]
    assert {name: environ[name] for name in env} == env
    assert environ["DEPLOYKIT_RUN_DIR"] == str(folder)


def test_a_lone_colon_reaches_the_trainer_and_not_srun(tmp_path):
    """To srun, the argument ``:`` starts the next component of a heterogeneous job."""
    spec = job(entrypoint=Entrypoint("train.py", args=("a", ":", "it's\r\n")))
    folder = tmp_path / "state folder/runs/digits-1"
    (folder / "source").mkdir(parents=True)
    assert run_by_bash(script(spec), tmp_path, "7").returncode == 0
    words, _ = json.loads((folder / "source/record").read_text())
    assert ":" not in words
    *_, shell, flag, line = words
    assert (shell, flag) == ("bash", "-c")
    printed = subprocess.run(
        ["bash", "-c", line.replace(f"exec {PYTHON}", "printf '%s\\0'")],
        capture_output=True,
        check=True,
    )
    assert printed.stdout.decode().split("\0")[-4:] == ["a", ":", "it's\r\n", ""]


def test_only_the_first_job_of_a_run_starts_it_and_its_exit_code_is_that_of_srun(tmp_path):
    text = script()
    folder = tmp_path / "state folder/runs/digits-1"
    done = run_by_bash(text, tmp_path, "7")
    assert (done.returncode, "the run's folder is not writable" in done.stdout) == (73, True)
    (folder / "source").mkdir(parents=True)
    assert run_by_bash(text, tmp_path, "7").returncode == 0
    record = folder / "source/record"
    record.unlink()
    second = run_by_bash(text, tmp_path, "8")
    said = "deploykit: job 7 has already started this run; job 8 exits\n"
    assert (second.returncode, second.stdout) == (0, said)
    assert not record.exists()
    assert run_by_bash(text, tmp_path, "7").returncode == 0
    assert record.exists()
    assert run_by_bash(text, tmp_path, "7", "#!/bin/sh\nexit 7\n").returncode == 7


@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_a_dry_run_imports_only_what_it_needs(project, backend):
    (project / ".gitignore").write_text("# clutter\n__pycache__/\n*.log\n")
    code = (
        "import sys, deploykit.cli.main as c; c.main(sys.argv[1:]);"
        "print(*sys.modules, file=sys.stderr)"
    )
    argv = [sys.executable, "-c", code, "submit", "--dry-run", "--backend", backend]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    heavy = {"submitit", "jinja2", "boto3", "torch", "rich", "optuna"}
    assert not heavy & set(done.stderr.split())


def test_setup_lines_are_shell(home):
    text = script(
        options=Options(python=PYTHON, setup=("module load a; x=$(id)", "#SBATCH --hold"))
    )
    assert "\nmodule load a; x=$(id)\n#SBATCH --hold\n" in text
    # sbatch reads no directive after the first command
    first = text.index("\nexport ")
    assert text.index("#SBATCH --hold") > first
    others = list(re.finditer(r"^#SBATCH (?!--hold)", text, re.MULTILINE))
    assert others
    assert all(match.start() < first for match in others)


@pytest.mark.parametrize(
    ("options", "python"),
    [
        ({"python": "~/my env/bin/python"}, """"$HOME"/'my env/bin/python'"""),
        ({}, shlex.quote(sys.executable)),
    ],
)
def test_the_python_that_runs_the_launcher(home, options, python):
    """One in the home folder is found on the node; the default is the one that runs deploykit."""
    assert f"    {python} .deploykit/launch.py torchrun" in script(options=Options(**options))
