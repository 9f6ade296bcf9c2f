"""`deploykit.launch`: a function on all ranks of a job, its values and its exceptions."""

from __future__ import annotations

import atexit
import functools
import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import deploykit
from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.lib.errors import (
    DeploykitError,
    FunctionFailed,
    JobFileError,
    NotFound,
    NotPermitted,
    RunFailed,
    TimedOut,
    UsageError,
)


def summed(scale, *, plus=0):
    """All ranks add up their numbers, in a process group."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    number = torch.tensor([dist.get_rank() * scale + plus])
    dist.all_reduce(number)
    dist.destroy_process_group()
    sys.stdout.write(f"rank {os.environ['RANK']} has added\n")
    return int(number), os.environ["WORLD_SIZE"], str(Path.cwd())


def fails_on_rank_1():
    if os.environ["RANK"] == "1":
        raise ValueError("bad luck")
    time.sleep(100)


def says_hello_and_sleeps():
    print("hello")  # noqa: T201 - a line of the log
    time.sleep(100)


@pytest.mark.torch
def test_each_rank_returns_a_value(project):
    lines = []
    function = functools.partial(summed, plus=10)
    given = {"nodes": 2, "processes_per_node": 2, "env": {"OMP_NUM_THREADS": "1"}}
    values = deploykit.launch(function, 3, on_line=lines.append, **given)
    assert values == dict.fromkeys(range(4), (3 * 6 + 4 * 10, "4", str(project)))
    assert sorted(line.rank for line in lines if "has added" in line.text) == [0, 1, 2, 3]
    (run,) = deploykit.runs()
    assert (run.name, run.state) == ("function", deploykit.State.SUCCEEDED)
    assert deploykit.get(run.id).results() == values
    again = run.rerun()
    assert again.results() == values
    assert (again.folder / "results/0.pkl").exists()
    assert not list(paths.bundles().glob("tmp*"))
    modes = {path.stat().st_mode & 0o077 for path in [run.folder, *run.folder.glob("results/*")]}
    assert modes == {0}


def leaves_its_group(told):
    """Note at the end of Python which threads of gloo there are."""
    import torch
    import torch.distributed as dist

    def note():
        names = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        Path(told, os.environ["RANK"]).write_text(",".join(n for n in names if "gloo" in n))

    atexit.register(note)
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))


@pytest.mark.torch
def test_no_thread_of_a_group_that_the_function_leaves_outlives_it(project, tmp_path):
    deploykit.launch(leaves_its_group, str(tmp_path), processes_per_node=2)
    assert [(tmp_path / rank).read_text() for rank in "01"] == ["", ""]


@pytest.mark.torch
def test_an_exception_comes_back_with_its_traceback(project):
    with pytest.raises(FunctionFailed, match="rank 1: ValueError: bad luck") as caught:
        deploykit.launch(fails_on_rank_1, processes_per_node=2)
    error = caught.value
    assert (error.rank, error.kind, error.exit_code) == (1, "ValueError", 1)
    assert isinstance(error.__cause__, ValueError)
    assert "in fails_on_rank_1" in error.traceback
    assert "call.py" not in error.traceback
    assert pickle.loads(pickle.dumps(error)).traceback == error.traceback
    (run,) = deploykit.runs(state="failed")
    assert (run.name, error.run) == ("fails-on-rank-1", run.id)
    assert any(line.text.endswith("ValueError: bad luck") for line in run.logs(first_error=True))


@pytest.mark.torch
def test_a_rank_that_is_killed_leaves_no_value(project):
    with pytest.raises(RunFailed) as caught:
        deploykit.launch(lambda: os.kill(os.getpid(), 9))
    assert not isinstance(caught.value, FunctionFailed)
    assert caught.value.exit_code != 0


@pytest.mark.torch
def test_a_value_that_cannot_be_pickled_is_an_error_of_its_rank(project):
    with pytest.raises(FunctionFailed, match=r"rank 0: TypeError: .*pickle"):
        deploykit.launch(threading.Lock)


@pytest.mark.torch
def test_a_launch_can_be_waited_for_later_and_cancelled(project):
    run = deploykit.launch(time.sleep, 100, wait=False, name="sleeper")
    with pytest.raises(TimedOut):
        run.results(timeout=0.1)
    run.cancel()
    with pytest.raises(RunFailed) as caught:
        run.results()
    assert caught.value.exit_code == 143


@pytest.mark.torch
def test_interrupting_the_call_cancels_the_run(project):
    def interrupt(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        deploykit.launch(says_hello_and_sleeps, on_line=interrupt)
    (run,) = deploykit.runs()
    assert run.wait(120).state is deploykit.State.CANCELLED


def test_a_function_that_cannot_travel_is_refused(project):
    lock = threading.Lock()
    with pytest.raises(UsageError, match=r"cannot pickle .*: TypeError: .*lock") as caught:
        deploykit.launch(lambda: lock)
    assert "open them inside the function" in caught.value.hint
    assert deploykit.runs() == []


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"backend": "sagemaker"}, "backend sagemaker does not offer `launch`"),
        (
            {"backend": "slurm", "slurm": {"host": "login", "folder": "/shared"}},
            "slurm.host: is not supported",
        ),
        ({"backend": "slurm", "slurm": {"array": 3}}, "slurm.array: is not supported"),
        ({"nodes": 0}, "resources.nodes: must be at least 1, got 0"),
        ({"node": 2}, "node: unknown key"),
    ],
)
def test_what_no_function_can_have_is_refused_before_anything_is_sent(project, keys, message):
    with pytest.raises((UsageError, JobFileError), match=message.replace(".", r"\.")):
        deploykit.launch(len, "x", **keys)
    assert deploykit.runs() == []
    assert not list(paths.bundles().glob("tmp*"))


KILLED = """\
import os, signal
import deploykit
from deploykit.run import lifecycle
lifecycle.submit = lambda plan: os.kill(os.getpid(), signal.SIGKILL)
deploykit.launch(len, "x")
"""


def test_a_launch_that_is_killed_leaves_nothing_that_prune_does_not_find(project, capsys):
    subprocess.run([sys.executable, "-c", KILLED], check=False)
    archive, scratch = sorted(paths.bundles().iterdir(), key=Path.is_dir)
    for path in (*scratch.iterdir(), scratch, archive):
        os.utime(path, (0, 0))
    assert sorted(path.name for path in paths.state().iterdir()) == ["bundles"]
    assert cli.main(["prune", "--dry-run"]) == 0
    listed = capsys.readouterr().out
    for path in (archive, scratch):
        assert f"\tbundles/{path.name}\n" in listed
    assert cli.main(["prune", "--yes"]) == 0
    assert list(paths.bundles().iterdir()) == []


@pytest.fixture
def stored(project, monkeypatch):
    """A run that has ended, with the record of one rank."""
    from tests.backends.test_example_backend import EXAMPLES

    monkeypatch.syspath_prepend(EXAMPLES)
    import backend_print

    from deploykit.backends import base as backend

    monkeypatch.setattr(backend, "find", lambda name: backend_print)
    run = deploykit.submit(backend="print", run="stored")
    run.wait()
    paths.private_folder(run.folder / "results")
    record = {"rank": 0, "value": pickle.dumps("a value")}
    paths.write(run.folder / "results/0.pkl", pickle.dumps(record))
    return run


def test_results_are_not_read_where_others_could_have_written_them(stored):
    assert stored.results() == {0: "a value"}
    folder = stored.folder / "results"
    folder.chmod(0o777)
    with pytest.raises(NotPermitted, match="open to other users"):
        stored.results()


def test_a_run_of_a_script_has_no_results(stored):
    (stored.folder / "results/0.pkl").unlink()
    with pytest.raises(NotFound, match="stored has no results"):
        stored.results()


class Gone:
    """What this process cannot read."""

    def __reduce__(self):
        return (int, ("no number",))


def test_a_value_that_cannot_be_read_here_is_named(stored):
    record = {"rank": 0, "value": pickle.dumps(Gone())}
    paths.write(stored.folder / "results/0.pkl", pickle.dumps(record))
    with pytest.raises(DeploykitError, match="cannot read the value of rank 0 of stored"):
        stored.results()
