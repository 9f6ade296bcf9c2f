"""What `check` refuses in a job for Slurm, and the path of each problem."""

from __future__ import annotations

import dataclasses

import pytest

from deploykit.backends import slurm
from deploykit.backends.slurm import Options
from deploykit.backends.slurm.options import Container
from deploykit.job.model import InputChannel
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


def gpus(count):
    return {"resources": {"gpus_per_node": count}}


@pytest.mark.parametrize(
    ("changes", "options", "paths"),
    [
        ({}, {"partition": "", "python": " ", "exclude": ","}, "partition python exclude"),
        ({}, {"python": "-x", "setup": ("module load x\r",)}, "python setup[0]"),
        ({}, {"nodelist": "n[1-2],n[3", "exclude": "n[4-5]"}, "nodelist"),
        ({}, {"at_once": 2}, "at_once"),
        ({}, {"host": "-login1"}, "host folder"),
        ({}, {"folder": "/shared"}, "folder"),
        ({}, {"gres_style": "gres", "extra": {"gres": "nvme:1"}}, ""),
        (gpus(1), {"gres_style": "gres", "extra": {"gres": "nvme:1"}}, "extra.gres"),
        (
            {"resources": {"time_limit": 60, "memory": 1000}},
            {"signal_seconds": 60},
            "signal_seconds ^resources.memory",
        ),
        ({"env": {"UID": "5", "RANDOM": "5", "OMP_NUM_THREADS": "1"}}, {}, "^env.UID ^env.RANDOM"),
        ({"output": "/a,b"}, {"container": Container("-x.sif")}, "^output container.image"),
        *(
            ({}, {"container": Container("x.sif", mounts=(mount,))}, "container.mounts[0]")
            for mount in ("relative", "/a,b", "/a:/b:ro", "")
        ),
        *(
            ({}, {"extra": {name: ""}}, "")
            for name in ("contiguous", "hold", "nice", "of-a-plugin")
        ),
    ],
)
def test_settings_and_the_paths_of_their_problems(changes, options, paths):
    """`^` marks a path outside the `slurm` section."""
    expected = {path[1:] if path.startswith("^") else f"slurm.{path}" for path in paths.split()}
    assert set(problems(job(**changes), Options(**options))) == expected


@pytest.mark.parametrize(
    ("value", "names", "message"),
    [
        ("x", "job-name outp time part no-requeue wrap nod", "cannot be set in slurm.extra"),
        ("", "comment comm begin mem-per-cpu", "requires a value"),
    ],
)
def test_options_that_extra_refuses(value, names, message):
    """Also abbreviated, as sbatch accepts them."""
    for name in names.split():
        problem_by_path = problems(options=Options(extra={name: value}))
        assert message in problem_by_path[f"slurm.extra.{name}"].message


def test_extra_accepts_every_other_option(home):
    names = ("nice", "mem-per-cpu", "time-min", "gres", "no-kill", "dependency")
    options = Options(extra=dict.fromkeys(names, "x"), python=PYTHON)
    assert problems(options=options).keys() == {"slurm.python"}  # not on this machine: a warning
    flags = directives(script(options=options))
    assert {flags[name] for name in names} == {"x"}


@pytest.mark.parametrize("path", ["output", "checkpoints"])
def test_object_storage_is_refused(path):
    location = "gs://bucket/x" if path == "checkpoints" else "s3://bucket/x"
    problem = problems(job(**{path: location}))[path]
    assert location in problem.message
    assert f"--set {path}=FOLDER" in problem.hint


def data(path="s3://bucket/x", stage=None, folder=None, **more):
    return job(data={"train": InputChannel(path, stage, folder)}, **more)


def test_data_in_s3_must_be_copied_to_the_nodes():
    problem = problems(data())["data.train"]
    assert problem.message == "s3://bucket/x is not a folder, which the slurm backend requires"
    assert problem.hint == "to copy it to the nodes, set train: {path: s3://bucket/x, stage: node}"
    assert "data.train" not in problems(data(stage="node"))
    assert "data.train" in problems(data("gs://bucket/x", "node"))
    assert "data.train.stage_folder" in problems(data("/shared", None, "/scratch"))
    elastic = {"resources": {"nodes": 4, "min_nodes": 2}}
    for stage, wrong in {"node": False, "shard": True, "shared": True}.items():
        assert ("data.train.stage" in problems(data(stage=stage, **elastic))) == wrong


