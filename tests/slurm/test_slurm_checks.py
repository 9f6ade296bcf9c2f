"""What `check` refuses of a job for Slurm, and by which name."""

from __future__ import annotations

import pytest
from plans import JOB, PYTHON, directives, job, script

from deploykit.backends import slurm
from deploykit.backends.slurm import Options, sent
from deploykit.backends.slurm.options import Container


def problems(job=JOB, options=None):
    return {problem.path: problem for problem in slurm.check(job, options or Options())}


@pytest.mark.parametrize("value", ["a\nb", "a\r", "\x00", "\x1b", "\x85", "gpu\n#SBATCH --hold"])
@pytest.mark.parametrize(
    "name",
    ["partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "python"],
)
def test_values_that_would_leave_their_line(name, value):
    found = problems(options=Options(**{name: value}))
    assert "#SBATCH line" in found[f"slurm.{name}"].message
    found = problems(options=Options(extra={"comment": value}))
    assert "#SBATCH line" in found["slurm.extra.comment"].message


def test_empty_values_are_named():
    found = problems(options=Options(partition="", python=" ", exclude=","))
    assert set(found) == {"slurm.partition", "slurm.python", "slurm.exclude"}


@pytest.mark.parametrize("name", ["job-name", "outp", "time", "part", "no-requeue", "wrap", "nod"])
def test_extra_cannot_take_over_an_option_of_deploykit(name):
    found = problems(options=Options(extra={name: "x"}))
    assert "is set by deploykit" in found[f"slurm.extra.{name}"].message


@pytest.mark.parametrize(
    "name", ["nice", "mem-per-cpu", "time-min", "gres", "no-kill", "dependency"]
)
def test_extra_takes_everything_else(home, name):
    options = Options(extra={name: "x"}, python=PYTHON)
    assert problems(options=options) == {}
    assert directives(script(options=options))[name] == "x"


@pytest.mark.parametrize("name", ["comment", "comm", "begin", "mem-per-cpu"])
def test_an_option_without_its_value_would_take_the_next_line(name):
    assert (
        "needs a value"
        in problems(options=Options(extra={name: ""}))[f"slurm.extra.{name}"].message
    )


@pytest.mark.parametrize("name", ["contiguous", "hold", "nice", "of-a-plugin"])
def test_an_option_may_take_none(name):
    assert problems(options=Options(extra={name: ""})) == {}


def test_gres_is_taken_where_gpus_are_asked_for_by_it():
    options = Options(gres_style="gres", extra={"gres": "nvme:1"})
    assert problems(options=options) == {}
    found = problems(job(resources={"gpus_per_node": 1}), options)
    assert found["slurm.extra.gres"].hint == "use `resources.gpus_per_node`"


@pytest.mark.parametrize("path", ["output", "checkpoints", "data.train"])
def test_object_storage_is_no_folder(path):
    place = "s3://bucket/x"
    changes = {"data": {"train": place}} if path == "data.train" else {path: place}
    problem = problems(job(**changes))[path]
    assert place in problem.message
    assert f"--set {path}=FOLDER" in problem.hint


def test_numbers_that_do_not_fit():
    found = problems(job(resources={"time_limit": 60, "memory": 1000}), Options(signal_seconds=60))
    assert set(found) == {"slurm.signal_seconds", "resources.memory"}


@pytest.mark.parametrize("name", ["per%cent", "back\\slash", "line\nend"])
def test_a_state_folder_that_slurm_cannot_have(monkeypatch, name):
    monkeypatch.setenv("DEPLOYKIT_HOME", f"/shared/{name}")
    assert "set DEPLOYKIT_HOME" in problems()[""].hint


def test_variables_that_bash_keeps_for_itself():
    assert set(problems(job(env={"UID": "5", "RANDOM": "5", "OMP_NUM_THREADS": "1"}))) == {
        "env.UID",
        "env.RANDOM",
    }


@pytest.mark.parametrize("mount", ["relative", "/a,b", "/a:/b:ro", ""])
def test_mounts_that_are_none(mount):
    found = problems(options=Options(container=Container("x.sif", mounts=(mount,))))
    assert "slurm.container.mounts[0]" in found


def test_a_folder_that_a_container_cannot_be_given():
    found = problems(job(output="/a,b"), Options(container=Container("-x.sif")))
    assert set(found) == {"output", "slurm.container.image"}


def test_a_run_that_another_waits_for(home, tmp_path, monkeypatch):
    """Its job's id is in the plan, so it must have been sent."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path))
    options = Options(python=PYTHON, after={"prepare-1": "succeeded", "clean-1": "ended"})
    assert set(problems(options=options)) == {"slurm.after.prepare-1", "slurm.after.clean-1"}
    for run, number in (("prepare-1", "41"), ("clean-1", "42")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        sent.record(tmp_path / "runs" / run, number)
    assert problems(options=options) == {}
    found = directives(script(options=options))
    assert found["dependency"] == "afterok:41,afterany:42"
    assert found["kill-on-invalid-dep"] == "yes"


def test_arrays_that_cannot_be():
    assert set(problems(options=Options(at_once=2))) == {"slurm.at_once"}


def test_a_host_needs_a_folder_there():
    assert set(problems(options=Options(host="-login1"))) == {"slurm.host", "slurm.folder"}
    assert set(problems(options=Options(folder="/shared"))) == {"slurm.folder"}


def test_odd_options(home):
    found = problems(options=Options(python="-x", setup=("module load x\r",)))
    assert set(found) == {"slurm.python", "slurm.setup[0]"}
