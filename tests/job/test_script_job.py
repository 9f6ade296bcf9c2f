"""Jobs without a job file: a script or a module on the command line, and `--save`."""

from __future__ import annotations

import json
import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

import deploykit
from deploykit.cli import main as cli
from deploykit.job import file as jobfile
from deploykit.job import script as script_job
from deploykit.job.file import Draft


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A folder of scripts, without a job file."""
    folder = tmp_path / "my köln project"
    (folder / "tools").mkdir(parents=True)
    (folder / "pkg").mkdir()
    for name in ("train.py", "tools/eval_it.py", "pkg/learn.py"):
        (folder / name).write_text("import sys; print('hello', sys.argv[1:])\n")
    monkeypatch.chdir(folder)
    return folder


def plan(capsys, *argv):
    """The last line of the plan's text: what torchrun starts, and with what."""
    assert cli.main(["submit", "--dry-run", "--json", *argv]) == 0, capsys.readouterr().err
    shown = json.loads(capsys.readouterr().out)
    return shown["text"].splitlines()[-1].strip(), shown


def test_a_script_needs_no_job_file(scripts, capsys):
    words = ["train.py", "--nodes", "2", "--processes-per-node", "4", "--time-limit", "1h"]
    line, shown = plan(capsys, *words, "--", "--lr", "0.1")
    assert "--nnodes=2 --nproc-per-node=4" in line
    assert line.endswith("-- train.py --lr 0.1")
    assert "--time-limit=3600" in shown["text"]
    assert shown["run"].startswith("train-")
    assert "tools/eval_it.py" in shown["bundle"]["files"]


def test_a_script_further_down_sees_the_whole_folder(scripts, capsys):
    line, shown = plan(capsys, "tools/eval_it.py")
    assert line.endswith("-- tools/eval_it.py")
    assert shown["run"].startswith("eval-it-")
    assert "train.py" in shown["bundle"]["files"]


def test_a_script_elsewhere_brings_its_own_folder(scripts, capsys, monkeypatch):
    monkeypatch.chdir(scripts / "tools")
    line, shown = plan(capsys, "../train.py")
    assert line.endswith("-- train.py")
    assert "tools/eval_it.py" in shown["bundle"]["files"]


def test_a_module_needs_no_job_file(scripts, capsys):
    line, shown = plan(capsys, "-m", "pkg.learn", "--", "-x")
    assert line.endswith("-- -m pkg.learn -x")
    assert shown["run"].startswith("learn-")


@pytest.mark.parametrize("verb", ["check", "submit"])
def test_what_a_script_lacks_is_said(scripts, capsys, verb):
    assert cli.main([verb, "trian.py"]) == 66
    assert "did you mean 'train.py'?" in capsys.readouterr().err
    assert cli.main([verb, "train.py", "--backend", "slurm"]) == 65
    shown = capsys.readouterr().err
    assert "command line: 1 problem" in shown
    assert "resources.time_limit: is required" in shown
    assert "--time-limit 30m" in shown


def test_arguments_without_the_dashes_before_them(scripts, capsys):
    assert cli.main(["submit", "train.py", "--learning", "0.1"]) == 64
    assert "put arguments for the script after `--`" in capsys.readouterr().err


def test_a_script_replaces_the_entrypoint_of_the_job_file(project, capsys):
    (project / "other.py").touch()
    line, _ = plan(capsys, "other.py", "--", "--lr", "1")
    assert line.endswith("-- other.py --lr 1")  # without the arguments of train.py
    assert cli.main(["submit", "other.py", "--dry-run"]) == 0
    assert "note: running other.py with the settings from job.yaml" in capsys.readouterr().err
    line, shown = plan(capsys, "./train.py", "--", "--lr", "1")
    assert line.endswith("-- train.py --epochs 5 --lr 1")
    assert shown["run"].startswith("hello-")


def test_from_python_too(scripts):
    shown = deploykit.plan("train.py", args=["-x"], set={"resources.nodes": 2})
    assert "--nnodes=2" in str(shown)
    assert "-- train.py -x" in str(shown)
    entry = {"entrypoint": {"module": "pkg.learn"}}
    assert "-- -m pkg.learn" in str(deploykit.plan(set=entry))


def test_a_module_replaces_the_entrypoint_of_the_job_file(project, capsys):
    (project / "other.py").touch()
    line, shown = plan(capsys, "job.yaml", "-m", "other")
    assert line.endswith("-- -m other")
    assert shown["run"].startswith("hello-")


