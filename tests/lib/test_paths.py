"""Files that deploykit makes are closed to other users, whatever the umask."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.lib.errors import CannotWrite
from deploykit.run import lifecycle
from tests.aws_server import SECTION
from tests.nightly import few
from tests.strangers import STRANGER, as_stranger, modes, open_place, too_wide  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

UMASKS = [0o000, 0o002, 0o022, 0o077]
TRAINER = """
import helper, os
with open(os.environ["DEPLOYKIT_OUTPUT_DIR"] + "/mine", "w") as file:
    print("trained", file=file)
"""
WORDS = {
    "local": ["--set", "resources.nodes=2"],
    "slurm": ["--set", "resources.nodes=2"],
    "slurm-array": ["--set", "slurm.array=2"],
    "sagemaker": [],
}


@pytest.fixture
def home(open_place, monkeypatch):  # noqa: F811 - the fixture
    """A state folder that does not exist yet, in one that everybody may enter."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(open_place / "kept/state"))
    return open_place / "kept/state"


@pytest.fixture
def trained(project):
    """A project with a package, a program and a private file."""
    (project / "train.py").write_text(TRAINER)
    (project / "package").mkdir()
    (project / "package/run.sh").touch()
    (project / "package/run.sh").chmod(0o755)
    (project / "helper.py").touch(0o600)
    return project


