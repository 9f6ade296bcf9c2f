"""Ranks that cannot run below Nsight Systems; tests/test_nsys.py has those that do."""

from __future__ import annotations

import os

from tests import nsys_stand_in

ONE = ["torchrun", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=0", "--", "train.py"]


def test_a_node_without_nsys_says_so(bundle):
    bundle.write("train.py", "print('never')")
    done = bundle.run(*ONE, DEPLOYKIT_PROFILE="nsys")
    assert done.code == 78
    assert "error: profile: nsys is not on the PATH of this node. Load the Nsight" in done.log


def test_what_nsys_refuses_is_in_the_log(bundle, tmp_path):
    bundle.write("train.py", "print('never')")
    folder = nsys_stand_in.install(tmp_path / "bin", refuse="unrecognised option")
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    done = bundle.run(*ONE, DEPLOYKIT_PROFILE="nsys", PATH=path)
    assert done.code == 70
    assert "unrecognised option" in done.log
    assert "[rank 0] deploykit: no profile: nsys exited with code 1 without a report" in done.log
    assert "rank 0 exited with code 70" in done.log


def test_other_launchers_are_refused(bundle, as_rank):
    bundle.write("train.py", "print('never')")
    done = bundle.run("--", "train.py", **as_rank, DEPLOYKIT_PROFILE="nsys:3:5")
    assert done.code == 78
    assert "profile: nsys requires ranks started by deploykit, not by torchrun" in done.log