def test_a_script_is_found_in_the_source_of_the_job_file(project, capsys, monkeypatch):
    """The path is that of the shell, from the current folder."""
    (project / "src").mkdir()
    (project / "src" / "deep.py").touch()
    (project / "job.yaml").write_text("name: a\nsource: src\nentrypoint: {script: deep.py}\n")
    assert plan(capsys, "src/deep.py")[0].endswith("-- deep.py")
    monkeypatch.chdir(project / "src")
    assert plan(capsys, "deep.py", "--set", "name=b")[1]["run"].startswith("b-")
    monkeypatch.chdir(project)
    assert cli.main(["submit", "train.py", "--dry-run"]) == 65
    assert "must be a relative path inside the source folder" in capsys.readouterr().err


def test_only_one_entrypoint(project, capsys):
    assert cli.main(["submit", "train.py", "-m", "pkg", "--dry-run"]) == 64
    assert cli.main(["submit", "jb.yaml", "-m", "pkg", "--dry-run"]) == 66
    assert "cannot read the job file jb.yaml" in capsys.readouterr().err
    assert cli.main(["submit", "train"]) == 66
    assert "did you mean train.py?" in capsys.readouterr().err


def test_the_later_of_two_settings_counts(project, capsys):
    line, _ = plan(capsys, "--set", "resources.nodes=5", "--nodes", "3")
    assert "--nnodes=3" in line
    line, _ = plan(capsys, "--nodes", "3", "--set", "resources.nodes=5")
    assert "--nnodes=5" in line


def test_save_writes_the_job_that_was_sent(scripts, capsys):
    words = ["tools/eval_it.py", "--backend", "slurm", "--nodes", "2", "--time-limit", "1h"]
    line, _ = plan(capsys, *words, "--save", "job.yaml", "--", "--lr", "0.10", "a b", "", "yes")
    assert (scripts / "job.yaml").read_text() == (
        "name: eval-it\n"
        "backend: slurm\n"
        "source: .\n"
        "entrypoint:\n"
        "  script: tools/eval_it.py\n"
        '  args: [--lr, 0.10, "a b", "", yes]\n'
        "resources:\n"
        "  nodes: 2\n"
        "  time_limit: 1h\n"
    )
    assert plan(capsys)[0] == line


def test_save_never_overwrites(project, capsys):
    before = (project / "job.yaml").read_text()
    assert cli.main(["submit", "--dry-run", "--save", "job.yaml"]) == 64
    assert "job.yaml already exists" in capsys.readouterr().err
    assert (project / "job.yaml").read_text() == before
    assert cli.main(["submit", "--dry-run", "--save", "no/job.yaml"]) == 64


def test_save_in_another_folder_keeps_the_locations(project, capsys):
    for name in ("jobs", "in", "out"):
        (project / name).mkdir()
    (project / "job.yaml").write_text(
        "name: a\nentrypoint: {script: train.py}\nslurm: {account: b}\n"
        "data: {train: in, far: /}\noutput: out\ncheckpoints: /shared/c\n"
    )
    assert cli.main(["submit", "--dry-run", "--save", "jobs/new.yaml"]) == 0
    before, after = (
        jobfile.load(jobfile.read(project / name), options={}, backends=lambda: ["slurm"])
        for name in ("job.yaml", "jobs/new.yaml")
    )
    assert before.job == after.job


words = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), max_size=8
) | st.sampled_from(
    [
        "-",
        "--",
        "~",
        "null",
        "yes",
        "0.10",
        "1:30",
        "a: b",
        "a #b",
        "[x]",
        "{",
        "...",
        "---",
        "é",
        "5",
    ]
)
values = st.recursive(
    words | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(words, values, max_size=4))
def test_every_value_is_read_back_as_it_was(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp()
    data = {key: value for key, value in data.items() if key not in {"source", "data"}}
    shown = script_job.text(Draft(folder / "job.yaml", data, {}), (), folder)
    assert jobfile.yaml(shown)[0] == data


def test_saved_files_are_ordinary_files(scripts, capsys):
    assert cli.main(["submit", "train.py", "--dry-run", "--save", "job.yaml"]) == 0
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((scripts / "job.yaml").stat().st_mode) == 0o666 & ~umask
