"""`init`: the script that is there or a small trainer, a short job file, nothing overwritten."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import jsonschema
import pytest
import yaml

from deploykit.backends.sagemaker import catalog
from deploykit.cli import main as cli
from deploykit.job import machine
from deploykit.job import script as starter
from deploykit.job.script import Script
from deploykit.lib import paths

ROOT = Path(__file__).parents[2]
GUARD = 'if __name__ == "__main__": pass\n'
DDP = "import torch.distributed as dist\ndist.init_process_group()\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder."""
    here = tmp_path / "Mü projekt_1"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.setattr(starter, "gpus", lambda: 0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    return here


def init(capsys, *argv):
    """The job file that `init` writes, as data."""
    assert cli.main(["init", "--json", *argv]) == 0, capsys.readouterr()
    told = json.loads(capsys.readouterr().out)
    text = Path(told["path"]).read_text()
    assert len(text.splitlines()) <= 20
    return yaml.safe_load(text), told


def test_an_empty_folder_gets_a_job_that_can_be_sent(folder, capsys):
    job, told = init(capsys)
    assert told == {
        "schema_version": 1,
        "path": "job.yaml",
        "script": "train.py",
        "new": ["train.py"],
        "processes_per_node": 2,
    }
    assert job["name"] == "Mu-projekt-1"
    assert job["resources"]["processes_per_node"] == 2
    assert sorted(path.name for path in folder.iterdir()) == ["job.yaml", "train.py"]
    assert cli.main(["check", "--strict"]) == 0
    assert cli.main(["check", "--backend", "slurm"]) == 0
    assert cli.main(["submit", "--dry-run"]) == 0


@pytest.mark.torch
@pytest.mark.quick
def test_the_section_for_sagemaker_names_the_newest_image(folder, capsys):
    assert cli.main(["init"]) == 0
    assert cli.main(["init", "--full", "all.yaml"]) == 0
    image = catalog.later_image(catalog.LATEST, "us-east-1", "ml.g5.12xlarge")
    text = (folder / "job.yaml").read_text()
    assert "framework_version" not in text
    section = re.findall(r"^# (sagemaker:|  .*)$", text, re.MULTILINE)
    (folder / "job.yaml").write_text(text + "\n".join(section))
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert job["sagemaker"] == {
        "role": "arn:aws:iam::123456789012:role/training",
        "bucket": "my-bucket",
        "region": "us-east-1",
        "instance_type": "ml.g5.12xlarge",
        "image_uri": image,
    }
    assert cli.main(["check", "--backend", "sagemaker", "--strict"]) == 0
    assert f"\n#   image_uri: {image}\n" in (folder / "all.yaml").read_text()


@pytest.mark.slow
def test_the_trainer_trains_saves_and_goes_on(folder, monkeypatch):
    monkeypatch.undo()  # the cores and GPUs that are there
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["DEPLOYKIT_HOME"] = str(folder.parent / "state")

    def run(*words):
        argv = [sys.executable, "-m", "deploykit", *words]
        done = subprocess.run(
            argv, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "next: `deploykit submit --wait`" in run("init")
    kept = f"--set=checkpoints={folder}/kept"
    losses = re.findall(r"epoch (\d): loss ([\d.]+)", run("submit", "--wait", kept))
    assert [epoch for epoch, _ in losses] == ["1", "2", "3", "4", "5"]
    assert float(losses[-1][1]) < float(losses[0][1]) / 2
    assert (folder / "kept/last.pt").is_file()
    more = run("submit", "--wait", kept, "--processes-per-node", "1", "--", "--epochs", "6")
    assert re.findall(r"epoch (\d): loss", more) == ["6"]


def test_the_reference_trainer_comes_with_a_task(folder, capsys):
    job, told = init(capsys, "--trainer")
    assert job["entrypoint"] == {"script": "train.py", "args": ["--task", "task:task"]}
    assert told["script"] == "train.py"
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*.py")}
    assert set(told["new"]) == names >= {"task.py", "train.py", "trainer/task.py"}
    assert cli.main(["check", "--strict"]) == 0


def test_the_reference_trainer_overwrites_nothing(folder, capsys):
    (folder / "trainer").mkdir()
    (folder / "trainer/data.py").write_text("mine")
    (folder / "task.py").write_text("mine")
    assert cli.main(["init", "--trainer"]) == 64
    assert "already exist: task.py, trainer/data.py" in capsys.readouterr().err
    assert sorted(path.name for path in folder.rglob("*")) == ["data.py", "task.py", "trainer"]


@pytest.mark.nightly
@pytest.mark.torch
def test_a_first_model_of_ones_own_is_sharded(folder, monkeypatch):
    monkeypatch.undo()
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    env["DEPLOYKIT_HOME"] = str(folder.parent / "state")
    told = ""
    for words in (["init", "--trainer"], ["submit", "--wait", "--", "--strategy", "fsdp"]):
        argv = [sys.executable, "-m", "deploykit", *words]
        done = subprocess.run(
            argv, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        told += done.stdout
    assert "2 rank(s) on cpu, global batch 32, strategy fsdp" in told
    (accuracy,) = re.findall(r"validation accuracy ([\d.]+) \(512 samples\)", told)
    assert float(accuracy) > 0.7


def test_a_script_that_is_there_is_taken(folder, capsys):
    (folder / "hello.py").write_text("print('hello')\n")
    job, told = init(capsys)
    assert job["entrypoint"]["script"] == "hello.py"
    assert told["new"] == []
    assert job["resources"]["processes_per_node"] == 1  # it would print twice
    assert not (folder / "train.py").exists()


@pytest.mark.parametrize(
    ("files", "chosen"),
    [
        ({"eval.py": GUARD, "train.py": GUARD, "model.py": GUARD}, "train.py"),
        ({"main.py": GUARD, "run_ddp.py": DDP}, "run_ddp.py"),
        ({"train.py": GUARD, "train_ddp.py": DDP}, "train_ddp.py"),
        ({"plot.py": GUARD, "main.py": GUARD}, "main.py"),
        ({"setup.py": "setup()\n", "test_train.py": DDP, "cifar.py": DDP}, "cifar.py"),
        ({"model.py": "import torch\nclass A: pass\n", "go.py": GUARD}, "go.py"),
        ({"model.py": "import torch\nclass A: pass\n", "src/go.py": GUARD}, "src/go.py"),
        ({"utils.py": "", ".venv/train.py": DDP, "tests/train.py": DDP}, "train.py"),
    ],
)
def test_of_several_the_one_that_trains(folder, capsys, files, chosen):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    job, _ = init(capsys)
    assert job["entrypoint"]["script"] == chosen
    assert cli.main(["check"]) == 0


def test_the_others_are_named(folder, capsys):
    for name in ("train.py", "eval.py", "plot.py"):
        (folder / name).write_text(GUARD)
    assert cli.main(["init"]) == 0
    shown = capsys.readouterr().out
    assert "wrote job.yaml: runs train.py with 1 process\n" in shown
    assert "other scripts here: eval.py, plot.py\n" in shown
    assert cli.main(["init", "job.eval.yaml"]) == 0
    assert "next: `deploykit submit job.eval.yaml --wait`" in capsys.readouterr().out


def test_a_script_can_be_named(folder, capsys):
    for name in ("train.py", "eval.py"):
        (folder / name).write_text(GUARD)
    assert init(capsys, "eval.py")[0]["entrypoint"]["script"] == "eval.py"
    (folder / "job.yaml").unlink()
    assert cli.main(["init", "evil.py"]) == 64
    assert "script evil.py not found\n  scripts here: train.py, eval.py" in capsys.readouterr().err
    assert not (folder / "job.yaml").exists()


@pytest.mark.parametrize("given", [[], ["src/pkg/train.py"]], ids=["found", "named"])
def test_a_package_in_src_is_found_and_can_be_imported(folder, capsys, given):
    (folder / "src/pkg").mkdir(parents=True)
    (folder / "src/pkg/__init__.py").touch()
    (folder / "src/pkg/train.py").write_text(f"from pkg.model import A\n{DDP}{GUARD}")
    job, _ = init(capsys, *given)
    assert job["entrypoint"]["module"] == "pkg.train"
    assert job["env"] == {"PYTHONPATH": "src"}
    assert job["resources"]["processes_per_node"] == 2
    assert not (folder / "train.py").exists()


def test_a_script_of_a_package_is_run_as_a_module(folder, capsys):
    (folder / "pkg").mkdir()
    (folder / "pkg/__init__.py").touch()
    (folder / "pkg/train.py").write_text(f"from .model import A\n{GUARD}")
    assert init(capsys)[0]["entrypoint"]["module"] == "pkg.train"


def test_gpus_are_asked_for(folder, capsys, monkeypatch):
    monkeypatch.setattr(starter, "gpus", lambda: 4)
    assert init(capsys)[0]["resources"]["gpus_per_node"] == 4


def test_gpus_are_those_that_a_job_may_use(tmp_path, monkeypatch):
    gpu = tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information"
    gpu.parent.mkdir(parents=True)
    gpu.touch()
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert starter.gpus() == 1
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert starter.gpus() == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert starter.gpus() == 2


@pytest.mark.parametrize(
    ("name", "job"), [("a.b c", "a-b-c"), ("日本", "job"), ("-x-", "x"), ("y" * 60, "y" * 40)]
)
def test_the_job_has_the_folders_name_as_far_as_it_is_allowed(tmp_path, name, job):
    text = starter.job_file(
        name, Script("a b.py", 0, distributed=False), schema=None, backend=None, sections=()
    )
    assert yaml.safe_load(text)["name"] == job
    assert yaml.safe_load(text)["entrypoint"]["script"] == "a b.py"


@pytest.mark.parametrize("there", ["job.yaml", "train.py"])
def test_nothing_is_overwritten(folder, capsys, there):
    (folder / there).write_text("mine")
    code = cli.main(["init"])
    assert (folder / there).read_text() == "mine"
    assert code == (64 if there == "job.yaml" else 0)
    for argv in (["init", "--full"], ["init", "--full"], ["init", "--schema"]):
        cli.main(argv)
    before = {path: path.read_text() for path in folder.iterdir()}
    assert cli.main(["init", "--full"]) == cli.main(["init", "--schema"]) == 64
    assert {path: path.read_text() for path in folder.iterdir()} == before


def schema_of(text):
    address = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)[1]
    return Path(unquote(urlsplit(address).path)) if ":" in address else Path(address)


def test_editors_find_the_schema_without_a_network(folder, capsys):
    job, _ = init(capsys)
    path = schema_of((folder / "job.yaml").read_text())
    assert path == paths.state() / "job.schema.json"
    assert " " in str(path)  # which editors would not read without the escape
    jsonschema.Draft202012Validator(json.loads(path.read_text())).validate(job)


def test_a_schema_beside_the_job_file_is_used(folder, capsys):
    assert cli.main(["init", "--schema"]) == 0
    capsys.readouterr()
    init(capsys)
    assert schema_of((folder / "job.yaml").read_text()) == Path("job.schema.json")


def test_an_unwritable_home_is_no_obstacle(folder, capsys, monkeypatch):
    (folder.parent / "file").touch()
    monkeypatch.setenv("DEPLOYKIT_HOME", str(folder.parent / "file/state"))
    job, _ = init(capsys)
    assert job["name"] == "Mu-projekt-1"
    assert "yaml-language-server" not in (folder / "job.yaml").read_text()


def test_devices_and_pipes_are_not_read(folder, capsys):
    (folder / "train.py").symlink_to("/dev/zero")
    os.mkfifo(folder / "pipe.py")
    (folder / "plain.py").write_text(GUARD)
    assert init(capsys)[0]["entrypoint"]["script"] == "plain.py"


@pytest.mark.skipif(os.getuid() == 0, reason="optional: root can read every folder")
def test_a_folder_that_cannot_be_read(folder, capsys):
    folder.chmod(0o300)
    assert cli.main(["init"]) == 64
    folder.chmod(0o700)
    assert "Permission denied" in capsys.readouterr().err


def on_a_terminal(folder, answers, *words):
    """What `init` shows on a terminal whose user types the answers."""
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "deploykit", "init", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=slave,
        stdout=slave,
        stderr=slave,
    ) as started:
        os.close(slave)
        os.write(master, answers.encode())
        shown = b""
        try:
            while part := os.read(master, 4096):
                shown += part
        except OSError:  # the other side is closed
            pass
    os.close(master)
    return started.returncode, shown.decode().replace("\r\n", "\n")


def test_two_questions_on_a_terminal(folder):
    for name in ("train.py", "eval\x1b[31m.py"):
        (folder / name).write_text(GUARD)
    code, shown = on_a_terminal(folder, "5\n2\nslurm\n")
    assert code == 0, shown
    assert "Which script should run?\n  1  train.py\n  2  eval\\x1b[31m.py\n" in shown
    assert "type a number from 1 to 2" in shown
    assert "Where should it run?\n  1  local\n  2  slurm\n  3  sagemaker\n" in shown
    job = yaml.safe_load((folder / "job.yaml").read_text())
    assert (job["entrypoint"]["script"], job["backend"]) == ("eval\x1b[31m.py", "slurm")


@pytest.mark.parametrize("answers", ["\n", "\x04"])
def test_an_empty_answer_is_the_default(folder, answers):
    code, shown = on_a_terminal(folder, answers)
    assert code == 0, shown
    assert "Which script should run?" not in shown  # there is none to choose
    assert "backend" not in yaml.safe_load((folder / "job.yaml").read_text())


def test_a_pipe_is_never_asked(folder):
    (folder / "a.py").write_text(GUARD)
    (folder / "b.py").write_text(GUARD)
    done = subprocess.run(
        [sys.executable, "-m", "deploykit", "init"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "which" not in done.stdout
