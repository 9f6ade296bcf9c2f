"""The command line as a person and as a program meet it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deploykit import cli, errors


def run(*argv):
    return cli.main(list(argv))


def test_help_loads_next_to_nothing():
    code = (
        "import sys; sys.argv=['deploykit','--help']\ntry:\n import deploykit.cli as c; c.main()\n"
    )
    code += "except SystemExit: print(*sorted(sys.modules))"
    argv = [sys.executable, "-c", code]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    loaded = set(out.splitlines()[-1].split())
    allowed = {"deploykit", "deploykit.cli", "deploykit.errors"}
    assert {name for name in loaded if name.startswith("deploykit")} == allowed
    heavy = {"asyncio", "boto3", "botocore", "jinja2", "rich", "sagemaker", "sqlite3", "ssl"}
    heavy |= {"submitit", "torch", "yaml", "typing_extensions", "numpy", "socket", "dataclasses"}
    assert loaded & heavy == set()


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        run(verb, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: deploykit {verb}" in text
    assert ("--json" in text) == (verb != "completion")


def test_version(capsys):
    with pytest.raises(SystemExit):
        run("--version")
    assert capsys.readouterr().out.startswith("deploykit 0.")


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["sbumit"], "there is no verb 'sbumit'", "did you mean 'submit'?"),
        ([], "the following arguments are required", "see `deploykit --help`"),
        (["submit"], "--backend is missing", "one of local, slurm, sagemaker"),
        (["submit", "--backend", "slrum"], "there is no backend 'slrum'", "did you mean 'slurm'?"),
        (["submit", "--backend", "local", "--run", "a b"], "--run 'a b': a run id is", ""),
        (["submit", "--backend", "local", "--set", "x"], "expected KEY=VALUE", "resources.nodes=2"),
    ],
)
def test_wrong_command_lines(project, capsys, argv, said, hint):
    assert run(*argv) == 64
    shown = capsys.readouterr()
    assert said in shown.err
    assert hint in shown.err
    assert shown.out == ""


def test_missing_job_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert run("submit", "--backend", "local") == 66
    assert "deploykit init" in capsys.readouterr().err


def test_all_problems_with_lines(project, capsys):
    (project / "job.yaml").write_text("nmae: x\nentrypoint: {script: trian.py}\n")
    assert run("check") == 65
    assert capsys.readouterr().err.splitlines() == [
        "error: job.yaml: 3 problems",
        "  line 1: nmae: there is no such key (did you mean 'name'?)",
        "  name: is missing (for example name: digits)",
        "  resources: is missing",
    ]


def test_problems_as_json(project, capsys):
    assert run("check", "--json", "--set", "resources.nodes=x") == 65
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 65
    assert error["problems"][0]["path"] == "resources.nodes"


def test_check_says_for_which_backends(project, capsys):
    assert run("check", "--set", "data.train=s3://b/x", "--backend", "local") == 65
    assert "--set data.train=FOLDER" in capsys.readouterr().err
    assert run("check") == 0
    assert capsys.readouterr().out == "job.yaml: no errors for local\n"


def test_init_writes_a_file_that_check_accepts(project, capsys):
    (project / "job.yaml").unlink()
    assert run("init") == 0
    assert run("check") == 0
    assert run("init") == 64
    assert "--force replaces it" in capsys.readouterr().err
    assert run("init", "--force", "other.yaml") == 0


def test_dry_run_prints_the_artifact_and_nothing_else(project, capsys, tmp_path):
    argv = ["submit", "--backend", "local", "--dry-run", "--run", "one"]
    assert run(*argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/sh\n")
    assert "torchrun --nnodes=1 --nproc-per-node=1" in text
    assert run(*argv, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["artifact"] == text
    assert data["bundle"]["files"][-2:] == ["job.yaml", "train.py"]
    assert not (tmp_path / "state folder").exists()


def test_unexpected_errors_name_a_log_and_show_no_traceback(project, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("deploykit.commands.check.run", lambda args: 1 // 0)
    assert run("check") == 70
    shown = capsys.readouterr().err
    assert "ZeroDivisionError" in shown
    assert "Traceback" not in shown
    (log,) = (tmp_path / "state folder/crashes").iterdir()
    assert str(log) in shown
    assert "Traceback" in log.read_text()


def test_interrupt_is_130(project, monkeypatch):
    def interrupt(args):
        raise KeyboardInterrupt

    monkeypatch.setattr("deploykit.commands.check.run", interrupt)
    assert run("check") == 130


def test_closed_pipe_is_quiet(project):
    argv = f"{sys.executable} -m deploykit list --json | true"
    done = subprocess.run(["sh", "-c", argv], capture_output=True, check=False)
    assert done.stderr == b""


def test_exit_codes_are_distinct_and_explained():
    kinds = [errors.DeploykitError, *errors.DeploykitError.__subclasses__()]
    codes = [kind.exit_code for kind in kinds]
    assert len(set(codes)) == len(codes)
    assert all(64 <= code <= 78 for code in codes)
    assert all(kind.meaning for kind in kinds)


def test_backends_say_what_is_missing(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert run("backends", "--json") == 0
    found = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found)[:3] == ["local", "slurm", "sagemaker"]
    assert "sbatch" in found["slurm"]["missing"]
    assert not found["slurm"]["usable"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion_knows_every_verb(shell, capsys):
    assert run("completion", shell) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in cli.VERBS)
    assert "--dry-run" in text
