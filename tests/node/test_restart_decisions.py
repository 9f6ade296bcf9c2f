"""Whether failed ranks start again: by the cause, by what was before, and in real processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from deploykit.diagnose import cause_rules
from deploykit_node import records
from deploykit_node.restart import decision, failure
from deploykit_node.restart.failure import Failure
from tests.diagnose.answers import LOGS, cases
from tests.nightly import few
from tests.node import restart_scenarios as scenarios

RETRY = defaultdict(set)
for _rule in cause_rules.load().causes:
    RETRY[_rule.label].add(_rule.retry)


def earlier(root, *, step=None, saved=""):
    """A decision to restart after a failure."""
    return {"root": root, "step": step, "steps": step is not None, "saved": saved}


@pytest.mark.parametrize("row", failure.ROWS, ids=lambda row: row.label)
def test_a_row_says_of_a_cause_what_the_rules_of_diagnose_say(row):
    assert row.retry in RETRY[row.label]


def corpus():
    for log in cases("failures.toml"):
        yield log["cause"], log["text"]
    for line in (LOGS / "lines.txt").read_text(encoding="utf-8").splitlines():
        labels, bar, text = line.partition(" | ")
        if bar and not line.startswith("#") and labels.strip() != "none":
            yield labels.strip(), text.replace("\\n", "\n")


def test_no_log_is_judged_against_the_rules_of_diagnose():
    """The few rows of the node know less than the rules, and contradict them nowhere."""
    counts, wrong = Counter(), []
    for labels, text in corpus():
        found = failure.read(1, text, "")
        expected = set().union(*(RETRY[label] for label in labels.split(",")))
        if found.retry in expected:
            counts["same"] += 1
        elif found.retry == failure.UNKNOWN:
            counts["undecided"] += 1
        elif expected - {failure.UNKNOWN}:
            wrong.append((labels, found))
        else:
            counts["decided"] += 1
    assert not wrong
    assert counts["decided"] <= 3, counts  # two lines without their context, and one of DNS
    assert counts["same"] / counts.total() > 0.45, counts


def run(name, tmp_path):
    """What a scenario's program leaves: its exit code and both outputs."""
    script = tmp_path / "train.py"
    script.write_text(scenarios.program(name))
    env = {"PATH": os.environ["PATH"], "STARTS": str(tmp_path / "starts")}
    env["DEPLOYKIT_CHECKPOINT_DIR"] = str(tmp_path)
    argv = [sys.executable, "-S", str(script)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    return failure.read(code, done.stderr, done.stdout)


def test_there_are_forty_scenarios():
    assert (len(scenarios.TRANSIENT), len(scenarios.DETERMINISTIC)) == (20, 20)


@pytest.mark.parametrize("name", scenarios.TRANSIENT)
def test_a_transient_failure_is_tried_again_until_it_is_not_transient(name, tmp_path):
    found = run(name, tmp_path)
    decided = decision.decide(found, "", [])
    assert (decided.restart, decided.kind) == (True, "transient"), found
    assert found.label in decided.why
    again = earlier(found.root)
    assert decision.decide(found, "", [again]).restart
    assert not decision.decide(found, "", [again, again]).restart
    assert decision.decide(found, "step-9.pt", [again, again]).restart


@pytest.mark.parametrize("name", scenarios.DETERMINISTIC)
def test_a_deterministic_failure_is_not_tried_again(name, tmp_path):
    found = run(name, tmp_path)
    before, saved = [], ""
    if name in scenarios.TWICE:
        saved = "step-57.pt" if name == "same-step" else ""
        first = decision.decide(found, saved, [])
        assert (first.restart, first.kind) == (True, "unknown")
        before = [earlier(found.root, step=found.step, saved=saved)]
        found = run(name, tmp_path)
    decided = decision.decide(found, saved, before)
    assert not decided.restart, found
    assert decided.kind == ("unknown" if name == "no-progress" else "deterministic")
    assert "not restarted" in decided.why


@pytest.mark.parametrize("name", scenarios.UNKNOWN)
def test_an_unknown_failure_is_tried_again_until_it_returns_without_a_checkpoint(name, tmp_path):
    found = run(name, tmp_path)
    decided = decision.decide(found, "", [])
    assert (decided.restart, decided.kind) == (True, "unknown"), found
    again = earlier(found.root, step=found.step)
    assert not decision.decide(found, "", [again]).restart
    assert decision.decide(found._replace(step=99), "step-9.pt", [again]).restart


@pytest.mark.parametrize(
    ("output", "step", "steps"),
    [
        ("step 56 loss 1.5\nstep 57 loss 1.2", 57, True),
        ("step 100 loss 1.5\nstep 200 loss 1.2", None, True),  # it was at some step after 200
        ("step 100 loss 1.5", None, True),
        ("iter 7/90\niter 8/90", 8, True),
        ("\r57%|### | 57/100 [00:01<00:01]", 57, True),
        ("Loading shards: 100%|### | 4/4 [00:01<00:00]", None, False),
        ("1 rank on cpu, global batch 8, 30 steps, every step 5", None, False),
        ("step 1 loss 3.2", None, False),
    ],
)
def test_a_step_is_known_where_each_one_is_printed(output, step, steps):
    found = failure.read(1, "", output)
    assert (found.step, found.steps) == (step, steps)


def test_a_preemption_in_between_hides_no_repetition():
    found = Failure(error="IndexError: x", root="IndexError at train.py:3")
    preempted = earlier("")
    assert not decision.decide(found, "", [earlier(found.root), preempted]).restart
    assert decision.decide(found, "", [earlier(found.root), earlier("", saved="a.pt")]).restart


def test_restarts_in_vain_wait_ever_longer():
    found = Failure(error="x", root="x")
    roots = [earlier(str(number)) for number in range(7)]
    waits = [decision.decide(found, "", roots[:count], 10).wait for count in range(8)]
    assert waits == [0, 10, 20, 40, 80, 160, 300, 300]
    assert decision.decide(found, "a.pt", roots, 10).wait == 0


def test_a_rank_that_only_lost_its_peer_is_not_the_reason(tmp_path):
    """The one that raised may end later, since it is torn down, even after torchrun's SIGTERM."""
    env = {"DEPLOYKIT_RUN_DIR": str(tmp_path), "DEPLOYKIT_RANK_DIR": str(tmp_path)}
    outputs = {
        0: ("RuntimeError: Connection closed by peer [127.0.0.1]:1", False, 1),
        1: ("IndexError: list index out of range", True, 143),
        2: ("", True, 143),
    }
    for number, (error, stopped, code) in outputs.items():
        rank = {"rank": number, "local_world_size": 3, "exit_code": code, "stopped": stopped}
        text = f'Traceback (most recent call last):\n  File "t.py", line {number}\n{error}\n'
        last = (text if error else "", "", "")
        decision.record_failure(env, tmp_path, {**rank, "attempt": 0}, last)
    assert decision.root(env, tmp_path, alone=True)["root"] == "IndexError at t.py:1"
    (shared,) = (tmp_path / records.FOLDER).glob("error-*.json")
    assert decision.root(env, tmp_path / "another node", alone=False)["rank"] == 1
    shared.unlink()
    assert decision.root(env, tmp_path, alone=True)["rank"] == 1


TORCHRUN = ("torchrun", "--nnodes=1", "--nproc-per-node=2", "--max-restarts=3", "--", "train.py")
STARTS = {
    **dict.fromkeys(("input-output", "port"), 3),
    **dict.fromkeys(("module", "unknown-option", "memory-at-once", "no-file"), 1),
    **dict.fromkeys((*scenarios.TWICE, "killed"), 2),
}
"""How often the ranks start before deploykit gives up, of four times that `retries` allows."""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("name", few(STARTS, "port", "module", "same-step", "killed"))
def test_torchrun_restarts_the_ranks_as_decided(bundle, tmp_path, name):
    bundle.write("train.py", scenarios.program(name))
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    starts = tmp_path / "starts"
    policy = '{"policy": "cause", "back_off": 0.1}'
    done = bundle.run(
        *TORCHRUN,
        STARTS=starts,
        DEPLOYKIT_CHECKPOINT_DIR=folder,
        DEPLOYKIT_RESTART_POLICY=policy,
    )
    # one of the two ranks may be stopped before it has written that it started
    assert len(set(starts.read_text().split())) == STARTS[name], done.log
    last = bundle.end(f"decision-0.{STARTS[name] - 1}")
    assert not last["restart"]
    assert bundle.end("node-0")["reason"].endswith(last["why"])
    assert f"[node 0] {last['why']}" in done.log
    assert "RendezvousClosedError" not in done.log
    assert done.code == (137 if name == "killed" else 2 if name == "unknown-option" else 1)


@pytest.mark.torch
@pytest.mark.slow
def test_with_always_the_cause_does_not_matter(bundle, tmp_path):
    bundle.write("train.py", scenarios.program("module"))
    starts = tmp_path / "starts"
    done = bundle.run(*TORCHRUN, STARTS=starts, DEPLOYKIT_RESTART_POLICY='{"policy": "always"}')
    assert len(set(starts.read_text().split())) == 4, done.log
    assert not list(bundle.run_dir.glob("exit_records/decision-*"))


@pytest.mark.torch
@pytest.mark.slow
def test_the_node_of_the_rank_that_failed_decides_for_all(bundle, tmp_path):
    """Rank 2 is on the second node; the ranks of the first only lose it."""
    bundle.write(
        "train.py",
        """\
        import os, sys
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        print("met", flush=True)
        if os.environ["RANK"] == "2":
            import a_module_that_nobody_has
        dist.barrier()
        """,
    )
    (bundle.run_dir / "rendezvous.json").touch()
    words = ("torchrun", "--nnodes=2", "--nproc-per-node=2", "--max-restarts=3", "--", "train.py")
    launchers = [
        bundle.start(*words, node=node, DEPLOYKIT_NODE_RANK=node, DEPLOYKIT_NODES=2)
        for node in range(2)
    ]
    done = launchers[1].finish()
    launchers[0].process.terminate()  # as the launcher of several emulated nodes does
    launchers[0].finish()
    assert done.log.count("met") == 2, done.log
    assert "missing_module" in bundle.end("node-1")["reason"]
    assert bundle.end("decision-0.0")["cause"] == "missing_module"
