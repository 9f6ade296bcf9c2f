"""The `environment` of a job file: what is checked before a submit, and what the script does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.job import checks, environments
from deploykit.job.model import Entrypoint, Environment, InputChannel, JobSpec
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle
from tests.conda_stand_in import a_python, install


@pytest.fixture
def conda(tmp_path, monkeypatch):
    """A stand-in for an installation of conda with the environment `train`."""
    root = install(tmp_path / "mini conda")
    monkeypatch.setenv("CONDA_EXE", str(root / "bin/conda"))
    return root


@pytest.fixture
def without_conda(monkeypatch):
    """Programs of the system alone, and no variables of conda."""
    for name in ("CONDA_EXE", "MAMBA_EXE", "MAMBA_ROOT_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def problems(environment, backend="local", *more):
    """What `check` finds, by the path of the key."""
    overrides = [f"environment={environment}", *more]
    try:
        lifecycle.check(lifecycle.load(Path("job.yaml"), overrides, [backend]), backend)
    except JobFileError as error:
        return {problem.path: f"{problem.message} ({problem.hint})" for problem in error.problems}
    return {}


def activated(environment, shell="sh"):
    """Run the lines of an environment; what they set, or what they print."""
    text = "\n".join(environments.lines(environment))
    show = 'printf "%s\\n" "$python" "$(command -v python)" "$VIRTUAL_ENV" "$FROM_ACTIVATE_D"\n'
    done = subprocess.run([shell, "-c", text + show], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout.splitlines()


def of_torch(*overrides, backend="local"):
    """What `check` says about PyTorch: the severity, or None."""
    file = lifecycle.load(Path("job.yaml"), overrides, [backend])
    found = [one for one in lifecycle.problems(file, backend) if "PyTorch" in one.message]
    assert all("-m pip install torch" in one.hint for one in found)
    return found[0].severity if found else None


def test_a_python_without_pytorch_is_found_before_the_submit(project, monkeypatch, tmp_path):
    assert of_torch() is of_torch(backend="slurm") is None
    find_spec = checks.importlib.util.find_spec
    absent = lambda name: None if name == "torch" else find_spec(name)  # noqa: E731
    monkeypatch.setattr("importlib.util.find_spec", absent)
    assert of_torch() == "error"
    assert of_torch(backend="slurm") == "warning"
    assert of_torch("entrypoint.launcher=python") is None
    assert of_torch(f"environment={{uv: {project}}}") is None
    assert of_torch("env.PYTHONPATH=lib") is None
    assert of_torch("slurm.container={image: torch.sqsh}", backend="slurm") is None


def test_an_environment_without_pytorch_is_found_before_the_submit(project, tmp_path):
    folder = a_python(tmp_path / "empty")
    given = f"environment={{venv: {json.dumps(str(folder))}}}"
    (folder / "pyvenv.cfg").write_text("version = 3.12.1\ninclude-system-site-packages = false\n")
    assert of_torch(given) == of_torch(given, backend="slurm") == "warning"
    (folder / "pyvenv.cfg").write_text("include-system-site-packages = true\n")
    assert of_torch(given) is None
    (folder / "pyvenv.cfg").write_text("version = 3.12.1\n")
    package = folder / "lib/python3.12/site-packages/torch"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    assert of_torch(given) is None


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_venv_is_activated(tmp_path, shell):
    folder = a_python(tmp_path / "it's mine")
    python = f"{folder}/bin/python"
    assert activated(Environment(venv=str(folder)), shell) == (0, [python, python, str(folder), ""])


@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_a_conda_environment_is_activated_with_its_scripts(conda, shell):
    python = f"{conda}/envs/train/bin/python"
    for name in ("train", f"{conda}/envs/train"):
        code, (found, on_path, _, script) = activated(Environment(conda=name), shell)
        assert (code, found, on_path, script) == (0, python, python, "yes")


def test_conda_is_found_in_the_home_folder(conda, monkeypatch):
    monkeypatch.delenv("CONDA_EXE")
    home = Path(os.environ["HOME"])
    home.mkdir()
    (home / "miniforge3").symlink_to(conda)
    assert activated(Environment(conda="train"))[0] == 0


def test_the_home_folder_is_that_of_the_node():
    text = "".join(environments.lines(Environment(venv="~/my venv")))
    assert text.startswith("environment=\"$HOME\"/'my venv'")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Environment(venv="/nope"), "/nope/bin/python was not found on "),
        (
            Environment(conda="other"),
            "the conda environment other has no Python or cannot be activated on ",
        ),
        (Environment(uv="/nope"), "uv run --project /nope failed on "),
    ],
)
def test_what_cannot_be_activated_ends_the_script_and_is_named(conda, environment, said):
    code, lines = activated(environment)
    assert code == 78
    assert lines[-1].startswith(f"deploykit: the job cannot start: {said}")


def test_without_conda_the_script_ends(without_conda):
    code, lines = activated(Environment(conda="train"))
    assert code == 78
    assert "conda was not found on " in lines[-1]


@pytest.mark.skipif(shutil.which("uv") is None, reason="optional: uv is not on PATH")
def test_a_uv_project_is_brought_up_to_date_and_activated(tmp_path, monkeypatch):
    monkeypatch.setenv("UV_OFFLINE", "1")
    monkeypatch.setenv("UV_PYTHON", sys.executable)
    project = tmp_path / "my project"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[project]\nname = "mine"\nversion = "1"\nrequires-python = ">=3.10"\n'
    )
    code, (found, on_path, folder, _) = activated(Environment(uv=str(project)))
    assert (code, folder) == (0, str(project / ".venv"))
    assert Path(found).parent == Path(on_path).parent == project / ".venv/bin"
    python = environments.python(Environment(uv=str(project)))
    assert python == str(project / ".venv/bin/python")


def test_relative_folders_are_beside_the_job_file(project):
    def read(environment):
        return lifecycle.load(Path("job.yaml"), [f"environment={environment}"], []).job.environment

    assert read("{venv: .venv, modules: [cuda]}") == Environment(
        venv=str(project / ".venv"), modules=("cuda",)
    )
    assert read("{uv: .}") == Environment(uv=str(project))
    assert read("{venv: ~/venv}") == Environment(venv="~/venv")
    assert read("{conda: train}") == Environment(conda="train")
    assert read("{conda: ./train}") == Environment(conda=str(project / "train"))


def test_only_one_kind(project):
    expected = "expected only one of `conda`, `venv` and `uv`; got conda and uv"
    assert expected in problems("{conda: a, uv: b}")["environment"]
    assert "expected `conda`, `venv`" in problems("{}")["environment"]


def test_a_missing_venv_is_found_before_the_submit(project, tmp_path):
    assert "python3 -m venv" in problems("{venv: nope}")["environment.venv"]
    (project / "plain").mkdir()
    assert (
        "the folder is not a virtual environment" in problems("{venv: plain}")["environment.venv"]
    )
    gone = a_python(tmp_path / "gone")
    (gone / "bin/python").unlink()
    (gone / "bin/python").symlink_to("/nope/python3")
    found = problems(f"{{venv: {gone}}}")["environment.venv"]
    assert "the Python that created it no longer exists" in found


@pytest.mark.parametrize("line", ["version = 3.9.18", "version_info = 3.9.18"])
def test_a_python_that_is_too_old_is_found_before_the_submit(project, tmp_path, line):
    old = a_python(tmp_path / "old")
    (old / "pyvenv.cfg").write_text(f"home = /usr/bin\n{line}\n")
    assert (
        "3.9.18, but the launcher requires 3.10" in problems(f"{{venv: {old}}}")["environment.venv"]
    )


def test_a_missing_conda_environment_is_found_before_the_submit(project, conda):
    assert problems("{conda: train}") == {}
    assert problems(f"{{conda: {conda}/envs/train}}") == {}
    assert "did you mean 'train'?" in problems("{conda: trian}")["environment.conda"]
    assert "is not a conda environment" in problems("{conda: ./x}")["environment.conda"]
    record = conda / "envs/train/conda-meta/python-3.9.18-h955ad1f_0.json"
    record.touch()
    assert "its Python is 3.9.18" in problems("{conda: train}")["environment.conda"]
    (conda / "envs/train/bin/python").unlink()
    assert "has no Python" in problems("{conda: train}")["environment.conda"]


def test_an_environment_that_conda_has_listed_is_found(project, conda, tmp_path):
    elsewhere = a_python(tmp_path / "elsewhere")
    (elsewhere / "conda-meta").mkdir()
    home = Path(os.environ["HOME"])
    (home / ".conda").mkdir(parents=True)
    (home / ".conda/environments.txt").write_text(f"{elsewhere}\n")
    assert problems("{conda: elsewhere}") == {}


def test_programs_that_are_missing_are_found_before_the_submit(project, without_conda):
    assert "run `conda init`" in problems("{conda: train}")["environment.conda"]
    (project / "pyproject.toml").touch()
    assert "uv is not on PATH" in problems("{uv: .}")["environment.uv"]
    found = problems("{uv: nope, modules: [uv]}", "slurm")["environment.uv"]
    assert "no pyproject.toml" in found
    # a module may bring them
    assert problems("{uv: ., modules: [uv]}", "slurm") == {}
    assert problems("{conda: train, modules: [conda]}", "slurm") == {}
    assert problems("{conda: train}", "slurm", "slurm.setup=[. conda.sh]") == {}


@pytest.mark.parametrize("backend", ["local", "slurm"])
def test_the_python_is_chosen_once(project, tmp_path, backend):
    folder = a_python(tmp_path / "venv")
    python = f"{backend}.python={sys.executable}"
    found = problems(f"{{venv: {folder}}}", backend, python)
    assert (
        "conflicts with environment.venv, which also selects the Python"
        in found[f"{backend}.python"]
    )
    assert problems("{modules: [cuda]}", backend, python) == {}


def test_an_environment_on_another_host_is_not_looked_for_here(project):
    remote = ("slurm", "slurm.host=login1", "slurm.folder=/shared")
    assert problems("{venv: /only/there}", *remote) == {}
    assert problems("{venv: ~/there}", *remote) == {}
    found = problems("{venv: .venv}", *remote)["environment.venv"]
    assert "is on this machine, but the job runs on login1" in found


def test_a_container_has_its_own_python(project):
    found = problems("{conda: train}", "slurm", "slurm.container={image: x}")
    assert "cannot be used with slurm.container" in found["environment.conda"]


def test_sagemaker_says_what_to_use_instead(project, capsys):
    changes = ["role=arn:aws:iam::123456789012:role/training", "bucket=my-bucket"]
    changes += ["region=us-east-1", "instance_type=ml.g5.xlarge", "framework_version=2.8.0"]
    sets = [word for change in changes for word in ("--set", f"sagemaker.{change}")]
    argv = ["check", "--backend", "sagemaker", "--set", "environment={conda: train}", *sets]
    assert cli.main(argv) == 0
    said = "".join(capsys.readouterr())
    assert "environment: ignored: on SageMaker, the image provides Python" in said
    assert "requirements.txt" in said


def test_a_slurm_script_activates_after_modules_and_setup(project, tmp_path):
    folder = a_python(tmp_path / "venv")
    changes = [
        f"environment={{venv: {folder}, modules: [cuda]}}",
        *("slurm.modules=[gcc]", "slurm.setup=[ulimit -c 0]"),
    ]
    text = lifecycle.prepare(Path("job.yaml"), changes, "slurm", "one").plan.text
    order = ["module load cuda", "module load gcc", "ulimit -c 0", f"environment={folder}"]
    order += ["export python\n", "exec srun", '"$python" .deploykit/launch.py']
    assert [text.index(part) for part in order] == sorted(text.index(part) for part in order)


@pytest.mark.torch
@pytest.mark.quick
def test_a_local_run_uses_the_environment(project, tmp_path, capsys):
    folder = a_python(tmp_path / "my venv", with_torch=True)
    (project / "train.py").write_text("import sys; print('prefix', sys.prefix)")
    argv = ["submit", "-b", "local", "--wait", "--set", f"environment={{venv: {folder}}}"]
    assert cli.main(argv) == 0
    assert f"[rank 0] prefix {folder}" in capsys.readouterr().out


@pytest.mark.torch
def test_a_local_run_that_cannot_be_prepared_says_why(project, capsys):
    argv = ["submit", "-b", "local", "--wait", "--set", "environment={modules: [nope/1]}"]
    assert cli.main(argv) == 78
    said = capsys.readouterr().out
    reason = "the job cannot start: module load nope/1 failed (environment.modules)"
    assert "failed, exit code 78" in said
    assert "  cause   " in said
    assert reason in said.partition("  cause   ")[2]


@pytest.mark.parametrize("installed", [False, True])
def test_a_copy_from_s3_needs_boto3_in_the_environment(tmp_path, installed):
    python = tmp_path / "venv/bin/python"
    site = tmp_path / "venv/lib/python3.12/site-packages"
    site.mkdir(parents=True)
    (tmp_path / "venv/pyvenv.cfg").write_text("include-system-site-packages = false\n")
    if installed:
        (site / "boto3").mkdir()
        (site / "boto3/__init__.py").touch()
    data = {"a": InputChannel("s3://bucket/a", "node"), "b": InputChannel("/shared/b", "node")}
    job = JobSpec("one", Entrypoint("train.py"), data=data)
    found = [(problem.path, problem.severity) for problem in checks.check_boto3(job, python)]
    assert found == ([] if installed else [("data.a", "warning")])
