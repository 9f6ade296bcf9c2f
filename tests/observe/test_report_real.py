"""Reports of real runs on a Slurm cluster, as a browser shows them, also on a phone."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploykit.backends import slurm
from deploykit.cli import main as cli
from deploykit.run import registry
from tests.backends.slurm.slurm_helpers import ended, output, wait_for
from tests.browser import AXE, BROWSER, findings, opened
from tests.observe.test_report import checked

PROGRAM = """\
import os, sys, time
kind, attempt = sys.argv[1], int(os.environ["DEPLOYKIT_RESTART_COUNT"])
for step in range(10 * attempt, 10 * attempt + 15):
    print(f"step {step}/45 loss {1 / (1 + step)} lr {0.1 - step / 1000}", flush=True)
    time.sleep(0.05)
if kind == "failed" and os.environ["RANK"] == "3":
    raise ValueError("bad batch")
if kind == "thrice" and attempt < 3 or kind == "failed":
    print("waits", flush=True)
    time.sleep(900)
"""
ON_TWO_NODES = ["--backend", "slurm", "--nodes", "2", "--processes-per-node", "2"]
SHAPES = [{"width": 1200}, {"width": 1200, "scheme": "dark"}, {"width": 390}]


def submit(kind, *words):
    argv = ["submit", *ON_TWO_NODES, "--run", kind, "--set", f"entrypoint.args=[{kind}]", *words]
    assert cli.main(argv) == 0
    return registry.known(kind).handle


def preempt(handle):
    """Have Slurm take the nodes away for a job of a higher priority."""
    nodes = output("squeue", "--noheader", f"--jobs={handle.id}", "--format=%N").strip()
    words = ["--partition=high", "--exclusive", "--nodes=2", f"--nodelist={nodes}"]
    output("sbatch", *words, "--output=/dev/null", "--wrap", "sleep 1")


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.torch
@pytest.mark.xdist_group("slurm")
@pytest.mark.skipif(BROWSER is None or not AXE.exists(), reason="optional: `make axe`, Chromium")
def test_a_browser_and_axe_find_nothing_in_reports_of_real_runs(cluster, project, capsys):
    (project / "train.py").write_text(PROGRAM)
    handles = {kind: submit(kind, "--set", "slurm.partition=low") for kind in ("thrice", "failed")}
    for restart in (1, 2, 3):
        wait_for(lambda n=restart: waits(handles["thrice"]) == 4 * n)
        preempt(handles["thrice"])
    handles["healthy"] = submit("healthy")
    states = {kind: ended(handle).state.value for kind, handle in handles.items()}
    assert states == {"healthy": "succeeded", "failed": "failed", "thrice": "succeeded"}
    for kinds in (["healthy"], ["thrice"], ["failed"], ["healthy", "thrice"]):
        page = Path(f"{'-'.join(kinds)}.html")
        assert cli.main(["report", *kinds, "--output", str(page)]) == 0
        text = checked(page).text
        assert "CONSOLE" not in opened(page)[1]
        for shape in SHAPES:
            found = findings(page, **shape)
            assert found["passed"] > 10
            assert (found["lines"], found["wider"]) == ([], 0), (kinds, shape)
        if kinds == ["thrice"]:
            assert "after 3 restarts" in text
            assert all(f"restart {number}: preemption" in text for number in (1, 2, 3))
        assert "node 1 of 2, slurm, on " in text or len(kinds) > 1


def waits(handle):
    """The ranks that wait, of all attempts."""
    return [one.text for one in slurm.logs(handle, follow=False)].count("waits")
