"""Doctor on this machine: its real facts, and made-up facts of broken machines."""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends.slurm import doctor
from deploykit.cli import main as cli
from deploykit.doctor import local
from deploykit.doctor.local import LocalMachine
from deploykit.job.model import Entrypoint, JobSpec, Resources

GOOD = LocalMachine(
    python="python3",
    torch="2.13.0",
    cuda="13.0",
    import_error="",
    visible_gpus=2,
    gpus=2,
    shm_free=8 * 2**30,
    max_open_files=65536,
    max_processes=-1,
    max_locked_memory=-1,
    has_infiniband=True,
    interfaces_up=("lo", "eth0"),
    host_address="10.0.0.2",
)
BARE = ["--set", f"local.python={Path(sys.executable).resolve()}"]
"""A Python without PyTorch, which takes seconds to import."""


def faults(found, **resources):
    job = JobSpec("one", Entrypoint("train.py"), Resources(**{"time_limit": 600, **resources}))
    return [(one.code, one.severity) for one in local.findings(job, found)]


def test_a_good_machine_has_no_findings():
    assert faults(GOOD, processes_per_node=2, gpus_per_node=2) == []


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"import_error": "ImportError: no torch", "torch": ""}, [("torch_missing", "error")]),
        ({"visible_gpus": 0, "cuda": ""}, [("gpus_unused", "error")]),
        ({"gpus": 1}, [("gpus_too_few", "warning")]),
        ({"gpus": None, "visible_gpus": 0}, []),
        ({"shm_free": 64 * 2**20}, [("shm_small", "warning")]),
        ({"max_open_files": 60}, [("limit", "error")]),
        ({"max_processes": 100}, [("limit", "error")]),
        ({"max_locked_memory": 65536}, [("memlock", "error")]),
        ({"max_locked_memory": 65536, "has_infiniband": False}, []),
        ({"interfaces_up": ("eth0",)}, [("loopback_down", "error")]),
        ({"host_address": ""}, [("host_name", "note")]),
    ],
)
def test_each_fault_is_found_alone(change, found):
    assert faults(dataclasses.replace(GOOD, **change), gpus_per_node=2) == found


@pytest.mark.torch
def test_the_facts_are_those_of_this_machine(project, tmp_path, capsys):
    import torch

    assert cli.main(["doctor", "--save", str(tmp_path / "facts"), "--json"]) in {0, 80}
    live = json.loads(capsys.readouterr().out)
    found = local.load(tmp_path / "facts")
    assert found.torch == torch.__version__
    assert found.python == sys.executable
    assert found.max_open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert "lo" in found.interfaces_up
    total = shutil.disk_usage("/dev/shm").free
    assert abs(found.shm_free - total) < 2**30
    assert cli.main(["doctor", "--from", str(tmp_path / "facts"), "--json"]) in {0, 80}
    assert json.loads(capsys.readouterr().out) == live


def test_a_machine_without_a_loopback_is_seen(project):
    """In a network namespace of its own, where everything is down."""
    argv = ["unshare", "-Urn", sys.executable, "-m", "deploykit", "doctor", "--json", *BARE]
    if subprocess.run(["unshare", "-Urn", "true"], check=False).returncode:
        pytest.skip("no user namespaces here")
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 80, done.stderr
    assert "loopback_down" in [one["code"] for one in json.loads(done.stdout)["findings"]]
    assert "torch_missing" in done.stdout


def test_a_limit_of_this_shell_is_seen(project):
    script = f"ulimit -n 40; {sys.executable} -m deploykit doctor --json {' '.join(BARE)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 80, done.stderr
    found = [one["code"] for one in json.loads(done.stdout)["findings"]]
    assert found == ["torch_missing", "limit"]


def test_a_python_that_is_not_there_is_named(project, capsys):
    assert cli.main(["doctor", "--set", "local.python=/no/such/python"]) == 65
    assert "/no/such/python" in capsys.readouterr().err


def test_without_a_job_file_the_machine_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor", *BARE]) == 80
    out, err = capsys.readouterr()
    assert err == "note: no job.yaml here; assuming a job with one process\n"
    assert "error: the trainer's Python cannot import PyTorch" in out
    assert "  more   deploykit explain torch_missing\n" in out
    assert cli.main(["doctor", "other.yaml"]) == 66
    assert cli.main(["doctor", "-b", "sagemaker"]) == 65
    assert "sagemaker.role: is required" in capsys.readouterr().err


MOUNTS = """\
overlay / overlay rw 0 0
tmpfs /dev/shm tmpfs rw 0 0
filer:/home /home nfs4 rw 0 0
/dev/sda1 /home/local\\040disk ext4 rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/ada/.local", "nfs4"),
        ("/home/local disk/runs", "ext4"),
        ("/homes/ada", "overlay"),
        ("/", "overlay"),
    ],
)
def test_the_file_system_of_a_folder(path, kind):
    assert doctor.filesystem_of(path, MOUNTS) == kind


def test_a_folder_that_the_nodes_may_not_see():
    assert doctor.RunsFolder("/home/ada", "nfs4", single_host=False).shared
    assert doctor.RunsFolder("/home/ada", "ext4", single_host=True).shared
    assert not doctor.RunsFolder("/home/ada", "ext4", single_host=False).shared
