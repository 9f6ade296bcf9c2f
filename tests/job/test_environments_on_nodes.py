"""Environments that the nodes make with uv: from the uv.lock of a project, or a script's header.

uv is the real one, and installs tiny packages from an index that asks for a password.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.job import checks, environments
from deploykit.job.model import Environment, Handle
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle, registry
from tests import package_index
from tests.package_index import ACCESS, PASSWORD, USER, UV, add_wheel

pytestmark = pytest.mark.skipif(UV is None, reason="uv is not installed: pip install uv")
SHOW = "import sys, tiny; print('tiny', tiny.version, sys.prefix)\n"
TORCH = "import torch; print('torch', torch.__version__)\n"
ON_NODES = "environment={uv: ., node_local: true}"
SAGEMAKER = [
    "sagemaker.role=arn:aws:iam::123456789012:role/training",
    "sagemaker.bucket=my-bucket",
    "sagemaker.region=us-east-1",
    "sagemaker.instance_type=ml.g5.xlarge",
]
IMAGES = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch-training"


@pytest.fixture
def uv_project(project, team_index):
    """A uv project with a lock, whose script imports `tiny`."""
    package_index.write_project(project, team_index, "tiny<1.1")
    (project / "train.py").write_text(SHOW)
    return project


def submit(*words, sets=ACCESS):
    """Submit and wait; returns the exit code."""
    return cli.main(["submit", *words, "--wait", *(w for s in sets for w in ("--set", s))])


def problems(*overrides, backend="local"):
    """What `check` finds, warnings too, by the path of the key."""
    file = lifecycle.load(Path("job.yaml"), overrides, [backend])
    found = lifecycle.problems(file, backend)
    return {one.path: (one.severity, f"{one.message} ({one.hint})") for one in found}


@pytest.mark.torch
def test_two_nodes_get_one_environment_from_the_lock(uv_project, tmp_path, capsys):
    sets = [*ACCESS, ON_NODES]
    assert submit("--run", "first", "--nodes", "2", sets=sets) == 0
    said = capsys.readouterr().out
    assert len(re.findall(r"\] tiny 1\.0 ", said)) == 2
    assert said.count("environment: installing the packages of uv.lock into ") == 1
    assert str(tmp_path / "disk") in said
    assert PASSWORD not in said
    assert submit("--run", "again", sets=sets) == 0  # the environment is there
    assert "installing" not in capsys.readouterr().out
    folder = Path(registry.known("first").folder)
    assert 'name = "tiny"\nversion = "1.0"' in (folder / "exit_records/pylock.toml").read_text()
    texts = [file.read_text() for file in folder.rglob("*") if file.suffix in {".sh", ".json"}]
    assert PASSWORD not in "".join(texts)


PARTS = """
[project.optional-dependencies]
big = ["more"]

