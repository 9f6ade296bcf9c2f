"""The command line as users and programs see it."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import runpy
import shlex
import subprocess
import sys
import types
from pathlib import Path

import pytest

import deploykit
from deploykit.backends import base as backend
from deploykit.cli import main as cli
from deploykit.cli.wait import follow
from deploykit.lib import errors
from deploykit.lib.version import __version__
from deploykit.run import registry
from deploykit.run import state as run_state

ROOT = Path(__file__).parents[2]


def run(*argv):
    return cli.main(list(argv))


def test_help_loads_next_to_nothing(monkeypatch):
    monkeypatch.delenv("COVERAGE_PROCESS_CONFIG", raising=False)  # coverage is not light
    code = (
        "import sys; sys.argv=['deploykit','--help']\n"
        "try:\n import deploykit.cli.main as c; c.main()\n"
    )
    code += "except SystemExit: print(*sorted(sys.modules))"
    argv = [sys.executable, "-c", code]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    loaded = set(out.splitlines()[-1].split())
    own = {name.removeprefix("deploykit.") for name in loaded if name.startswith("deploykit.")}
    allowed = {"cli", "cli.main", "cli.closed_pipe", "job", "job.spelling"}
    assert {name for name in own if not name.startswith("lib")} == allowed
    heavy = {"asyncio", "boto3", "botocore", "jinja2", "rich", "sagemaker", "sqlite3", "ssl"}
    heavy |= {"submitit", "torch", "yaml", "typing_extensions", "numpy", "socket", "dataclasses"}
    assert loaded & heavy <= loaded_by_any_help()


def test_a_dry_run_imports_no_more_than_it_needs(project):
    code = "import sys; from deploykit.cli import main as cli\n"
    code += "cli.main(['submit', sys.argv[1], '--dry-run', '-b', 'slurm']); print(*sys.modules)"
    argv = [sys.executable, "-c", code, str(project / "job.yaml")]
    out = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    assert "#SBATCH" in out
    rarely_needed = {"boto3", "botocore", "jinja2", "optuna", "rich", "submitit", "torch"}
    rarely_needed |= {"logging", "socket"}
    assert set(out.splitlines()[-1].split()) & rarely_needed <= loaded_by_any_help()


def loaded_by_any_help():
    """What argparse itself loads: from Python 3.14 on, dataclasses."""
    code = "import argparse, sys; argparse.ArgumentParser().format_help(); print(*sys.modules)"
    argv = [sys.executable, "-c", code]
    shown = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    return set(shown.split())


@pytest.mark.parametrize("verb", cli.VERBS)
def test_every_verb_explains_itself(verb, capsys):
    with pytest.raises(SystemExit) as caught:
        run(verb, "--help")
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: deploykit {verb}" in text
    assert ("--json" in text) == (verb not in {"completion", "mcp"})


def test_help_lists_each_verb_once_in_five_groups(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        run("--help")
    lines = capsys.readouterr().out.splitlines()
    groups = [line for line in lines if line in cli.GROUPS]
    assert groups == ["Start", "Run", "Look", "Fix", "Clean up"]
    listed = [line.split()[0] for line in lines[lines.index("Start") :] if line.startswith("  ")]
    assert listed == list(cli.VERBS)  # a line each
    assert max(map(len, lines)) <= 80


def test_an_older_python_in_a_checkout_is_told_so(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 13))
    with pytest.raises(
        SystemExit, match=r"^deploykit requires Python 3\.11 or later; this is 3\.10$"
    ):
        runpy.run_module("deploykit.__main__")


@pytest.mark.parametrize("argv", [[], ["help"], ["--help"]])
def test_no_verb_and_help_list_all_commands(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        run(*argv)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(f"\n  {verb} " in text for verb in cli.VERBS)


def test_help_explains_a_verb(capsys):
    with pytest.raises(SystemExit):
        run("help", "submit")
    assert "usage: deploykit submit" in capsys.readouterr().out


def test_w_is_wait():
    assert cli.parser(["submit"]).parse_args(["submit", "-w"]).wait


@pytest.mark.parametrize("argv", [["--version"], ["version"]])
def test_version(argv, capsys):
    with pytest.raises(SystemExit):
        run(*argv)
    assert capsys.readouterr().out.startswith("deploykit 0.")


@pytest.mark.parametrize(
    ("argv", "said", "hint"),
    [
        (["sbumit"], "unknown command 'sbumit'", "did you mean `deploykit submit`?"),
        (["ls"], "unknown command 'ls'", "did you mean `deploykit list`?"),
        (["ps"], "unknown command 'ps'", "did you mean `deploykit list`?"),
        (["history"], "unknown command 'history'", "did you mean `deploykit list`?"),
        (["run"], "unknown command 'run'", "did you mean `deploykit submit`?"),
        (["up"], "unknown command 'up'", "did you mean `deploykit submit`?"),
        (["stop"], "unknown command 'stop'", "did you mean `deploykit cancel`?"),
        (["kill"], "unknown command 'kill'", "did you mean `deploykit cancel`?"),
        (["delete"], "unknown command 'delete'", "did you mean `deploykit rm`?"),
        (["tail"], "unknown command 'tail'", "did you mean `deploykit logs --follow`?"),
        (["help", "sbumit"], "unknown command 'sbumit'", "did you mean `deploykit submit`?"),
        (["--verison"], "expected a command before --verison", "did you mean '--version'?"),
        (["-w"], "expected a command before -w", "as in `deploykit submit --wait`"),
        (["rm"], "the following arguments are required: RUN", "`deploykit rm --help`"),
        (
            ["attach", "one"],
            "backend local does not offer `attach`",
            "backends that offer it: sagemaker",
        ),
        (["submit", "--", "\udcff"], "a trainer argument is not valid UTF-8", ""),
        (["logs", "--first-eror"], "unrecognized arguments: --first-eror", "'--first-error'?"),
        (["logs", "a", "b"], "unrecognized arguments: b", "see `deploykit logs --help`"),
        (
            ["submit", "--nproc", "2", "train.py"],
            "unrecognized arguments: --nproc\n",
            "instead of --nproc: --processes-per-node N\n",
        ),
        (
            ["sweep", "start", "--nnodes=2", "--nproc_per_node=4", "--grid", "lr=1"],
            "unrecognized arguments: --nnodes --nproc-per-node\n",
            "=N\n  instead of --nproc-per-node: --set resources.processes_per_node=N\n",
        ),
        (
            ["submit", "--standalone", "train.py"],
            "unrecognized arguments: --standalone\n",
            "instead of --standalone: nothing; deploykit configures",
        ),
        (["logs", "--nnodes", "2"], "unrecognized arguments: --nnodes", "did you mean '--node'?"),
        (["wait", "--timeout", "2x"], "'2x' is not a duration such as 90s or 30m", "wait --help"),
        (["submit", "--backend", "slrum"], "unknown backend 'slrum'", "did you mean 'slurm'?"),
        (["submit", "--backend", "local", "--run", "a b"], "invalid run id 'a b'", ""),
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
    missing = "entrypoint.script: file 'trian.py' not found"
    assert run("check") == 65
    assert capsys.readouterr().err.splitlines() == [
        "error: job.yaml: 2 problems",
        "  line 1: nmae: unknown key (did you mean 'name'?)",
        f"  line 2: {missing} in {project} (did you mean 'train.py'?)",
    ]


def test_a_misspelled_script_is_answered_with_the_right_one(project, capsys):
    assert run("submit", "trian.py") == 66
    said = ["error: script trian.py not found", "  did you mean 'train.py'?"]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--nodes", "two"], "argument --nodes: expected a whole number, got 'two'"),
        (["--nodes", "4:2"], "argument --nodes: the minimum of 4 nodes exceeds the maximum of 2"),
        (["--time-limit", "soon"], "argument --time-limit: expected a time such as"),
        (["--set", "resources.nodes=two"], "resources.nodes: expected a whole number"),
        (["--set", "resources={nodes: two}"], "resources.nodes: expected a whole number"),
        (["--max-cost", "much"], "argument --max-cost: expected an amount of money"),
        (["--debugger", "7"], "argument --debugger: rank '7' does not exist"),
        (["-m", "no/such"], "argument -m: 'no/such' is not a valid module name"),
    ],
)
def test_what_was_typed_is_blamed_on_the_command_line(project, capsys, argv, said):
    assert run("submit", "--backend", "local", *argv) == 65
    title, *lines = capsys.readouterr().err.splitlines()
    assert title.startswith("error: arguments: 1 problem")
    assert lines[0].startswith(f"  {said}")


def test_the_file_and_the_command_line_are_blamed_for_their_own(project, capsys):
    with (project / "job.yaml").open("a") as file:
        file.write("retries: many\n")
    assert run("submit", "--backend", "local", "--nodes", "two") == 65
    title, *lines = capsys.readouterr().err.splitlines()
    assert title == "error: job.yaml: 2 problems"
    assert lines[0].endswith("retries: expected a whole number, got 'many'")
    assert lines[1].startswith("  argument --nodes: ")


def test_a_value_set_in_python_is_blamed_on_the_arguments(project):
    with pytest.raises(errors.JobFileError) as caught:
        deploykit.plan("job.yaml", set={"resources.nodes": "two"})
    said = "arguments: 1 problem\n  resources.nodes: expected a whole number, got 'two'"
    assert str(caught.value) == said


def test_problems_as_json(project, capsys):
    assert run("check", "--json", "--set", "resources.nodes=x") == 65
    error = json.loads(capsys.readouterr().out)["error"]
    assert error["exit_code"] == 65
    assert error["problems"][0]["path"] == "resources.nodes"


def test_check_says_for_which_backends(project, capsys):
    assert run("check", "--set", "data.train=s3://b/x", "--backend", "local") == 65
    assert "{path: s3://b/x, stage: node}" in capsys.readouterr().err
    assert run("check") == 0
    assert capsys.readouterr().out == "job.yaml: no errors for local\n"


def test_init_writes_a_file_that_check_accepts(project, capsys):
    (project / "job.yaml").unlink()
    assert run("init") == 0
    assert run("check") == 0
    assert run("init") == 64
    assert "job.yaml already exists" in capsys.readouterr().err
    assert run("init", "other.yaml") == 0


def test_init_says_where_it_cannot_write(project, capsys):
    assert run("init", "no folder/job.yaml") == 64
    assert "no folder: No such file" in capsys.readouterr().err
    assert run("init", "--full", "no folder/job.yaml") == 64
    assert "cannot write no folder/job.yaml: No such file" in capsys.readouterr().err
    assert run("init", "--full", "--json", "other.yaml") == 0
    assert json.loads(capsys.readouterr().out) == {"schema_version": 1, "path": "other.yaml"}


def test_a_list_without_runs_says_how_to_start_one(project, capsys):
    assert run("list") == 0
    assert capsys.readouterr() == ("", "no runs yet; `deploykit submit` starts one\n")
    (project / "job.yaml").unlink()
    assert run("list") == 0
    assert capsys.readouterr().err == (
        "no runs yet; `deploykit init` writes a job file, then `deploykit submit` starts one\n"
    )


def test_dry_run_prints_the_artifact_and_nothing_else(project, capsys, tmp_path):
    argv = ["submit", "--backend", "local", "--dry-run", "--run", "one"]
    assert run(*argv) == 0
    text = capsys.readouterr().out
    assert text.startswith("#!/bin/sh\n")
    assert "torchrun --nnodes=1 --nproc-per-node=1" in text
    assert run(*argv, "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["text"] == text
    assert data["bundle"]["files"][-3:] == ["job.yaml", "train.py", ".deploykit/files.json"]
    assert not (tmp_path / "state folder").exists()


def test_switches_of_submit_are_in_the_dry_run_of_every_backend(project, capsys):
    place = "region: eu-west-1, bucket: my-bucket, role: arn:aws:iam::123456789012:role/r"
    image = "763104351884.dkr.ecr.eu-west-1.amazonaws.com/pytorch:2.14-cu133-amzn2023-sagemaker"
    sagemaker = f"sagemaker={{{place}, image_uri: '{image}', instance_type: ml.g5.xlarge}}"
    for chosen in ("local", "slurm", "sagemaker"):
        argv = ["submit", "--backend", chosen, "--dry-run", "--run", "one", "--set", sagemaker]
        assert run(*argv) == 0
        assert "DEPLOYKIT_PREFLIGHT" not in capsys.readouterr().out
        assert run(*argv, "--preflight", "--debug") == 0
        text = capsys.readouterr().out
        for name, value in (("PREFLIGHT", "30"), ("DEBUG", "1")):
            assert re.search(rf'DEPLOYKIT_{name}(=|": "){value}\b', text), text


def test_unexpected_errors_name_a_log_and_show_no_traceback(project, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("deploykit.cli.check.run", lambda args: 1 // 0)
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

    monkeypatch.setattr("deploykit.cli.check.run", interrupt)
    assert run("check") == 130


def test_closed_pipe_is_quiet(project):
    argv = f"{sys.executable} -m deploykit list --json | true"
    done = subprocess.run(["sh", "-c", argv], capture_output=True, check=False)
    assert done.stderr == b""


def test_exit_codes_are_distinct_and_explained():
    of_a_run = {errors.TimedOut, errors.NeverStarts, errors.JobMissing, errors.RunFailed}
    kinds = [
        errors.DeploykitError,
        *{*errors.DeploykitError.__subclasses__()} - of_a_run,
    ]  # from Python only
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


LOG = """\
2026-11-21T01:00:00.000Z [rank {0}] early
a traceback of its own
2026-11-21T02:00:00.000Z [rank {0}] late
  more of it
