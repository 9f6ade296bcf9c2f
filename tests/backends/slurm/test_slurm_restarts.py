"""Jobs on a real cluster whose failures decide whether Slurm starts them again."""

from __future__ import annotations

import json
import re
import time

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.lib.errors import TryAgain
from deploykit.run import state as run_state
from tests.backends.slurm.slurm_helpers import output
from tests.node import restart_scenarios as scenarios

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
]
ONCE = 'if os.environ["DEPLOYKIT_RESTART_COUNT"] != "0": sys.exit(0)\n'
SOME = ("ecc", "input-output", "unavailable", "dns", "gloo-peer", "watchdog-after-peer")
"""These fail in the first attempt only, at night all of the transient ones."""
LASTING = {
    **dict.fromkeys(("module", "unknown-option", "memory-at-once", "no-file", "checkpoint"), 1),
    **dict.fromkeys((*scenarios.TWICE, "killed"), 2),
    "stale-handle": 3,
}
"""These fail in every attempt, and are started so many times; at night all deterministic ones."""
EVERY = dict.fromkeys(scenarios.DETERMINISTIC, 1) | LASTING
SETTINGS = ("slurm.restarts={error: 4, transient: 4}", "entrypoint.launcher=python")
POLICIES = {
    "never": ("port", ("restarts.policy=never",), 1),
    "always": ("syntax", ("restarts.policy=always", "slurm.restarts={error: 1}"), 2),
    "default": ("division", ("slurm.restarts={}",), 1),
}
"""A scenario, further settings, and how often it is started."""


def submit(project, run, name, before="", settings=()):
    script = project / f"{run}.py"
    text = scenarios.program(name)
    script.write_text(
        text.replace("import argparse", f"import os, sys\n{before}import argparse", 1)
    )
    words = [*SETTINGS, "restarts.back_off=1s", *settings]
    words += [f"entrypoint.script={script.name}", f"env.STARTS={project / f'{run}.starts'}"]
    argv = ["submit", "--backend", "slurm", "--run", run]
    argv += [word for one in words for word in ("--set", one)]
    while (code := cli.main(argv)) == TryAgain.exit_code:  # the controller is busy; the id is safe
        time.sleep(1)
    assert code == 0


def ended(project, passing, lasting):
    """All jobs by name, after they have ended: their row, starts and decisions."""
    for name in passing:
        submit(project, f"p-{name}", name, ONCE)
    for name in lasting:
        submit(project, f"l-{name}", name)
    for run, (name, settings, _) in POLICIES.items():
        submit(project, run, name, settings=settings)
    runs = [*(f"p-{name}" for name in passing), *(f"l-{name}" for name in lasting), *POLICIES]
    *_, rows = run_state.wait_all(runs)
    found = {}
    for row in rows:
        records = sorted((paths.run_folder(row.run) / "exit_records").glob("decision-*.json"))
        made = [json.loads(path.read_text()) for path in records]
        starts = (project / f"{row.run}.starts").read_text().count("\n")
        found[row.run] = row, starts, made
    return found


@pytest.mark.parametrize(
    ("passing", "lasting"),
    [
        pytest.param(SOME, LASTING, id="some"),
        pytest.param(tuple(scenarios.TRANSIENT), EVERY, id="every", marks=pytest.mark.nightly),
    ],
)
def test_each_decision_is_right(cluster, project, passing, lasting):
    jobs = ended(project, passing, lasting)
    for name in passing:
        row, starts, made = jobs[f"p-{name}"]
        assert (row.state, starts) == ("succeeded", 1), row
        assert [(one["restart"], one["kind"]) for one in made] == [(True, "transient")]
        assert "after 1 restart (transient 1)" in row.reason
    shown = output("scontrol", "show", "job", jobs["p-ecc"][0].id)
    excluded, used = (
        re.search(rf"\b{name}=(\S+)", shown)[1] for name in ("ExcNodeList", "NodeList")
    )
    assert excluded != "(null)"
    assert excluded != used
    for name, count in lasting.items():
        row, starts, made = jobs[f"l-{name}"]
        assert (row.state, starts) == ("failed", count), (row, made)
        assert [one["restart"] for one in made] == [True] * (count - 1) + [False]
        assert made[-1]["why"] in row.reason
    for run, (_, _, count) in POLICIES.items():
        row, starts, _ = jobs[run]
        assert (row.state, starts) == ("failed", count), row
    assert "not restarted" not in jobs["default"][0].reason
