"""What `check` refuses in a job for Slurm, and the path of each problem."""

from __future__ import annotations

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.backends.slurm.options import Container
from tests.backends.slurm.plans import JOB, PYTHON, directives, job, script


def problems(job=JOB, options=None):
    return {problem.path: problem for problem in slurm.check(job, options or Options())}


@pytest.mark.parametrize("value", ["a\nb", "a\r", "\x00", "\x1b", "\x85", "gpu\n#SBATCH --hold"])
@pytest.mark.parametrize(
    "name",
    ["partition", "account", "qos", "constraint", "reservation", "nodelist", "exclude", "python"],
)
def test_values_that_would_break_out_of_their_line(name, value):
    problem_by_path = problems(options=Options(**{name: value}))
    assert "#SBATCH line" in problem_by_path[f"slurm.{name}"].message
    problem_by_path = problems(options=Options(extra={"comment": value}))
    assert "#SBATCH line" in problem_by_path["slurm.extra.comment"].message


def test_empty_values_are_refused():
    problem_by_path = problems(options=Options(partition="", python=" ", exclude=","))
    assert set(problem_by_path) == {"slurm.partition", "slurm.python", "slurm.exclude"}


@pytest.mark.parametrize("name", ["job-name", "outp", "time", "part", "no-requeue", "wrap", "nod"])
def test_extra_cannot_set_an_option_of_deploykit(name):
    problem_by_path = problems(options=Options(extra={name: "x"}))
    assert "cannot be set in slurm.extra" in problem_by_path[f"slurm.extra.{name}"].message


@pytest.mark.parametrize(
    "name", ["nice", "mem-per-cpu", "time-min", "gres", "no-kill", "dependency"]
)
def test_extra_accepts_every_other_option(home, name):
    options = Options(extra={name: "x"}, python=PYTHON)
    assert problems(options=options).keys() == {"slurm.python"}  # not on this machine: a warning
    assert directives(script(options=options))[name] == "x"


@pytest.mark.parametrize("name", ["comment", "comm", "begin", "mem-per-cpu"])
def test_an_option_that_requires_a_value(name):
    assert (
        "requires a value"
        in problems(options=Options(extra={name: ""}))[f"slurm.extra.{name}"].message
    )


@pytest.mark.parametrize("name", ["contiguous", "hold", "nice", "of-a-plugin"])
def test_an_option_without_a_value(name):
    assert problems(options=Options(extra={name: ""})) == {}


def test_gres_is_reserved_where_it_requests_the_gpus():
    options = Options(gres_style="gres", extra={"gres": "nvme:1"})
    assert problems(options=options) == {}
    problem_by_path = problems(job(resources={"gpus_per_node": 1}), options)
    assert problem_by_path["slurm.extra.gres"].hint == "use `resources.gpus_per_node`"


@pytest.mark.parametrize("path", ["output", "checkpoints", "data.train"])
def test_object_storage_is_refused(path):
    location = "s3://bucket/x"
    changes = {"data": {"train": location}} if path == "data.train" else {path: location}
    problem = problems(job(**changes))[path]
    assert location in problem.message
    assert f"--set {path}=FOLDER" in problem.hint


def test_notice_and_memory_out_of_range():
    problem_by_path = problems(
        job(resources={"time_limit": 60, "memory": 1000}), Options(signal_seconds=60)
    )
    assert set(problem_by_path) == {"slurm.signal_seconds", "resources.memory"}


@pytest.mark.parametrize("name", ["per%cent", "back\\slash", "line\nend"])
def test_a_state_folder_that_slurm_does_not_accept(monkeypatch, name):
    monkeypatch.setenv("DEPLOYKIT_HOME", f"/shared/{name}")
    assert "set DEPLOYKIT_HOME" in problems()[""].hint


def test_variables_that_bash_sets_itself():
    assert set(problems(job(env={"UID": "5", "RANDOM": "5", "OMP_NUM_THREADS": "1"}))) == {
        "env.UID",
        "env.RANDOM",
    }


@pytest.mark.parametrize("mount", ["relative", "/a,b", "/a:/b:ro", ""])
def test_malformed_mounts(mount):
    problem_by_path = problems(options=Options(container=Container("x.sif", mounts=(mount,))))
    assert "slurm.container.mounts[0]" in problem_by_path


def test_a_folder_that_cannot_be_mounted():
    problem_by_path = problems(job(output="/a,b"), Options(container=Container("-x.sif")))
    assert set(problem_by_path) == {"output", "slurm.container.image"}


def test_a_dependency_must_have_been_submitted(home, tmp_path, monkeypatch):
    """The plan contains the id of its job."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path))
    options = Options(after={"prepare-1": "succeeded", "clean-1": "ended"})
    assert set(problems(options=options)) == {"slurm.after.prepare-1", "slurm.after.clean-1"}
    for run, number in (("prepare-1", "41"), ("clean-1", "42")):
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "job").write_text(f"{number}\n")
    assert problems(options=options) == {}
    flags = directives(script(options=options))
    assert flags["dependency"] == "afterok:41,afterany:42"
    assert flags["kill-on-invalid-dep"] == "yes"


def test_at_once_requires_an_array():
    assert set(problems(options=Options(at_once=2))) == {"slurm.at_once"}


def test_a_host_requires_a_folder():
    assert set(problems(options=Options(host="-login1"))) == {"slurm.host", "slurm.folder"}
    assert set(problems(options=Options(folder="/shared"))) == {"slurm.folder"}


def test_hyphens_and_carriage_returns(home):
    problem_by_path = problems(options=Options(python="-x", setup=("module load x\r",)))
    assert set(problem_by_path) == {"slurm.python", "slurm.setup[0]"}
