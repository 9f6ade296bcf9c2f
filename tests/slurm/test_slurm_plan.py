"""The batch script: golden files, hostile values, and what `check` refuses.

`UPDATE_GOLDEN=1 pytest tests/slurm/test_slurm_plan.py` rewrites the golden files.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from plans import JOB, PYTHON, directives, job, script

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.backends.slurm.options import Container, Restarts
from deploykit.model import Entrypoint

GOLDEN = Path(__file__).with_name("golden")
NEVER = Restarts(0, 0, 0, 0)
HOSTILE = (
    *("", " ", "a b", "it's", 'say "hi"', "$(touch /tmp/pwned)", "`id`", "a\nb", "a\r\nb\r"),
    *("#SBATCH --hold", "\n#SBATCH --hold\n", "--lr", "-x", "{{ run }}", "{% raw %}", "\\", "a\\"),
    *("é☃", "\u2028", "%j", "~", "*", ";", "&", "|", ">", "!", "\x1b[0m", "\t", "a=b,c", ": :"),
    *("\u201cquoted\u201d", "=x", "~/x", "\u00a0", "\x01"),
)


CASES = {
    "plain": (JOB, Options(python=PYTHON)),
    "two-nodes": (
        job(resources={"nodes": 2, "processes_per_node": 2, "cpus_per_node": 4}, retries=1),
        Options(python=PYTHON, partition="main"),
    ),
    "every-option": (
        job(
            resources={"nodes": 2, "gpus_per_node": 8, "memory": 64 * 1024**3, "time_limit": 5430},
            env={"OMP_NUM_THREADS": "1", "HF_TOKEN": "secret:env:HF_TOKEN"},
            data={"train": "/shared/data/train"},
            output="/shared/out",
            checkpoints="/shared/checkpoints",
        ),
        Options(
            partition="gpu",
            account="lab42",
            qos="high",
            constraint="a100&nvlink",
            reservation="tuesday",
            nodelist="node[01-02]",
            exclude="node07",
            exclusive=True,
            python=PYTHON,
            licenses="matlab:2",
            mail_type="END,FAIL",
            mail_user="ada@example.org",
            modules=("cuda/12.8", "it's"),
            setup=("ulimit -c 0",),
            signal_seconds=300,
            restarts=Restarts(time_limit=5, error=2),
            extra={"nice": "7", "contiguous": "", "comment": 'a\\b "c"'},
        ),
    ),
    "pyxis": (
        job(resources={"nodes": 2, "cpus_per_node": 4}, data={"train": "/shared/data"}),
        Options(container=Container("nvcr.io#nvidia/pytorch:25.01-py3", mounts=("/a b:/b",))),
    ),
    "apptainer": (
        job(resources={"gpus_per_node": 1}, output="/shared/out"),
        Options(container=Container("/shared/my image.sif", "apptainer", ("/scratch",))),
    ),
    "array": (
        job(output="/shared/out"),
        Options(python=PYTHON, array=1000, at_once=8),
    ),
    "gres": (
        job(resources={"gpus_per_node": 4, "memory": 1024**2 + 1, "time_limit": 60}),
        Options(python=PYTHON, gres_style="gres", restarts=NEVER),
    ),
    "module": (
        job(entrypoint=Entrypoint(module="package.train", args=("--flag", "--flag", "a b"))),
        Options(python=PYTHON),
    ),
    "hostile": (
        job(
            entrypoint=Entrypoint("it's a script.py", args=HOSTILE),
            env={"A": "a\nb", "B": "$(id)", "C": "\n#SBATCH --hold\n", "D": "'\"\\"},
            data={"train": "/a b/$(id)"},
        ),
        Options(python="/opt/my python/bin/python3", extra={"comment": "it's #1 $(id)"}),
    ),
    "colon": (
        job(entrypoint=Entrypoint("train.py", args=("a", ":", "it's"))),
        Options(python=PYTHON),
    ),
}


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
def test_scripts_are_sound_shell(home, name, tmp_path):
    path = tmp_path / "script.sh"
    path.write_bytes(script(*CASES[name]).encode())
    subprocess.run(["bash", "-n", path], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(["shellcheck", path], capture_output=True, text=True, check=False)
    assert done.stdout == ""


@pytest.mark.parametrize("name", CASES)
def test_cases_have_no_problem(home, name):
    assert list(slurm.check(*CASES[name])) == []


def test_nothing_of_submitit_leaks_in(home):
    found = directives(script())
    assert "wckey" not in found
    assert "error" not in found
    assert found["time"] == "30"
    assert found["signal"] == "USR2@90"
    assert found["job-name"] == "digits-1"
    assert set(found) == {
        *("chdir", "job-name", "nodes", "ntasks-per-node", "open-mode", "output"),
        *("requeue", "signal", "time"),
    }


@pytest.mark.parametrize(
    ("seconds", "minutes", "notice"),
    [(60, 1, 30), (61, 2, 60), (120, 2, 60), (180, 3, 90), (3600, 60, 90)],
)
def test_time_is_rounded_up_and_the_notice_fits(home, seconds, minutes, notice):
    found = directives(script(job(resources={"time_limit": seconds})))
    assert (found["time"], found["signal"]) == (str(minutes), f"USR2@{notice}")


def test_a_job_that_may_never_come_back_says_so_to_slurm(home):
    never = script(options=Options(python=PYTHON, restarts=NEVER))
    assert "no-requeue" in directives(never)
    assert "DEPLOYKIT_RESTARTS" not in never
    once = script(options=Options(python=PYTHON, restarts=Restarts(0, 0, 0, 1)))
    assert "requeue" in directives(once)
    assert '"error": 1' in once


def run_by_bash(text, folder, job_id):
    """Run a script with an srun that writes down its words and environment."""
    fake = folder / "bin"
    fake.mkdir(exist_ok=True)
    dump = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], open('seen', 'w'))"
    (fake / "srun").write_text(f"#!{sys.executable}\n{dump}\n")
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
    words, seen = json.loads((folder / "source/seen").read_text())
    assert words[words.index("my python") :] == [
        *("my python", ".deploykit/launch.py", "torchrun"),
        *("--nnodes=1", "--nproc-per-node=1", "--max-restarts=0", "--", "train.py", *HOSTILE),
    ]
    assert {name: seen[name] for name in env} == env
    assert seen["DEPLOYKIT_RUN_DIR"] == str(folder)


def test_a_lone_colon_reaches_the_trainer_and_not_srun(tmp_path):
    """To srun the word ``:`` begins the next component of a heterogeneous job."""
    spec = job(entrypoint=Entrypoint("train.py", args=("a", ":", "it's\r\n")))
    folder = tmp_path / "state folder/runs/digits-1"
    (folder / "source").mkdir(parents=True)
    assert run_by_bash(script(spec), tmp_path, "7").returncode == 0
    words, _ = json.loads((folder / "source/seen").read_text())
    assert ":" not in words
    *_, shell, flag, line = words
    assert (shell, flag) == ("bash", "-c")
    shown = subprocess.run(
        ["bash", "-c", line.replace(f"exec {PYTHON}", "printf '%s\\0'")],
        capture_output=True,
        check=True,
    )
    assert shown.stdout.decode().split("\0")[-4:] == ["a", ":", "it's\r\n", ""]


def test_only_one_job_claims_a_run(tmp_path):
    text = script()
    folder = tmp_path / "state folder/runs/digits-1"
    (folder / "source").mkdir(parents=True)
    assert run_by_bash(text, tmp_path, "7").returncode == 0
    seen = folder / "source/seen"
    seen.unlink()
    second = run_by_bash(text, tmp_path, "8")
    assert (second.returncode, second.stdout) == (
        0,
        "deploykit: job 7 has started this run already, so job 8 ends here\n",
    )
    assert not seen.exists()
    assert run_by_bash(text, tmp_path, "7").returncode == 0
    assert seen.exists()


def test_a_run_that_cannot_be_claimed_fails(tmp_path):
    done = run_by_bash(script(), tmp_path, "7")
    assert done.returncode == 73
    assert "cannot be written here" in done.stdout


def test_the_script_ends_with_sruns_own_status(tmp_path):
    (tmp_path / "state folder/runs/digits-1/source").mkdir(parents=True)
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "srun").write_text("#!/bin/sh\nexit 7\n")
    (fake / "srun").chmod(0o755)
    env = {"PATH": f"{fake}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    assert subprocess.run(["bash", "-c", script()], env=env, check=False).returncode == 7


def test_planning_imports_no_more_than_it_needs():
    code = "import sys, deploykit.backends.slurm; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"submitit", "jinja2", "boto3", "torch"} & set(done.stdout.split())


def test_setup_lines_are_shell(home):
    text = script(
        options=Options(python=PYTHON, setup=("module load a; x=$(id)", "#SBATCH --hold"))
    )
    assert "\nmodule load a; x=$(id)\n#SBATCH --hold\n" in text
    # sbatch reads no directive after the first command
    first = text.index("\nexport ")
    assert text.index("#SBATCH --hold") > first
    ours = re.finditer(r"^#SBATCH (?!--hold)", text, re.MULTILINE)
    assert all(match.start() < first for match in ours)


def test_python_is_the_one_that_runs_deploykit(home):
    assert f"    {shlex.quote(sys.executable)} .deploykit/launch.py torchrun" in script(
        options=Options()
    )