"""


@pytest.fixture
def logged(project, monkeypatch, tmp_path):
    """A run that has ended, with one log for each of two nodes."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    for node in (0, 1):
        (folder / f"logs/node-{node}.log").write_text(LOG.format(node))
    row = registry.Run("one", "x", "local", "here", str(folder), "a", "b", None, 1.0, "/out", "one")
    registry.add(row)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--rank", "1"], ["[rank 1] early", "[rank 1] late"]),
        (
            ["--node", "0", "--since", "2026-11-21T01:30"],
            ["[rank 0] late", "[node 0]   more of it"],
        ),
        (["--since", "1s"], []),
    ],
)
def test_logs_by_rank_node_and_time(logged, capsys, options, shown):
    assert run("logs", "one", *options) == 0
    assert capsys.readouterr().out.splitlines() == shown


RESTARTED = """\
2026-11-21T01:00:00.000Z [rank 0] begun
2026-11-21T01:00:01.000Z [rank 1] Traceback (most recent call last):
2026-11-21T01:00:02.000Z [rank 0] RuntimeError: a peer is gone
2026-11-21T01:00:02.000Z [rank 1]   File "train.py", line 7
2026-11-21T01:00:02.000Z [rank 1] ValueError: no such sample
2026-11-21T01:00:02.000Z [rank 1] a later word
2026-11-21T02:00:00.000Z [node 0] restart 1 (error 1)
2026-11-21T02:00:00.000Z [rank 0] restart 7 of my own
2026-11-21T02:00:01.000Z [rank 0] done
"""
FIRST_ERROR = [
    "[rank 1] Traceback (most recent call last):",
    '[rank 1]   File "train.py", line 7',
    "[rank 1] ValueError: no such sample",
]


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["--attempt", "0", "--rank", "0"], ["begun", "RuntimeError: a peer is gone"]),
        (["--attempt", "1", "--rank", "0"], ["restart 7 of my own", "done"]),
        (["--attempt", "2"], []),
        (["--first-error"], FIRST_ERROR),
        (["--first-error", "--rank", "0"], ["RuntimeError: a peer is gone"]),
        (["--first-error", "--attempt", "1"], []),
    ],
)
def test_logs_by_attempt_and_the_first_error(logged, tmp_path, capsys, options, shown):
    (tmp_path / "run/logs/node-1.log").unlink()
    (tmp_path / "run/logs/node-0.log").write_text(RESTARTED)
    assert run("logs", "one", *options) == 0
    found = capsys.readouterr()
    assert [line.removeprefix("[rank 0] ") for line in found.out.splitlines()] == shown
    assert bool(found.err) is not bool(shown)


