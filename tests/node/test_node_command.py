from __future__ import annotations

import pytest

from deploykit_node import command
from deploykit_node.cluster import BadCommand, BadEnvironment, Cluster, Rank


@pytest.fixture(autouse=True)
def _script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()


def read(*words):
    return command.read(words, {})


def test_only_the_first_double_dash_separates():
    got = read("torchrun", "--nnodes=2", "--", "train.py", "--", "torchrun")
    assert got == command.Command(("--nnodes=2",), ("train.py", "--", "torchrun"))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "No program is given. Usage: launch.py torchrun"),
        (["--"], "No program is given"),
        (["--", "-m"], "No program is given"),
        (["torchrun", "train.py"], "`--` is missing between"),
        (["--", "-x.py"], "Write it as ./-x.py"),
        (["--", "trian.py"], "File trian.py not found in"),
    ],
)
def test_a_wrong_command_is_an_error(words, text):
    with pytest.raises(BadCommand, match=text) as error:
        read(*words)
    assert error.value.exit_code == 64


@pytest.mark.parametrize("options", [["--nnodes=2"], ["--nnodes", "2"], ["--nnodes=1:4"]])
def test_the_number_of_nodes_is_checked(options):
    command_line = read("torchrun", *options, "--max-restarts", "3", "--", "train.py")
    command_line.check_nodes(Cluster("slurm", 0, ("a", "b")))
    with pytest.raises(BadEnvironment, match=r"slurm started the job on 5: a, b, c, d, e"):
        command_line.check_nodes(Cluster("slurm", 0, tuple("abcde")))


def test_a_number_of_nodes_must_be_a_number():
    with pytest.raises(BadCommand, match="--nnodes=two must be a number"):
        read("torchrun", "--nnodes=two", "--", "train.py").check_nodes(Cluster("a", 0, ("a",)))


@pytest.mark.parametrize("options", ["--nproc-per-node=8", "--nproc_per_node=8"])
def test_the_world_is_checked(options):
    command_line = read("torchrun", "--nnodes=2", options, "--", "train.py")
    command_line.check_world(Rank("mpirun", 0, 0, 16, 8))
    with pytest.raises(BadEnvironment, match=r"= 16 ranks, but mpirun started 8"):
        command_line.check_world(Rank("mpirun", 0, 0, 8, 8))


def test_an_unknown_number_of_ranks_is_not_checked():
    read("torchrun", "--nnodes=2", "--nproc-per-node=gpu", "--", "train.py").check_world(
        Rank("torchrun", 0, 0, 3, 3)
    )
