"""Nodes that failed are left out of the next job on the same target, listed and cleared."""

from __future__ import annotations

import json
import os
import stat
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib import paths
from deploykit.run import excluded_nodes as left_out
from deploykit.run import node_lists, registry
from deploykit_node import exit_records
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
        exit_records.record_unhealthy(env, hosts, failed_check=failed_check)
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
    monkeypatch.setattr(node_lists, "DAYS", 0)
    ended("a-1", {"n2": "GPU 3 is lost"})
    assert excluded(plan(capsys)) is None


@pytest.mark.parametrize("name", ["n1\n#SBATCH --wrap=id", "n[1-9]", "-x", "", "a,b", "$(id)"])
def test_a_name_that_is_no_nodes_is_not_taken_over(ended, capsys, name):
    ended("a-1", {name: "GPU 3 is lost"})
    assert left_out.every() == []


@pytest.mark.parametrize("text", ["", "{}", '[{"node": 1}]', "[" * 10_000, "[null]"])
def test_a_damaged_list_leaves_nothing_out(ended, capsys, text):
    paths.private_folder(paths.state())
    paths.write(paths.left_out(), text)
    assert excluded(plan(capsys)) is None
    assert cli.main(["nodes", "--clear", "n2"]) == 66
    assert "not excluded: n2" in capsys.readouterr().err


def test_the_page_for_the_administrator(ended, capsys):
    reason = "node 1 (n2, 10.0.0.2): GPU 3 could not replace a bad row"
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
    assert page.startswith("n2 of slurm://localhost: excluded until 2")
    assert f"\nReason: {reason}\n" in page
    assert "\n  preflight: node 1 (n2, 10.0.0.2): eth0\n  preflight: FAILED: node 1" in page
    assert "node 0 (n1" not in page
    assert "scontrol update NodeName=n2 State=DRAIN" in page
    assert "nvidia-smi -q -d ECC,ROW_REMAPPER" in page
    assert page.endswith("Then use it again: deploykit nodes --clear n2\n")
    shown = OnTerminal("nodes", "--report", "n2")
    assert shown.end() == 0
    assert shown.seen.replace("\r\n", "\n") == page
    assert cli.main(["nodes", "--report", "n3"]) == 66


def test_only_what_is_about_one_node_blames_it():
    dropped = {"state": "dropped"}
    rows = told(l02=dropped, l12=dropped, l32=dropped, l01=dropped)
    rows[3]["health"]["faults"] = [["GPU 0 is lost", True], ["GPU 1 is hot", False]]
    rows[1]["versions"] = {**rows[1]["versions"], "NCCL": None}
    fatal = [one.text for one in findings.judge_pairs(PLAN, rows) if one.fatal]
    assert len(fatal) == 4
    blamed = findings.blamed(PLAN, fatal)
    assert blamed["d"] == "node 3 (d, 10.0.0.3): GPU 0 is lost"
    assert sorted(blamed) == ["c", "d"]


OTHER = 65534
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="optional: only root can give files away")


@pytest.fixture
def shared(tmp_path_factory, monkeypatch):
    """A folder in which users share their lists, made as the guide says."""
    folder = tmp_path_factory.mktemp("shared nodes")
    folder.chmod(0o1777)
    monkeypatch.setenv("DEPLOYKIT_SHARED_NODES", str(folder))
    return folder


@pytest.fixture
def other(shared):
    """Writes what another user found on the node n2, or that they cleared it at some time."""

    def write(*runs, at=None, **changed):
        until = (at or time.time()) + node_lists.DAYS * 86_400
        node = node_lists.Node("slurm://localhost", "n2", "GPU 3 is lost", bool(runs), runs, until)
        file = shared / f"{OTHER}.json"
        file.write_text(json.dumps([{**asdict(node), **changed}]))
        os.chown(file, OTHER, OTHER)

    return write


def test_what_a_run_found_is_written_for_all_to_read(ended, shared):
    ended("a-1", {"n2": "GPU 3 is lost"})
    (file,) = shared.iterdir()
    assert file.name == f"{os.getuid()}.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert stat.S_IMODE(paths.left_out().stat().st_mode) == 0o600
    assert [row["node"] for row in json.loads(file.read_text())] == ["n2"]


@needs_root
def test_a_node_that_failed_for_another_user_is_excluded(ended, other, capsys):
    other("x-1.0")
    shown = plan(capsys)
    assert excluded(shown) == "n2"
    assert "n2 is excluded: GPU 3 is lost (in a run of nobody)" in shown.err
    assert cli.main(["nodes", "--report", "n2"]) == 0
    assert "\nReason: GPU 3 is lost (in a run of nobody)\n" in capsys.readouterr().out


@needs_root
def test_who_clears_a_node_clears_it_for_all_until_it_fails_again(ended, other, shared, capsys):
    other("x-1.0")
    assert cli.main(["nodes", "--clear", "n2"]) == 0
    assert excluded(plan(capsys)) is None
    (own,) = json.loads((shared / f"{os.getuid()}.json").read_text())
    assert (own["node"], own["runs"]) == ("n2", [])
    other("x-1.0", "x-2.0", at=time.time() + 60)
    assert excluded(plan(capsys)) == "n2"


@needs_root
def test_two_users_who_each_lost_a_node_once_lost_it_twice(ended, other, capsys):
    other("x-1.0", failed_check=False)
    assert excluded(plan(capsys)) is None
    ended("a-1", {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) == "n2"
    (node,) = left_out.every()
    assert node.runs == ("x-1.0", "a-1.0")


@needs_root
def test_failures_before_a_clear_by_another_user_do_not_count(ended, other, capsys, monkeypatch):
    ended("a-1", {"n2": "its launcher disappeared"}, failed_check=False)
    other(at=time.time() + 60)
    later = time.time() + 120
    monkeypatch.setattr(time, "time", lambda: later)
    ended("a-2", {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) is None
    ended("a-3", {"n2": "its launcher disappeared"}, failed_check=False)
    assert excluded(plan(capsys)) == "n2"


@needs_root
@pytest.mark.parametrize(
    "changed", [{"until": 1e12}, {"node": "n2\n#SBATCH --wrap=id"}, {"runs": 1}, {"target": None}]
)
def test_odd_entries_of_others_exclude_nothing(ended, other, capsys, changed):
    other("x-1.0", **changed)
    assert excluded(plan(capsys)) is None


@needs_root
@pytest.mark.parametrize("text", ["", "[null]", '[{"node": 1}]', "[" * 10_000])
def test_damaged_lists_of_others_exclude_nothing(ended, other, shared, capsys, text):
    other("x-1.0")
    (shared / f"{OTHER}.json").write_text(text)
    assert excluded(plan(capsys)) is None


def test_links_and_pipes_of_others_are_not_opened(ended, shared, tmp_path, capsys):
    (shared / "1.json").symlink_to(tmp_path / "job.yaml")
    os.mkfifo(shared / "2.json")
    assert excluded(plan(capsys)) is None


def test_a_shared_folder_that_is_not_there_is_named(ended, tmp_path, monkeypatch, capsys, caplog):
    monkeypatch.setenv("DEPLOYKIT_SHARED_NODES", str(tmp_path / "gone"))
    ended("a-1", {"n2": "GPU 3 is lost"})
    assert "gone cannot be written: No such file or directory" in caplog.text
    shown = plan(capsys)
    assert excluded(shown) == "n2"
    assert "gone cannot be read: No such file or directory" in shown.err
    assert cli.main(["nodes"]) == 64
    assert "unset the variable" in capsys.readouterr().err