GROUP = [
    "  + Exception Group Traceback (most recent call last):",
    "  | ExceptionGroup: two",
    "    +--",
]


@pytest.mark.parametrize("error", [GROUP, ["FATAL: shard 7 has a wrong checksum"]])
def test_a_group_of_exceptions_and_a_fatal_line_are_first_errors(logged, tmp_path, capsys, error):
    (tmp_path / "run/logs/node-1.log").unlink()
    texts = "".join(f"2026-11-21T01:00:01.000Z [rank 0] {text}\n" for text in ["begun", *error])
    (tmp_path / "run/logs/node-0.log").write_text(texts)
    assert run("logs", "one", "--first-error") == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("[rank 0] ") for line in shown] == error


def test_logs_of_an_invalid_time(logged, capsys):
    assert run("logs", "one", "--since", "soon") == 64
    assert "'soon' is not a time such as 10m" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("numbers", "task", "said"),
    [
        (None, 0, "one is not a job array"),
        (range(2), 2, "one has no task 2"),
        (range(2), -1, "one has no task -1"),
    ],
)
def test_logs_of_a_task_that_does_not_exist(logged, capsys, monkeypatch, numbers, task, said):
    tasks = types.SimpleNamespace(tasks=lambda handle: numbers)
    monkeypatch.setattr(backend, "require", lambda name, capability: tasks)
    assert run("logs", "one", f"--task={task}") == 64
    assert said in capsys.readouterr().err


