"""Nodes that failed are left out of the next job on the same target, listed and cleared."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import excluded_nodes as left_out
from deploykit.run import registry
from deploykit_node import records
from deploykit_node.preflight import findings
from tests.live_run import OnTerminal
from tests.node.test_node_preflight import PLAN, told

LIMIT = "resources.time_limit=1h"


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """A run that has ended on a cluster, whose nodes recorded these failures."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("print(1)\n")
    Path("job.yaml").write_text("name: one\nentrypoint: {script: train.py}\n")

    def record(run, hosts, *, failed_check=True, target="localhost", attempt=0):
        folder = tmp_path / run
        env = {"DEPLOYKIT_RUN_DIR": str(folder), "SLURM_RESTART_COUNT": str(attempt)}
        records.record_unhealthy(env, hosts, failed_check=failed_check)
        row = registry.Run(run, "one", "slurm", target, str(folder), "", "", None, 1.0, "")
        left_out.learn([row])

    return record


def plan(capsys, *words):
    argv = ["submit", "--backend", "slurm", "--dry-run", "--set", LIMIT, *words]
    code = cli.main(argv)
    shown = capsys.readouterr()
    assert code == 0, shown.err
    return shown


def excluded(shown):
    lines = [line for line in shown.out.splitlines() if line.startswith("#SBATCH --exclude")]
    return lines[0].partition("=")[2] if lines else None


def test_a_node_that_failed_its_check_is_left_out_until_it_is_cleared(ended, capsys):
    assert excluded(plan(capsys)) is None
    ended("a-1", {"n2": "GPU 3 is lost to the driver"})
    shown = plan(capsys)
    assert excluded(shown) == "n2"
    assert "n2 is excluded: GPU 3 is lost to the driver" in shown.err
    assert "deploykit nodes --clear n2" in shown.err
    assert excluded(plan(capsys, "--set", "slurm.exclude=n7")) == "n7,n2"
    assert excluded(plan(capsys, "--set", "slurm.nodelist=n2")) is None
    assert cli.main(["nodes"]) == 0
    assert capsys.readouterr().out.startswith("n2\tslurm://localhost\t2")
    assert cli.main(["nodes", "--clear", "n2"]) == 0
    assert excluded(plan(capsys)) is None


def test_a_node_is_left_out_on_its_own_cluster_alone(ended, capsys):
    ended("a-1", {"n2": "GPU 3 is lost"}, target="login.example.com")
    assert excluded(plan(capsys)) is None


def test_a_node_that_disappears_is_left_out_the_second_time(ended, capsys):
    for _ in range(2):  # the same attempt counts once
        ended("a-1", {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) is None
    assert cli.main(["nodes", "--json"]) == 0
    (node,) = json.loads(capsys.readouterr().out)
    assert (node["left_out"], node["runs"]) == (False, ["a-1.0"])
    ended("a-1", {"n2": "its launcher disappeared"}, failed_check=False, attempt=1)
    assert excluded(plan(capsys)) == "n2"


def test_it_expires(ended, capsys, monkeypatch):
    monkeypatch.setattr(left_out, "DAYS", 0)
    ended("a-1", {"n2": "GPU 3 is lost"})
    assert excluded(plan(capsys)) is None


@pytest.mark.parametrize("name", ["n1\n#SBATCH --wrap=id", "n[1-9]", "-x", "", "a,b", "$(id)"])
def test_a_name_that_is_no_nodes_is_not_taken_over(ended, capsys, name):
    ended("a-1", {name: "GPU 3 is lost"})
    assert left_out.every() == []


def test_a_node_that_is_not_listed_cannot_be_cleared(ended, capsys):
    assert cli.main(["nodes", "--clear", "n2"]) == 66
    assert "not excluded: n2" in capsys.readouterr().err


def test_the_page_for_the_administrator(ended, capsys):
    reason = "node 1 (n2, 10.0.0.2): GPU 3 could not remap a bad memory row"
    ended("a-1", {"n2": reason})
    folder = Path("a-1")
    (folder / "logs").mkdir()
    stamp = "2026-11-21T01:46:08.123Z [node 0] preflight:"
    (folder / "logs" / "node-0.log").write_text(
        f"{stamp} node 0 (n1, 10.0.0.1): eth0\n{stamp} node 1 (n2, 10.0.0.2): eth0\n"
        f"{stamp} FAILED: {reason}\n{stamp} FAILED: n2x\n"
    )
    where = str(folder.absolute())
    registry.add(registry.Run("a-1", "one", "slurm", "localhost", where, "", "", None, 1.0, ""))
    registry.confirm("a-1", "7", Status(State.FAILED))
    assert cli.main(["nodes", "--report", "n2"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("n2 on slurm://localhost: excluded until 2")
    assert f"\nReason: {reason}\n" in page
    assert "\n  preflight: node 1 (n2, 10.0.0.2): eth0\n  preflight: FAILED: node 1" in page
    assert "node 0 (n1" not in page
    assert "scontrol update NodeName=n2 State=DRAIN" in page
    assert "nvidia-smi -q -d ECC,ROW_REMAPPER" in page
    assert page.endswith("Let deploykit use it again: deploykit nodes --clear n2\n")
    shown = OnTerminal("nodes", "--report", "n2")
    assert shown.end() == 0
    assert shown.seen.replace("\r\n", "\n") == page
    assert cli.main(["nodes", "--report", "n3"]) == 66


def test_only_what_is_about_one_node_blames_it():
    dropped = {"state": "dropped"}
    rows = told(l02=dropped, l12=dropped, l32=dropped, l01=dropped)
    rows[3]["health"]["faults"] = [["GPU 0 is lost", True], ["GPU 1 is hot", False]]
    rows[1]["versions"] = {**rows[1]["versions"], "NCCL": None}
    fatal = [one for one in findings.judge_pairs(PLAN, rows) if one.fatal]
    assert len(fatal) == 4
    blamed = findings.blamed(PLAN, fatal)
    assert blamed["d"] == "node 3 (d, 10.0.0.3): GPU 0 is lost"
    assert sorted(blamed) == ["c", "d"]


def test_one_clear_and_one_failure_since_leave_a_node_in(ended, capsys):
    for run in ("a-1", "a-2"):
        ended(run, {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) == "n2"
    assert cli.main(["nodes", "--clear", "n2"]) == 0
    ended("a-3", {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) is None
    assert stat.S_IMODE(paths.left_out().stat().st_mode) == 0o600


@pytest.mark.slurm
@pytest.mark.xdist_group("slurm")
def test_a_node_that_the_cluster_does_not_have_is_dropped(ended, cluster, capsys):
    """Slurm refuses a job that excludes one."""
    ended("a-1", {"n2": "GPU 3 is lost", "gone7": "GPU 1 is lost"})
    assert excluded(plan(capsys)) == "gone7,n2"
    argv = ["submit", "--backend", "slurm", "--set", LIMIT, "--set", "slurm.extra={hold: ''}"]
    assert cli.main(argv) == 0
    shown = capsys.readouterr()
    assert "n2 is excluded: GPU 3 is lost" in shown.err
    assert "gone7" not in shown.err
    assert [node.node for node in left_out.every()] == ["n2"]


def test_without_an_answer_of_slurm_no_node_is_dropped(ended, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    ended("a-1", {"gone7": "GPU 1 is lost"})
    assert cli.main(["submit", "--backend", "slurm", "--set", LIMIT]) != 0
    assert [node.node for node in left_out.every()] == ["gone7"]
