"""Trials known beforehand are one job array on a real Slurm cluster, each a run of its own."""

from __future__ import annotations

import subprocess

import pytest

from deploykit.backends.slurm import sbatch
from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.lib.errors import SubmitRefused
from deploykit.run import lifecycle, registry
from deploykit.run import state as run_state
from tests.sweep import plain

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]
JOB = """\
name: toy
entrypoint: {script: train.py, launcher: python}
resources: {time_limit: 5m}
"""


@pytest.fixture
def job(cluster, toy, monkeypatch):
    """Write the job file, with more keys."""

    def file(text=""):
        monkeypatch.setenv("DEPLOYKIT_BACKEND", "slurm")
        (toy / "job.yaml").write_text(JOB + text)

    file()
    return file


def arrays(sweep="s"):
    """The number of tasks of each array of the sweep."""
    folders = sorted((paths.state() / "sweeps" / sweep / "arrays").iterdir())
    return [len(list((folder / "tasks").iterdir())) for folder in folders]


def handles(count, sweep="s"):
    rows = registry.lookup(*(f"{sweep}-{number}" for number in range(count)))
    return [rows[f"{sweep}-{number}"].id for number in range(count)]


def test_each_task_is_a_run_with_a_folder_of_its_own(job, write, sweep, capsys):
    write(trials=5, parallel=2)
    assert sweep("start", "--sweep", "s", "--json")["counts"] == {"succeeded": 5}
    assert arrays() == [5]
    array = handles(1)[0].partition("_")[0]
    assert handles(5) == [f"{array}_{number}" for number in range(5)]
    assert plain.started(paths.state()) == {f"s-{number}": 1 for number in range(5)}
    for number in range(5):
        run = paths.run_folder(f"s-{number}")
        assert not (run / "source" / "train.py").is_symlink()
        assert (run / "source").stat().st_mode & 0o777 == 0o700
        assert (run / "claim").readlink().name == f"{array}_{number}"
    capsys.readouterr()
    assert cli.main(["logs", "s-3"]) == 0
    assert "step 3/3" in capsys.readouterr().out


def test_the_cap_bounds_the_first_array(job, write, sweep):
    """Each run may cost 3.60 USD, and costs almost nothing."""
    once = "{preemption: 0, time_limit: 0, node_failure: 0, transient: 0}"
    job(f"slurm: {{price: 36 USD/node-hour, restarts: {once}}}\n")
    write(trials=4, parallel=4, max_cost="8 USD")
    assert sweep("start", "--sweep", "s", "--json")["counts"] == {"succeeded": 4}
    assert arrays()[0] == 2
    assert set(plain.started(paths.state()).values()) == {1}


class Killed(BaseException):
    """The end of a controller, which no handler of an error notices."""


def test_an_array_whose_submit_was_interrupted_is_found(job, write, sweep, monkeypatch):
    write(trials=3, parallel=2)
    queue = sbatch._queue

    def killed(*args, **keys):
        queue(*args, **keys)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(sbatch, "_queue", killed)
        with pytest.raises(Killed):
            sweep("start", "--sweep", "s")
    assert not (paths.state() / "sweeps/s/arrays/0/job").exists()
    assert sweep("resume", "s", "--json")["counts"] == {"succeeded": 3}
    assert arrays() == [3]
    assert set(plain.started(paths.state()).values()) == {1}


def test_stop_cancels_all_tasks_and_a_resumed_sweep_sends_another_array(
    job, write, sweep, monkeypatch
):
    wait = "while '-r1' not in os.getcwd(): time.sleep(0.1)"
    write(
        trials=4,
        parallel=2,
        parameters=f'{{lr: {{range: [0.01, 0.05]}}, do: {{choice: ["{wait}"]}}}}',
    )
    submit = lifecycle.submit_array

    def killed(*args):
        submit(*args)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(lifecycle, "submit_array", killed)
        with pytest.raises(Killed):
            sweep("start", "--sweep", "s")
    assert cli.main(["cancel", "s-3"]) == 0
    rows = {row.run: row.state for row in run_state.refresh(registry.every())}
    assert rows.pop("s-3") == "cancelled"
    assert not {"cancelled", "failed"} & set(rows.values())
    assert sweep("stop", "s", "--json")["state"] == "stopped"
    assert {row.state for row in registry.every()} == {"cancelled"}
    queue = subprocess.run(["squeue", "--noheader"], capture_output=True, text=True, check=True)
    assert queue.stdout == ""
    assert sweep("resume", "s", "--json")["counts"] == {"succeeded": 3, "failed": 1}
    assert arrays() == [4, 3]


def test_an_array_that_is_refused_is_halved(job, write, sweep, monkeypatch):
    """As where a site limits how many jobs a user may submit."""
    write(trials=5, parallel=5)
    submit = lifecycle.submit_array

    def limited(array, plans):
        if len(plans) > 2:
            raise SubmitRefused("QOSMaxSubmitJobPerUserLimit")
        submit(array, plans)

    monkeypatch.setattr(lifecycle, "submit_array", limited)
    assert sweep("start", "--sweep", "s", "--json")["counts"] == {"succeeded": 5}
    assert "5 runs were not submitted as a job array" in sweep.notes
    assert arrays() == [2, 2]
    assert set(plain.started(paths.state()).values()) == {1}