def test_an_interrupt_while_a_run_is_followed_says_how_to_stop_the_run(logged, capsys, monkeypatch):
    def wait(names, timeout):
        yield [registry.get(*names)]
        raise KeyboardInterrupt

    silent = types.SimpleNamespace(logs=lambda handle, *, follow: iter(()))
    monkeypatch.setattr(backend, "find", lambda name: silent)
    monkeypatch.setattr(run_state, "wait_all", wait)
    with pytest.raises(KeyboardInterrupt):
        follow(registry.get("one"), as_json=False, timeout=None)
    assert "one is still running; `deploykit cancel one` stops it" in capsys.readouterr().err


def test_a_run_is_waited_for_although_its_logs_are_gone(logged, capsys, monkeypatch):
    def no_logs(handle, *, follow):
        raise errors.BackendUnavailable("the disk is gone")

    local = types.SimpleNamespace(logs=no_logs)
    ended = registry.get("one")._replace(state="succeeded")
    monkeypatch.setattr(backend, "find", lambda name: local)
    monkeypatch.setattr(run_state, "wait_all", lambda names, timeout: iter([[ended]]))
    assert follow(registry.get("one"), as_json=False, timeout=None) == 0
    said = capsys.readouterr().err
    assert "the logs of one are no longer available: the disk is gone; the run continues" in said


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_every_verb(shell, capsys):
    assert run("completion", shell) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in cli.VERBS)
    assert "--dry-run" in text


