"""The Python API: it says what the command line says, and leaves the process as it is."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

import deploykit
from deploykit.cli import main as cli
from deploykit.job.job import EntrypointKeys, EnvironmentKeys, InputChannelKeys, ResourcesKeys
from deploykit.job.model import (
    Entrypoint,
    Environment,
    InputChannel,
    JobSpec,
    Problem,
    Resources,
    State,
    Status,
)
from deploykit.lib import errors
from deploykit.lib.errors import JobFileError, NotFound, RunFailed, TimedOut, UsageError
from tests.backends.test_example_backend import installed  # noqa: F401 - a backend that runs nothing

HELLO = {"script": "train.py", "args": ["--epochs", 5]}


def job(**keys):
    return deploykit.Job(
        **{"name": "hello", "entrypoint": HELLO, "resources": {"time_limit": "5m"}, **keys}
    )


def command(capsys, *argv):
    """The exit code and the JSON of a command."""
    code = cli.main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_importing_it_imports_nothing_else():
    code = (
        "import sys; before = set(sys.modules); import deploykit; print(set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "{'deploykit'}\n"


def test_every_public_name_is_there_and_described():
    assert set(deploykit.__all__) <= set(dir(deploykit))
    for name in deploykit.__all__:
        assert inspect.getdoc(getattr(deploykit, name)), name
    with pytest.raises(AttributeError, match="no attribute 'submitt'"):
        deploykit.submitt  # noqa: B018


# The same cases through the command line and from Python


def test_a_plan_is_the_text_of_the_dry_run(project, capsys):
    argv = ("--backend", "slurm", "--run", "one", "--set", "resources.nodes=2", "--", "--lr", "0.1")
    _, shown = command(capsys, "submit", "--dry-run", *argv[:-3])
    plan = deploykit.plan(backend="slurm", run="one", set={"resources.nodes": 2})
    assert (plan.text, plan.run, plan.backend) == (shown["text"], shown["run"], shown["backend"])
    assert (plan.target, plan.language) == (shown["target"], shown["language"])
    assert (list(plan.files), plan.size) == (shown["bundle"]["files"], shown["bundle"]["bytes"])
    assert [problem._asdict() for problem in plan.warnings] == shown["warnings"]
    cli.main(["submit", "--dry-run", *argv])
    given = {"backend": "slurm", "run": "one", "set": {"resources.nodes": 2}, "args": ["--lr", 0.1]}
    assert str(deploykit.plan("job.yaml", **given)) == capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "arguments"),
    [
        (["other.yaml"], {"job": "other.yaml"}),
        (["--backend", "slrum"], {"backend": "slrum"}),
        (["--run", "a b"], {"run": "a b"}),
        (["--set", "resources.node=2"], {"set": {"resources.node": 2}}),
        (["--set", "resources.nodes=many"], {"set": {"resources.nodes": "many"}}),
        (["--set", "entrypoint.args='--lr 1'"], {"set": {"entrypoint.args": "--lr 1"}}),
        (["--backend", "local", "--set", "output=s3://b"], {"set": {"output": "s3://b"}}),
        (
            ["--strict", "--set", "resources.memory=1GiB"],
            {"set": {"resources.memory": "1GiB"}, "strict": True},
        ),
        (["--", "\udcff"], {"args": ["\udcff"]}),
    ],
)
def test_an_error_is_the_same_with_its_exit_code(project, capsys, argv, arguments):
    with pytest.raises(errors.DeploykitError) as caught:
        deploykit.submit(**{"job": "job.yaml", **arguments})
    error = caught.value
    code = cli.main(["submit", "--json", *argv])
    shown = json.loads(capsys.readouterr().out)["error"]
    assert (code, shown["exit_code"]) == (error.exit_code, error.exit_code)
    assert (shown["message"], shown["hint"]) == (error.message, error.hint)
    assert shown["problems"] == [problem._asdict() for problem in error.problems]
    assert shown["transient"] is error.transient


def test_check_finds_what_the_command_finds(project, capsys):
    (project / "job.yaml").write_text((project / "job.yaml").read_text() + "local: {}\nslurm: {}\n")
    override = "resources.memory=1GiB"
    _, shown = command(capsys, "check", "--set", override)
    found = deploykit.check(set=dict([override.split("=")]))
    assert [problem._asdict() for problem in found] == shown["warnings"] != []
    assert deploykit.check(backend="slurm") == []
    with pytest.raises(JobFileError, match=r"resources\.memory: is not enforced"):
        deploykit.check(set={"resources.memory": "1GiB"}, strict=True)


def test_a_run_is_what_the_command_shows(project, capsys):
    run = deploykit.submit(backend="print", run="one", args=["it's"])
    assert run.wait(timeout=60).state is deploykit.State.SUCCEEDED
    ((_, (shown,)), (_, listed)) = (command(capsys, "status", "one"), command(capsys, "list"))
    assert listed == [shown]
    status = run.status()
    assert (shown["run"], shown["name"], shown["backend"]) == (run.id, run.name, run.backend)
    assert (shown["state"], shown["exit_code"]) == (status.state.value, status.exit_code)
    assert (shown["handle"], shown["reason"]) == (run.handle, status.reason)
    assert (Path(shown["folder"]), shown["output"]) == (run.folder, run.output)
    assert shown["created"] == f"{run.created:%FT%TZ}"
    assert shown["commit"] is run.commit is None
    cli.main(["logs", "one"])
    assert "".join(f"{line}\n" for line in run.logs()) == capsys.readouterr().out
    assert deploykit.runs() == [run]


def test_nothing_is_printed(project, capfd):
    run = deploykit.submit(backend="print")
    run.wait()
    list(run.logs(follow=True))
    run.diagnose()
    deploykit.check()
    deploykit.plan(backend="print")
    with pytest.raises(NotFound):
        deploykit.get("nothing")
    assert capfd.readouterr() == ("", "")


# A job in Python


def test_a_job_gives_the_plan_of_its_file(project):
    (project / "data").mkdir()
    (project / "job.yaml").write_text(
        "name: hello\nentrypoint: {script: train.py, args: [--lr, 0.1]}\nenv: {A: b}\n"
        "resources: {time_limit: 30m, nodes: 2, processes_per_node: 4, memory: 4GiB}\n"
        "data: {train: data}\nslurm: {partition: gpu}\n"
    )
    same = deploykit.Job(
        name="hello",
        entrypoint={"script": Path("train.py"), "args": ["--lr", 0.1]},
        env={"A": "b"},
        resources={
            "time_limit": timedelta(minutes=30),
            "nodes": 2,
            "processes_per_node": 4,
            "memory": "4GiB",
        },
        data={"train": project / "data"},
        slurm={"partition": "gpu"},
    )
    texts = {str(deploykit.plan(job, backend="slurm", run="x")) for job in ("job.yaml", same)}
    assert len(texts) == 1
    assert str(deploykit.plan(pickle.loads(pickle.dumps(same)), backend="slurm", run="x")) in texts
    assert deploykit.plan(same, run="x").backend == "local"
    assert deploykit.plan(job(backend="slurm"), run="x").backend == "slurm"


def test_a_job_needs_a_name_and_an_entrypoint_only(project):
    small = deploykit.Job(name="hello", entrypoint={"script": "train.py"})
    (project / "job.yaml").write_text("name: hello\nentrypoint: {script: train.py}\n")
    assert str(deploykit.plan(small, run="x")) == str(deploykit.plan(run="x"))
    needs = r'time_limit: is required .*set={"resources.time_limit": "30m"}'
    with pytest.raises(JobFileError, match=needs):
        deploykit.plan(small, backend="slurm")


def test_hints_about_the_command_line_are_about_arguments_in_python(project, capsys):
    data = {"data": {"train": "hf://bucket/train"}}
    for backend, hint in (("local", "use a folder"), ("slurm", "a shared folder, and pass")):
        with pytest.raises(JobFileError, match=f'{hint}.* set={{"data.train": FOLDER}}') as caught:
            deploykit.plan(backend=backend, set=data)
        assert "--set" not in str(caught.value)
        override = "data.train=hf://bucket/train"
        assert cli.main(["check", "--backend", backend, "--set", override]) == 65
        assert "--set data.train=FOLDER" in capsys.readouterr().err


def test_a_job_has_every_key_of_a_job_file():
    for cls, keys in (
        (JobSpec, inspect.signature(deploykit.Job).parameters),
        (Entrypoint, EntrypointKeys.__annotations__),
        (Resources, ResourcesKeys.__annotations__),
        (Environment, EnvironmentKeys.__annotations__),
        (InputChannel, InputChannelKeys.__annotations__),
    ):
        assert {field.name for field in fields(cls)} == set(keys) - {"sections"}


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"nodez": 2}, "nodez: unknown key (known keys: "),
        ({"retries": "3"}, "retries: expected a whole number, got '3' (remove the quotes)"),
        ({"name": 7}, 'name: expected text, got 7 (put it in quotes: "7")'),
        (
            {"resources": {"time_limit": timedelta(seconds=5)}},
            "resources.time_limit: must be at least 60 s, got '5s'",
        ),
        (
            {"resources": {"time_limit": 60}},
            "resources.time_limit: expected a time such as ",
        ),
        (
            {"entrypoint": {"script": "train.py", "args": [True]}},
            'entrypoint.args[0]: expected text, got True (put it in quotes: "True")',
        ),
        (
            {"entrypoint": {"script": "trian.py"}},
            "entrypoint.script: file 'trian.py' not found in {} (did you mean 'train.py'?)",
        ),
    ],
)  # fmt: skip
def test_a_wrong_key_has_its_name_and_what_was_meant(project, keys, problem):
    with pytest.raises(JobFileError) as caught:
        deploykit.check(job(**keys))
    (found,) = caught.value.problems
    assert str(found).startswith(problem.format(project))
    assert str(caught.value) == f"the job: 1 problem\n  {found}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"args": "--lr 0.1"}, "args='--lr 0.1': expected a list"),
        ({"args": ["--lr", None]}, r"args\[1\]: expected text, a number or a path, got None"),
        ({"set": {"resources.": 2}}, "set: 'resources.' is not a key"),
    ],
)
def test_a_wrong_argument_is_named(project, arguments, message):
    with pytest.raises(UsageError, match=message):
        deploykit.plan(**arguments)
    with pytest.raises(UsageError, match="'lost' is not a valid State") as caught:
        deploykit.runs(state="lost")
    assert "failed" in caught.value.hint


def test_setting_a_value_does_not_change_the_job(project):
    given = job(slurm={"partition": "gpu"})
    before = repr(given)
    plan = deploykit.plan(
        given, backend="slurm", set={"slurm.partition": "cpu", "output": Path("o")}
    )
    assert "--partition=cpu" in plan.text
    assert repr(given) == before


# Runs


@pytest.fixture
def ended(project):
    """Three runs that have ended, the newest first."""
    for name in ("first", "second", "third"):
        deploykit.submit(backend="print", run=name, set={"name": f"job-{name}"}).wait()
    return ["third", "second", "first"]


def test_runs_are_selected(ended):
    assert [run.id for run in deploykit.runs()] == ended
    assert [run.id for run in deploykit.runs(limit=2)] == ended[:2]
    assert [run.id for run in deploykit.runs(name="job-first")] == ["first"]
    assert deploykit.runs(backend="slurm") == []
    assert deploykit.runs(state="failed") == deploykit.runs(state=["failed", "queued"]) == []
    assert len(deploykit.runs(state=deploykit.State.SUCCEEDED, limit=2)) == 2


def test_a_run_is_got_by_its_id_or_its_beginning_and_never_by_its_end(ended):
    assert deploykit.get("second") == deploykit.get("seco")
    for name in ("cond", "sec", ""):
        with pytest.raises(NotFound):
            deploykit.get(name)
    with pytest.raises(UsageError, match="does not offer `attach`"):
        deploykit.attach("elsewhere", "print")


def test_the_same_run_id_is_sent_once(project):
    plan = deploykit.plan(backend="print", run="one")
    assert plan.submit() == plan.submit() == deploykit.submit(backend="print", run="one")
    told = "belongs to a different job; argument 1 was not set, now more\n"
    with pytest.raises(UsageError, match=told):
        deploykit.submit(backend="print", run="one", args=["more"])
    with pytest.raises(UsageError, match=r"job; that run's backend is print\n"):
        deploykit.submit(backend="local", run="one")
    many = [f"--v{number}=new" for number in range(7)]
    with pytest.raises(UsageError, match=r"--v4 was not set, now new; and 2 more settings"):
        deploykit.submit(backend="print", run="one", args=many)


def test_a_run_can_be_run_again(project):
    first = deploykit.submit(backend="print", args=[1])
    again = first.rerun(args=[2], set={"name": "again"}, run="two")
    assert (again.id, again.name, again.backend) == ("two", "again", "print")
    assert [line.text for line in again.logs()] == ["train.py --epochs 5 1 2"]
    with pytest.raises(UsageError, match="unknown backend 'printt'"):
        again.rerun(backend="printt")


def test_a_run_that_goes_on_times_out(project, monkeypatch):
    import backend_print

    run = deploykit.submit(backend="print")
    state = deploykit.Status(deploykit.State.RUNNING)
    monkeypatch.setattr(backend_print, "status", lambda handles: dict.fromkeys(handles, state))
    with pytest.raises(TimedOut, match=f"{run.id} is running after 0.1 s") as caught:
        run.wait(0.1)
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.exit_code == cli.main(["wait", run.id, "--timeout", "0.1"])


@pytest.mark.parametrize(("state", "code"), [("failed", 3), ("cancelled", None), ("failed", None)])
def test_a_failed_run_can_be_an_exception_with_the_exit_code(project, monkeypatch, state, code):
    import backend_print

    run = deploykit.submit(backend="print")
    status = deploykit.Status(deploykit.State(state), "", "a reason", code)
    monkeypatch.setattr(backend_print, "status", lambda handles: dict.fromkeys(handles, status))
    assert run.wait() == run.status() == status
    with pytest.raises(RunFailed, match=f"{run.id} {state}: a reason") as caught:
        run.wait(check=True)
    assert caught.value.exit_code == cli.main(["wait", run.id])


def test_lines_are_selected_as_by_the_command(project, capsys):
    run = deploykit.submit(backend="print")
    assert list(run.logs(rank=3)) == []
    assert [line.text for line in run.logs(node=0)] == ["train.py --epochs 5"]
    with pytest.raises(UsageError, match="time with a time zone"):
        run.logs(since=datetime(2026, 1, 1))  # noqa: DTZ001
    assert list(run.logs(since=datetime.now(UTC) + timedelta(days=1))) == []
    with pytest.raises(UsageError) as caught:
        run.logs(task=1)
    code, shown = command(capsys, "logs", run.id, "--task", "1")
    assert (code, shown["error"]["message"]) == (caught.value.exit_code, str(caught.value))


def test_a_diagnosis_is_the_text_of_the_command(project, capsys, monkeypatch):
    import backend_print

    line = deploykit.LogLine(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", rank=1
    )
    failed = Status(State.FAILED, exit_code=1)
    monkeypatch.setattr(backend_print, "status", lambda handles: dict.fromkeys(handles, failed))
    monkeypatch.setattr(backend_print, "logs", lambda handle, follow: iter([line]))
    run = deploykit.submit(backend="print")
    diagnosis = run.diagnose()
    assert [cause.rule.label for cause in diagnosis.causes] == ["cuda_oom"]
    cli.main(["diagnose", run.id])
    assert capsys.readouterr().out.startswith(f"{diagnosis}\n")


# In somebody's process


@pytest.mark.slow
def test_threads_submit_at_once_and_the_process_is_unchanged(project):
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    before, threads = (dict(os.environ), Path.cwd()), set(threading.enumerate())

    def work(number):
        run = deploykit.submit(job(), backend="print", args=[number])
        return run.wait().state.value, [line.text for line in run.logs()]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        found = list(pool.map(work, range(24)))
    assert found == [("succeeded", [f"train.py --epochs 5 {number}"]) for number in range(24)]
    assert len({run.id for run in deploykit.runs()}) == 24
    assert (dict(os.environ), Path.cwd()) == before
    assert set(threading.enumerate()) <= threads  # those of earlier tests may end meanwhile
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == handlers


def test_it_works_in_a_running_event_loop(project):
    async def main():
        run = deploykit.submit(backend="print")
        status, lines = await asyncio.gather(
            asyncio.to_thread(run.wait, 60), asyncio.to_thread(list, run.logs(follow=True))
        )
        return status.state.value, len(lines)

    assert asyncio.run(main()) == ("succeeded", 1)


def every_error():
    kinds, todo = [], [errors.DeploykitError]
    while todo:
        kinds.append(todo.pop())
        todo += [kind for kind in kinds[-1].__subclasses__() if kind.__module__ == errors.__name__]
    return kinds


@pytest.mark.parametrize("kind", every_error())
def test_an_error_can_be_pickled_and_says_everything(kind):
    problems = [
        Problem("a.b", "is wrong", "try c", line=3),
        Problem("", "is odd", severity="warning"),
    ]
    given = {
        JobFileError: ("job.yaml", problems),
        errors.ConfigError: ("config.toml", problems),
        errors.FunctionFailed: (1, "ValueError", "Traceback\nValueError: bad"),
    }.get(kind, ("a message",))
    error = kind(*given, **({"run": "one"} if issubclass(kind, RunFailed) else {}))
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))
    if kind is JobFileError:
        lines = ["job.yaml: 1 problem", "line 3: a.b: is wrong (try c)", "warning: is odd"]
        assert str(error) == "\n  ".join(lines)


def test_a_traceback_shows_the_hint():
    done = subprocess.run(
        [sys.executable, "-c", "import deploykit; deploykit.submit('none.yaml')"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.endswith("or create a job file with `deploykit init`\n")


def test_metrics_and_progress_are_those_of_the_commands(live, capsys):
    live.log("step 1/4 loss 0.5 lr 0.1", "step 2/4 loss 0.25 lr 0.1")
    _, shown = command(capsys, "metrics", "live-run", "--name", "lo*")
    run = deploykit.get("live-run")
    assert [one._asdict() for one in run.metrics("lo*")] == shown["points"]
    assert {one.name for one in run.metrics()} == {"loss", "lr"}
    progress = run.progress()
    assert (progress.step, progress.total, progress.loss) == (2, 4, 0.25)
    assert dict(progress.sources) == shown["progress"]["sources"]
