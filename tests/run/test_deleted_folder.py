"""A run folder was deleted: every verb reports it for that run, and shows the others."""

from __future__ import annotations

import json
import os
import shutil

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import registry
from tests.aws_server import SECTION

LATER = [State.SUBMITTING, State.QUEUED, State.RUNNING, State.STOPPING, State.UNKNOWN]
SLURM = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]
BACKENDS = [
    "local",
    pytest.param("slurm", marks=SLURM),
    pytest.param("slurm far away", marks=SLURM),
    pytest.param("sagemaker", marks=pytest.mark.aws),
]


WITHOUT_FOLDER = {("sagemaker", "logs"), ("sagemaker", "diagnose"), ("slurm", "cancel")}
"""What needs no folder: AWS keeps the logs, and Slurm's answer to a cancel is all there is."""


@pytest.fixture(params=BACKENDS)
def backend(request):
    """One after the other, with what it needs: its name, and the place of its runs."""
    name, _, far = request.param.partition(" ")
    if name == "slurm":
        request.getfixturevalue("cluster")
    if name == "sagemaker":
        request.getfixturevalue("aws")
        folder = request.getfixturevalue("project")
        with (folder / "job.yaml").open("a") as file:
            file.write(SECTION)
        assert cli.main(["submit", "--backend", "sagemaker", "--run", "lost"]) == 0
        shutil.rmtree(paths.run_folder("lost"))
    places = {"local": os.uname().nodename, "slurm": "nowhere.invalid" if far else "localhost"}
    return name, places.get(name, "us-east-1")


def add(name, where, state, *, whole):
    """A run with these columns in the registry."""
    backend, place = where
    folder = paths.run_folder(name)
    if whole:
        folder.mkdir(parents=True)
    row = (name, "j", backend, place, str(folder), "a", "b", None, registry.now(), "/out")
    registry.add(registry.Run(*row))
    if state is not State.SUBMITTING:
        registry.confirm(name, "7" if backend == "slurm" else name)
        registry.update(name, Status(state))


def rows(capsys, *words):
    assert cli.main([*words, "--json"]) == 0
    return {row["run"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.parametrize("state", [*LATER, State.SUCCEEDED])
def test_each_verb_goes_on(backend, capsys, state):
    add("lost", backend, state, whole=False)
    add("kept", backend, State.SUCCEEDED, whole=True)
    for words in (["list"], ["status", "lost", "kept"]):
        found = rows(capsys, *words)
        assert "was deleted" in found["lost"]["reason"]
        assert str(paths.run_folder("lost")) in found["lost"]["reason"]
        assert found["kept"]["reason"] == ""
    for words, codes in (
        (["logs", "lost"], {0, 66, 69}),
        (["diagnose", "lost"], {0, 66, 69}),
        (["wait", "lost", "--timeout", "0.1"], {0, 1, 124, 143}),
        (["cancel", "lost"], {0, 66, 69}),
    ):
        code = cli.main(words)
        said = "".join(capsys.readouterr())
        assert code in codes, (words, code, said)
        told = "was deleted" in said
        assert told or (backend[0], words[0]) in WITHOUT_FOLDER, (words, said)


@pytest.mark.torch
def test_a_local_run_of_which_nothing_is_left(project, capsys):
    plain = ("--set", "entrypoint.launcher=python")
    for name in ("lost", "kept"):
        words = ["submit", "--backend", "local", "--run", name, *plain, "--wait"]
        assert cli.main(words) == 0
    registry.update("lost", Status(State.RUNNING))
    shutil.rmtree(paths.run_folder("lost"))
    capsys.readouterr()
    found = rows(capsys, "list")
    assert found["kept"]["state"] == "succeeded"
    assert found["lost"]["state"] == "failed"
    folder = paths.run_folder("lost")
    assert found["lost"]["reason"] == (
        f"its exit status is unknown; the run folder {folder} was deleted"
    )
    assert cli.main(["logs", "lost"]) == 66
    assert f"lost has no logs: its folder {folder} was deleted" in capsys.readouterr().err
    assert cli.main(["logs", "kept"]) == 0