@pytest.mark.parametrize(
    ("file", "variable", "words", "name"),
    [
        ("", "", [], "local"),
        ("", "slurm", [], "slurm"),
        ("backend: slurm\n", "sagemaker", [], "slurm"),
        ("backend: slurm\n", "", ["-b", "local"], "local"),
        ("backend: slurm\n", "", ["--set", "backend=local"], "local"),
    ],
)
def test_the_backend_is_that_of_the_command_the_file_the_environment_or_local(
    project, capsys, monkeypatch, file, variable, words, name
):
    monkeypatch.setenv("DEPLOYKIT_BACKEND", variable)
    with (project / "job.yaml").open("a") as job:
        job.write(file)
    assert cli.main(["submit", "--dry-run", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["backend"] == name


def test_what_follows_two_hyphens_goes_to_the_trainer(project, capsys):
    assert cli.main(["submit", "--dry-run", "--", "--lr", "0.1", "--", "--json", "a b"]) == 0
    assert "-- train.py --epochs 5 --lr 0.1 -- --json 'a b'\n" in capsys.readouterr().out
    assert cli.main(["check", "job.yaml", "--", "--lr"]) == 0


@pytest.mark.parametrize("spelling", ["--dry-run", "--dry_run", "--dryrun"])
def test_spellings_of_a_dry_run(project, capsys, spelling):
    assert cli.main(["submit", spelling, "--set", "env.A_B=c_d"]) == 0
    assert "export A_B=c_d\n" in capsys.readouterr().out


def test_a_list_that_is_cut_says_so(project, capsys):
    for name in ("one", "two", "three"):
        registry.add(registry.Run(name, name, "local", "", str(project), "", "", None, 1.0, ""))
    assert cli.main(["list", "-n", "2"]) == 0
    shown = capsys.readouterr()
    assert len(shown.out.splitlines()) == 2
    assert shown.err == "showing the newest 2 of 3 runs; -n 3 shows all\n"


def _actions(verb):
    (kinds,) = (one for one in cli.parser([verb])._actions if isinstance(one.choices, dict))
    return kinds.choices[verb], kinds.choices[verb]._actions


@pytest.mark.parametrize("verb", [one for one in cli.VERBS if one not in {"init", "completion"}])
def test_the_examples_of_each_verb_are_command_lines_that_it_takes(verb):
    """`init` and `completion` have examples in other forms."""
    parser, _ = _actions(verb)
    lines = [one for one in parser.description.splitlines() if one.startswith("deploykit ")]
    assert lines, parser.description
    for line in lines:
        words = shlex.split(re.split(r"\s{2,}", line)[0])[1:]
        own, _ = cli._split(words)
        assert own[0] == verb
        assert parser.parse_known_args(own[1:])[1] == []


@pytest.mark.parametrize("verb", cli.VERBS)
def test_the_value_of_each_option_is_named_by_what_it_is(verb):
    for action in _actions(verb)[1]:
        assert action.metavar not in {"X", "B", "T"}
        if action.option_strings and action.nargs != 0 and not action.choices:
            assert action.metavar, action.option_strings


def test_no_text_names_a_file_that_a_wheel_lacks():
    sources = [*(ROOT / "deploykit").rglob("*.py"), *(ROOT / "deploykit").rglob("*.toml")]
    told = re.compile(r"(?<![/\w])(docs|tests|examples|benchmarks)/[\w-]+[/.][\w./-]+")
    for path in sources:
        text = re.sub(r"(?m)^#.*$", "", path.read_text())
        if path.suffix == ".py":
            tree = ast.parse(text)
            own = {id(node.body[0].value) for node in ast.walk(tree) if _has_doc(node, path)}
            strings = [node for node in ast.walk(tree) if isinstance(node, ast.Constant)]
            strings = [node for node in strings if isinstance(node.value, str)]
            text = "\n".join(node.value for node in strings if id(node) not in own)
        assert told.search(text) is None, path


def _has_doc(node, path):
    """Whether a docstring is for readers of the code; that of a verb is its help."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    if not isinstance(node, kinds) or ast.get_docstring(node) is None:
        return False
    return path.parent.name != "cli" or not isinstance(node, ast.Module)


def test_versions_are_told_without_importing_anything(capsys):
    with pytest.raises(SystemExit) as end:
        run("--version")
    first, python, *packages = capsys.readouterr().out.splitlines()
    assert (end.value.code, first) == (0, f"deploykit {__version__}")
    assert re.fullmatch(r"Python 3\.\d+\.\S+ \(/.*\)", python)
    names = [line.split()[0].rstrip(":") for line in packages]
    assert names == ["torch", "submitit", "boto3", "sagemaker"]
    assert all(re.search(r" \d+\.\d+|not installed here$", line) for line in packages)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["resources.time_limit=25s"], "must be at least 60 s, got '25s'"),
        (["slurm.signal_seconds=0"], "must be at least 1 s, got '0'"),
        (["sagemaker.volume_size=0"], "must be at least 1 GB, got '0'"),
        (["sagemaker.bucket=B"], "expected a bucket name of 3 to 63 lower-case letters"),
        (["output=s3://B/x"], "is not a location that SageMaker can read and write"),
    ],
)
def test_bounds_have_units_and_places_their_rules(project, overrides, message, capsys):
    words = [word for one in overrides for word in ("--set", one)]
    valid = (
        "sagemaker={region: us-east-1, bucket: my-bucket, instance_type: ml.g5.xlarge, "
        "role: 'arn:aws:iam::123456789012:role/r', framework_version: 2.8.0}"
    )
    backends = ["-b", "slurm", "-b", "sagemaker"]
    assert run("check", *backends, "--set", valid, "--set", "slurm={}", *words) == 65
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["list"], ["list", "--json"], ["status", "nothing", "--json"]])
def test_output_into_a_string(argv, capsys):
    """From Python, as pytest's capsys and contextlib.redirect_stdout replace the streams."""
    code = cli.main(argv)
    printed = capsys.readouterr().out
    held = io.StringIO()
    with contextlib.redirect_stdout(held):
        assert cli.main(argv) == code
    assert held.getvalue() == printed


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        ("", ["local"]),
        ("slurm: {partition: cpu}\n", ["slurm"]),
        ("slurm: {}\nlocal: {}\n", ["local", "slurm"]),
        ("backend: slurm\n", ["slurm"]),
        ("backend: local\nslurm: {}\n", ["local", "slurm"]),
    ],
)
def test_check_cost_when_and_doctor_mean_the_same_backends(
    project, capsys, monkeypatch, sections, named
):
    with (project / "job.yaml").open("a") as file:
        file.write(sections)
    monkeypatch.setattr("deploykit.backends.slurm.when", lambda plan: [])
    monkeypatch.setattr("deploykit.backends.slurm.examine", lambda *_, **__: [])

    def backends(verb):
        run(verb, "--json")
        shown = json.loads(capsys.readouterr().out)
        return [one["backend"] for one in shown.get("backends", [shown])]

    assert backends("cost") == backends("when") == named
    run("check", "--json")
    assert json.loads(capsys.readouterr().out)["backends"] == named
    run("doctor")
    shown = capsys.readouterr().out
    assert [name for name in ("local", "slurm") if f"{name}: " in shown] == named