[dependency-groups]
Track_Runs = ["tracker"]
"""
ALL_PARTS = "extras: [big], groups: [track-runs]"
SHOW_PARTS = "import more, tracker; print('more', more.version, tracker.version)\n"


@pytest.fixture
def with_parts(uv_project, team_wheels, team_index):
    """The project with an extra and a dependency group."""
    for name in ("more", "tracker"):
        add_wheel(team_wheels, name, "2.0")
    with (uv_project / "pyproject.toml").open("a") as file:
        file.write(PARTS)
    package_index.lock(uv_project)
    (uv_project / "train.py").write_text(SHOW_PARTS)
    return uv_project


@pytest.mark.torch
def test_extras_and_groups_are_installed_where_they_are_named(with_parts, capsys):
    assert submit("--run", "plain", sets=[*ACCESS, ON_NODES]) != 0
    assert "No module named 'more'" in capsys.readouterr().out
    parts = f"environment={{uv: ., node_local: true, {ALL_PARTS}}}"
    assert submit("--run", "parts", sets=[*ACCESS, parts]) == 0
    assert "more 2.0 2.0" in capsys.readouterr().out


def test_uv_run_installs_extras_and_groups(with_parts):
    chosen = Environment(uv=str(with_parts), extras=("big",), groups=("track-runs",))
    script = "\n".join([*environments.lines(chosen), '"$python" train.py'])
    env = {**os.environ, "UV_PYTHON": sys.executable, "UV_INDEX_TEAM_USERNAME": USER}
    env |= {"UV_INDEX_TEAM_PASSWORD": PASSWORD}
    argv = ["sh", "-c", script]
    done = subprocess.run(argv, cwd=with_parts, env=env, capture_output=True, text=True, check=True)
    assert "more 2.0 2.0" in done.stdout


def test_extras_and_groups_that_are_not_defined_are_found_before_the_submit(with_parts):
    found = problems("environment={uv: ., node_local: true, extras: [bug], groups: [x]}")
    assert "does not define 'bug' (did you mean 'big'?)" in found["environment.extras"][1]
    assert "does not define 'x' (it defines: Track_Runs)" in found["environment.groups"][1]
    assert "environment.extras" not in problems(f"environment={{uv: ., {ALL_PARTS}}}")
    for wrong in ("{venv: x, extras: [big]}", "{uv: ., groups: ['a b']}"):
        with pytest.raises(JobFileError, match=r"environment\.(extras|groups)"):
            lifecycle.load(Path("job.yaml"), [f"environment={wrong}"], ["local"])


@pytest.mark.torch
def test_a_lock_that_cannot_be_installed_ends_the_job_before_training(
    uv_project, team_wheels, capsys
):
    shutil.rmtree(team_wheels / "tiny")
    shutil.rmtree(os.environ["UV_CACHE_DIR"])
    assert submit("--run", "bad", sets=[*ACCESS, ON_NODES]) == 78
    said = capsys.readouterr().out
    assert "] error: Failed to download `tiny==1.0`" in said  # uv's own line
    reason = registry.known("bad").reason
    assert (
        "The environment of uv.lock could not be created on this node: `uv pip install` exited"
        in reason
    )
    assert "cause   environment_setup" in said


@pytest.mark.torch
def test_a_wrong_token_is_not_shown(uv_project, capsys, monkeypatch):
    shutil.rmtree(os.environ["UV_CACHE_DIR"])
    monkeypatch.setenv("TEAM_TOKEN", "wrong-but-private")
    assert submit(sets=[*ACCESS, ON_NODES]) == 78
    said = "".join(capsys.readouterr())
    assert "401 Unauthorized" in said
    assert "wrong-but-private" not in said


@pytest.mark.torch
def test_nodes_without_internet_install_from_the_cache(uv_project, team_wheels):
    assert submit(sets=[*ACCESS, ON_NODES]) == 0  # as `uv sync` on a login node fills the cache
    shutil.rmtree(team_wheels)
    shutil.rmtree(Path(os.environ["TMPDIR"], f"deploykit-{os.getuid()}"))
    assert submit(sets=[*ACCESS, ON_NODES, "env.UV_OFFLINE=1"]) == 0


@pytest.mark.torch
def test_a_script_brings_its_dependencies(project, team_index, capsys):
    (project / "job.yaml").unlink()
    package_index.write_script(project / "train.py", team_index, "tiny", then=SHOW + TORCH)
    assert submit("train.py") == 0
    said = capsys.readouterr().out
    assert "] tiny 1.1 " in said
    assert "] torch " in said  # that of the Python below: the header does not name it


@pytest.mark.torch
def test_the_lock_of_a_script_is_used(project, team_index, team_wheels, capsys):
    script = project / "train.py"
    package_index.write_script(script, team_index, "tiny", then=SHOW)
    package_index.lock(project, "--script", "train.py")
    add_wheel(team_wheels, "tiny", "2.0")
    assert submit() == 0
    assert "] tiny 1.1 " in capsys.readouterr().out


@pytest.mark.torch
def test_a_script_without_a_lock_is_reproduced_with_the_same_versions(
    project, team_index, team_wheels, capsys
):
    package_index.write_script(project / "train.py", team_index, "tiny", then=SHOW)
    assert submit("--run", "old") == 0
    add_wheel(team_wheels, "tiny", "2.0")
    assert submit("--run", "new", "--set", "env.UV_NO_CACHE=1") == 0
    assert cli.main(["reproduce", "old", "--run", "same", "--wait"]) == 0
    said = capsys.readouterr()
    assert re.findall(r"\] tiny (\S+)", said.out) == ["1.1", "2.0", "1.1"]
    assert "may resolve to other versions" not in said.err
    assert cli.main(["compare", "old", "new", "same"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if "package" in line]
    assert rows == [["package", "tiny", "1.1", "2.0", "1.1"]]  # torch and the others are equal


def test_a_reproduction_that_may_differ_says_so(project, team_index, monkeypatch, capsys):
    monkeypatch.setattr(
        "deploykit.backends.local.submit",
        lambda plan, folder: Handle("local", plan.target, plan.run, plan.run, str(folder)),
    )
    package_index.write_script(project / "train.py", team_index, "tiny")
    assert cli.main(["submit", "--run", "old"]) == 0  # its nodes have chosen nothing yet
    assert cli.main(["reproduce", "old", "--dry-run"]) == 0
    said = capsys.readouterr().err
    assert "train.py may resolve to other versions, because it has no lock file" in said
    assert "`uv lock --script train.py`" in said


@pytest.mark.torch
def test_torch_of_the_header_is_installed(project, team_index, team_wheels, capsys):
    add_wheel(team_wheels, "torch", "9.9")
    package_index.write_script(project / "train.py", team_index, "torch", then=SHOW)
    assert submit() != 0  # this torch is empty, so nothing can run with it
    said = capsys.readouterr().out
    lock = Path(registry.selected(["hello"])[0].folder, "exit_records/pylock.toml").read_text()
    assert 'name = "torch"\nversion = "9.9"' in lock
    assert "No module named 'torch." in said


@pytest.mark.torch
def test_a_python_that_the_header_excludes_ends_the_job(project, team_index, capsys):
    package_index.write_script(project / "train.py", team_index, "tiny", python=">=4", then=SHOW)
    assert submit("--set", "env.UV_PYTHON_DOWNLOADS=never") == 78
    assert "No interpreter found for Python >=4" in capsys.readouterr().out


@pytest.mark.torch
def test_uv_is_brought_along(uv_project, tmp_path, monkeypatch, capsys):
    """pip of the node installs it; here from a folder with a uv that passes on to the real one."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    links = tmp_path / "links"
    package_index.add_program_wheel(links, "uv", "9.0", UV)
    pip = [f"env.PIP_FIND_LINKS={links}", "env.PIP_NO_INDEX=1"]
    assert "pip will install it" in problems(ON_NODES)["environment.uv"][1]
    assert submit(sets=[*ACCESS, *pip, ON_NODES]) == 0
    said = capsys.readouterr().out
    assert "uv is not on this node; installing uv>=0.9 with pip" in said
    assert "] tiny 1.0 " in said


