"""A job on a real cluster that is stopped at its cost cap: it saves, and is not requeued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deploykit.cli import main as cli
from deploykit.cost import cap
from deploykit.lib import paths
from deploykit.run import state as run_state

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.xdist_group("slurm"),
]
SECONDS = (60, 240, 960)
"""What the cap pays for; more on a machine that is too slow to start the ranks in half of it."""
PROGRAM = """\
import os, pathlib, signal, sys, time
def save(number, frame):
    folder = pathlib.Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
    (folder / f"step-7-{os.environ['RANK']}.pt").write_text("weights")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True:
    time.sleep(0.1)
"""


def submit(capsys, seconds):
    """Two nodes, restarts allowed, for a USD a second in all: first refused, then accepted."""
    argv = ["submit", "--backend", "slurm", "--run", f"capped-{seconds}", "--nodes", "2"]
    argv += ["--set", "slurm.price=1800 USD/node-hour", "--max-cost", f"{seconds} USD"]
    assert cli.main(argv) == 65
    assert "the job may cost" in capsys.readouterr().err
    assert cli.main([*argv, "--stop-at-cap"]) == 0
    line = f"will be stopped after {seconds // 60}m, before it costs more than {seconds}.00 USD\n"
    assert line in capsys.readouterr().err
    *_, (row,) = run_state.wait_all([f"capped-{seconds}"])
    return row


def test_it_saves_stops_in_time_and_is_not_requeued(cluster, project, capsys, monkeypatch):
    monkeypatch.setattr(cap, "_MIN_SECONDS", 30)
    (project / "train.py").write_text(PROGRAM)
    for seconds in SECONDS:
        row = submit(capsys, seconds)
        assert row.reason.startswith(f"stopped at its cost cap ({seconds}.00 USD, at 3600.00 USD")
        assert seconds / 2 - 15 <= row.billed <= seconds + 60
        if "before any rank had started" not in row.reason:
            break
    assert (row.state, row.exit_code) == ("failed", 75), row
    assert "restart" not in row.reason
    kept = sorted(path.name for path in Path(paths.run_folder(row.run), "checkpoints").iterdir())
    assert kept == ["step-7-0.pt", "step-7-1.pt"]
    assert cli.main(["status", row.run, "--json"]) == 0
    (shown,) = json.loads(capsys.readouterr().out)
    assert shown["cost"]["amount"] == pytest.approx(row.billed, abs=1)