def test_a_submit_to_the_default_backend_names_the_sections_of_others(project, capsys, monkeypatch):
    with (project / "job.yaml").open("a") as file:
        file.write("slurm: {}\n")
    note = "note: runs on local, the default backend; use -b to choose slurm instead"
    assert run("submit", "--dry-run") == 0
    assert note in capsys.readouterr().err
    for explicit in (["-b", "local"], ["--set", "backend=local"]):
        assert run("submit", "--dry-run", *explicit) == 0
        assert "the default" not in capsys.readouterr().err
    monkeypatch.setenv("DEPLOYKIT_BACKEND", "local")
    assert run("submit", "--dry-run") == 0
    assert "the default" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("entrypoint: train.py", "expected a section, got 'train.py' (for example entrypoint: {"),
        ("resources: {gpus: 4}", "resources.gpus: unknown key (did you mean `gpus_per_node: 4`?)"),
        ("resources: {ranks: 4}", "unknown key (did you mean `processes_per_node: 4`?)"),
        ("resources: {num_nodes: 2}", "unknown key (did you mean `nodes: 2`?)"),
        ("resources: {walltime: 1h}", "unknown key (did you mean `time_limit: 1h`?)"),
        ("sagemaker: {distribution: torch_ddp}", "(did you mean 'torch_distributed'?)"),
        ("sagemaker: {distribution: pytorch_ddp}", "(torch_distributed starts the ranks"),
        ("sagemaker: {distribution: ddp}", "(torch_distributed starts the ranks"),
        ("sagemaker: {distribution: mip}", "(did you mean 'mpi'?)"),
    ],
)
def test_what_other_programs_write_is_answered_with_an_example(project, capsys, text, said):
    name, _, _ = text.partition(":")
    keys = {"name": "name: x", "entrypoint": "entrypoint: {script: train.py}", name: text}
    (project / "job.yaml").write_text("\n".join(keys.values()) + "\n")
    assert run("check") == 65
    shown = capsys.readouterr().err
    assert said in shown
    assert "mean 'pytorchddp'" not in shown