def command(umask, *words):
    """A command in a process of its own, under an umask."""
    argv = [sys.executable, "-m", "deploykit", *words]
    done = subprocess.run(argv, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done


def backend(name, request):
    """The name of the backend, with what it needs."""
    if name.startswith("slurm"):
        request.getfixturevalue("cluster")
    elif name == "sagemaker":
        request.getfixturevalue("aws")
        path = Path("job.yaml")
        path.write_text(f"{path.read_text()}{SECTION}")
    return name.partition("-")[0]


MARKS = {
    "local": [pytest.mark.torch],
    "slurm": [pytest.mark.torch, pytest.mark.slurm, pytest.mark.xdist_group("slurm")],
    "sagemaker": [pytest.mark.aws],
}
CASES = [pytest.param(name, marks=MARKS[name.partition("-")[0]]) for name in WORDS]


@pytest.mark.parametrize("umask", few(UMASKS, 0o000))
@pytest.mark.parametrize("name", CASES)
def test_what_a_run_leaves_is_its_owners_alone(name, umask, trained, home, request):
    """Under any umask; and the umask of the program is the user's own, as a file of it shows."""
    chosen = backend(name, request)
    wait = ["--wait"] if chosen != "sagemaker" else []
    command(umask, "submit", "--backend", chosen, "--run", "one", *WORDS[name], *wait)
    found = modes(home)
    theirs = {path for path in found if path.endswith("/mine") or "__pycache__" in path}
    assert too_wide({path: mode for path, mode in found.items() if path not in theirs}) == {}
    assert modes(home.parent)["."] == 0o700
    assert {found[path] for path in theirs if path.endswith("/mine")} <= {0o666 & ~umask}
    if chosen != "sagemaker":
        assert any(path.endswith("/mine") for path in theirs)
        assert found["runs/one/source/package/run.sh"] == 0o700
        assert found["runs/one/source/train.py"] == 0o600
    table = "\n".join(f"{mode:04o}  {path}" for path, mode in found.items())
    sys.stdout.write(f"{name}, umask {umask:03o}\n{table}\n")  # for `pytest -s`
    assert not as_stranger(lambda: list(home.iterdir()), group=os.getgid())


def test_a_state_folder_that_others_could_change_is_narrowed(trained, home, caplog):
    home.mkdir(parents=True)
    home.chmod(0o2775)
    assert cli.main(["list"]) == 0
    (home / "runs.sqlite").touch()
    assert cli.main(["list"]) == 0
    assert modes(home)["."] == 0o700
    (said,) = {record.getMessage() for record in caplog.records}
    assert said == (f"warning: {home} was open to other users (mode 2775); its mode is now 0700")
    assert not as_stranger(lambda: (home / "runs.sqlite").write_text(""), group=os.getgid())


def test_another_users_state_folder_is_refused(home):
    """The user who created it first could put code there, which would run as this one."""
    home.mkdir(parents=True)
    home.chmod(0o777)

    def use():
        with pytest.raises(CannotWrite, match=f"cannot use the folder {home}"):
            paths.private_folder(home)

    assert as_stranger(use)
    assert modes(home)["."] == 0o777


# --- places that cannot be used


def submit_fails(capsys, *words, tells):
    assert cli.main(["submit", "--backend", "local", *words]) == 73
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert tells in said
    assert "Traceback" not in said
    return said


@pytest.mark.parametrize("verb", [["list"], ["submit", "--backend", "local", "--dry-run"]])
def test_a_home_of_no_user(project, monkeypatch, capsys, verb):
    monkeypatch.setenv("DEPLOYKIT_HOME", "~nouser/x")
    assert cli.main(verb) == 73
    assert "cannot expand ~nouser/x" in capsys.readouterr().err


def test_a_state_folder_that_is_a_file(project, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        monkeypatch.setenv("DEPLOYKIT_HOME", str(tmp_path / place))
        submit_fails(capsys, tells=str(tmp_path / "file"))


@pytest.fixture
def disk(tmp_path, monkeypatch):
    """A file system of two MiB, on which the state folder lies."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m,mode=700", "tmpfs", place]
    if os.getuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    monkeypatch.setenv("DEPLOYKIT_HOME", str(place / "state"))
    yield place
    subprocess.run(["umount", "--lazy", place], check=True)


def remount(disk, how):
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


@pytest.mark.parametrize("known", [False, True])
def test_a_home_that_cannot_be_written(project, disk, capsys, known):
    if known:
        paths.private_folder(disk / "state/runs/one")
        paths.touch(disk / "state/runs.sqlite")
    remount(disk, "ro")
    submit_fails(capsys, "--run", "one", tells="Read-only file system")
    assert cli.main(["list"]) == 0  # reading takes no lock and writes nothing


@pytest.mark.torch
def test_a_full_disk_leaves_no_part_of_a_bundle(project, disk, capsys):
    (project / "large").write_bytes(os.urandom(3 << 20))
    said = submit_fails(capsys, "--run", "one", tells="No space left on device")
    assert "free space" in said
    assert list((disk / "state/bundles").iterdir()) == []
    assert cli.main(["list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []  # it did not become a run
    (project / "large").unlink()
    assert cli.main(["submit", "--backend", "local", "--run", "one", "--wait"]) == 0


@pytest.mark.parametrize("left", [0, 4096, 16384, 65536])
def test_a_disk_that_fills_up_at_any_step(project, disk, capsys, left):
    """Whichever write fails, the submit reports an error or completes."""
    paths.private_folder(disk / "state")
    filler = disk / "filler"
    with filler.open("wb") as file:
        free = shutil.disk_usage(disk).free
        file.write(bytes(max(0, free - left)))
    code = cli.main(["submit", "--backend", "local", "--run", "one"])
    said = capsys.readouterr().err
    assert code in (73, 69), said
    assert said.startswith("error: ")
    assert not list((disk / "state").glob("bundles/tmp*"))


def test_a_limit_on_the_size_of_files(project, tmp_path):
    (project / "large").write_bytes(os.urandom(1 << 20))
    words = [sys.executable, "-m", "deploykit", "submit", "--backend", "local"]
    script = f"ulimit -f 100; exec {' '.join(words)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 73
    assert "File too large" in done.stderr
    assert list((paths.state() / "bundles").iterdir()) == []


def test_nothing_is_narrowed_by_a_dry_run(project, home, capsys):
    home.mkdir(parents=True)
    home.chmod(0o755)
    lifecycle.prepare(project / "job.yaml", [], "local", None)
    assert modes(home)["."] == 0o755


KILLED = """\
import os, pathlib, signal, sys
from deploykit.lib import paths
with paths.scratch(pathlib.Path(sys.argv[1])) as folder:
    (folder / "half").mkdir()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_scratch_of_a_killed_process_is_deleted_by_the_next_one(tmp_path):
    kept = {tmp_path / "own", tmp_path / ".deploykit-research"}
    for folder in kept:
        folder.mkdir()
    with paths.scratch(tmp_path) as alive:
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        (killed,) = {*tmp_path.iterdir()} - {alive, *kept}
        assert (killed / "half").is_dir()
        with paths.scratch(tmp_path) as other:
            assert {*tmp_path.iterdir()} == {*kept, alive, other}
        assert {*tmp_path.iterdir()} == {*kept, alive}
    assert {*tmp_path.iterdir()} == kept