def test_the_script_says_what_is_copied_where():
    text = script(data(stage="shard"))
    local = "the first writable folder among $SLURM_TMPDIR, /scratch, $TMPDIR and /tmp"
    copied = 'each node copies its share of "s3://bucket/x" to'
    assert f"# train: {copied} {local} before the ranks start\n" in text
    assert "export DEPLOYKIT_STAGE=" in text
    assert "DEPLOYKIT_DATA_TRAIN" not in text
    assert script(data("/data/x\n# y", "node")).count("\n# y") == 0
    assert '# train: each node copies "/data/Prüfung" to' in script(data("/data/Prüfung", "node"))


def test_a_container_needs_a_folder_of_the_node():
    image = Options(container=Container("image.sqsh"), python=PYTHON)
    assert "data.train.stage_folder" in problems(data(stage="node"), image)
    chosen = data(stage="node", folder="/local")
    assert "data.train.stage_folder" not in problems(chosen, image)
    mounts = script(chosen, image)
    assert ",/local:/local" in mounts
    assert "s3://bucket/x:" not in mounts


def test_checkpoints_may_be_in_a_bucket():
    saved = job(checkpoints="s3://bucket/x", keep_checkpoints=3)
    options = Options(python=PYTHON, checkpoint_folder="$SLURM_TMPDIR")
    assert problems(saved, options).keys() == {"slurm.python"}
    text = script(saved, options)
    assert "export DEPLOYKIT_CHECKPOINT_BUCKET=s3://bucket/x\n" in text
    assert "export DEPLOYKIT_CHECKPOINT_FOLDER='$SLURM_TMPDIR'\n" in text
    assert "export DEPLOYKIT_KEEP_CHECKPOINTS=3\n" in text
    task = script(saved, dataclasses.replace(options, array=2))
    assert 'DEPLOYKIT_CHECKPOINT_BUCKET=s3://bucket/x/"$SLURM_ARRAY_TASK_ID"' in task
    container = Container("image", "apptainer")
    text = script(saved, Options(container=container, checkpoint_folder="/scratch"))
    assert "/scratch:/scratch" in text
    assert "s3://bucket/x:" not in text


def test_what_a_bucket_for_checkpoints_requires():
    saved = job(checkpoints="s3://bucket/x", resources={"nodes": 4, "min_nodes": 2})
    assert "can change" in problems(saved)["checkpoints"].message
    assert "has no bucket name" in problems(job(checkpoints="s3:///x"))["checkpoints"].message
    folder = "slurm.checkpoint_folder"
    assert "requires" in problems(options=Options(checkpoint_folder="/scratch"))[folder].message
    own = problems(job(checkpoints="s3://b"), Options(checkpoint_folder="scratch"))[folder]
    assert "not an absolute path" in own.message


@pytest.mark.parametrize("name", ["per%cent", "back\\slash", "line\nend"])
def test_a_state_folder_that_slurm_does_not_accept(monkeypatch, name):
    monkeypatch.setenv("DEPLOYKIT_HOME", f"/shared/{name}")
    assert "set DEPLOYKIT_HOME" in problems()[""].hint


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


def test_options_of_srun_that_deploykit_sets_are_refused_also_abbreviated():
    options = (
        "--auto-resume=1",
        "--nodes=3",
        "--outp=x",
        "--export=NONE",
        "--kill",
        "--cpu-bind=none",
    )
    problem_by_path = problems(options=Options(srun=options))
    assert set(problem_by_path) == {f"slurm.srun[{number}]" for number in (1, 2, 3, 4)}
    assert "srun's --output itself" in problem_by_path["slurm.srun[2]"].message


def test_hyperpods_option_is_not_combined_with_pyxis():
    image = Container("nvcr.io#nvidia/pytorch:25.01-py3")
    found = problems(options=Options(srun=("--auto-resume=1",), container=image))
    assert "Pyxis" in found["slurm.srun[0]"].message
    image = Container("/shared/image.sif", "apptainer")
    assert "slurm.srun[0]" not in problems(
        options=Options(srun=("--auto-resume=1",), container=image)
    )


def test_only_the_checkpoints_may_be_in_their_bucket():
    """Not the results at the same address, nor those beside a channel of their name."""
    both = problems(job(checkpoints="s3://bucket/x", output="s3://bucket/x"))
    assert "output" in both
    assert "checkpoints" not in both
    channel = {"output": InputChannel("s3://bucket/d", "node")}
    named = problems(job(data=channel, output="s3://bucket/x"))
    assert (
        "s3://bucket/x is not a folder, which the slurm backend requires" in named["output"].message
    )