@pytest.mark.torch
def test_without_uv_and_pip_the_job_says_what_to_do(uv_project, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    pip = [f"env.PIP_FIND_LINKS={tmp_path}", "env.PIP_NO_INDEX=1"]
    assert submit(sets=[*ACCESS, *pip, ON_NODES]) == 78
    assert "Install uv on the nodes, or load its module" in capsys.readouterr().out


def test_the_dry_run_tells_what_is_installed(uv_project):
    plan = lifecycle.prepare(Path("job.yaml"), [ON_NODES], "local", "one").plan
    assert (
        "# each node installs the packages in uv.lock with uv before the ranks start;" in plan.text
    )
    assert "# a node without uv first runs pip install 'uv>=0.9'" in plan.text


@pytest.mark.parametrize(
    ("key", "image"), [("framework_version", "2.8.0"), ("image_uri", f"{IMAGES}:2.8.0-gpu-py312")]
)
def test_another_pytorch_in_the_lock_than_in_the_image_is_a_warning(project, key, image):
    (project / "pyproject.toml").write_text("")
    words = ["environment={uv: .}", *SAGEMAKER, f"sagemaker.{key}={image}"]
    for version, expected in (("2.8.1", []), ("2.10.0", [f"sagemaker.{key}"])):
        (project / "uv.lock").write_text(f'[[package]]\nname = "torch"\nversion = "{version}"\n')
        found = lifecycle.problems(
            lifecycle.load(Path("job.yaml"), words, ["sagemaker"]), "sagemaker"
        )
        assert [one.path for one in found if "the lock file has" in one.message] == expected


def test_what_cannot_be_installed_is_found_before_the_submit(project, team_index):
    severity, message = problems(ON_NODES)["environment.uv"]
    assert (severity, "has no pyproject.toml" in message or "has no uv.lock" in message) == (
        "error",
        True,
    )
    with pytest.raises(JobFileError, match="node_local"):
        lifecycle.load(Path("job.yaml"), ["environment={venv: x, node_local: true}"], ["local"])
    (project / "train.py").write_text("# /// script\n# dependencies = [\n# ///\n")
    with pytest.raises(JobFileError, match="not valid TOML"):
        lifecycle.load(Path("job.yaml"), [], ["local"])


def test_a_script_that_nobody_gives_pytorch_is_found_before_the_submit(project, monkeypatch):
    find_spec = checks.importlib.util.find_spec
    absent = lambda name: None if name == "torch" else find_spec(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    package_index.write_script(project / "train.py", "http://index", "torchmetrics")
    severity, message = problems()["entrypoint.script"]
    assert severity == "warning"
    assert "its dependencies do not include PyTorch" in message
    package_index.write_script(project / "train.py", "http://index", "torch>=2.6")
    assert "PyTorch" not in str(problems())


def test_a_named_environment_wins_over_the_header(project, team_index):
    package_index.write_script(project / "train.py", team_index, "tiny")
    text = lifecycle.prepare(Path("job.yaml"), [], "local", "one").plan.text
    assert " environment '{" in text
    given = [f"environment={{venv: {Path(sys.prefix)}}}"]
    text = lifecycle.prepare(Path("job.yaml"), given, "local", "two").plan.text
    assert " environment '{" not in text


def test_slurm_and_sagemaker_install_what_travels(uv_project):
    far = ["environment={uv: .}", "slurm.host=login1", "slurm.folder=/shared"]
    text = lifecycle.prepare(Path("job.yaml"), far, "slurm", "one").plan.text
    assert """environment '{"project": ".", "uv": "uv>=0.9"}' torchrun""" in text
    assert "uv run" not in text
    near = lifecycle.prepare(Path("job.yaml"), far[:1], "slurm", "one").plan.text
    assert "uv run" in near  # in place, on the shared disk
