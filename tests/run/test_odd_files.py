"""A broken link in the place of a log or record, as after a cleaned scratch: no verb crashes."""

from __future__ import annotations

import pytest

from deploykit.cli import main as cli

_QUICK = ("logs/node-0.log", "alive", "exit_records/node-0.json")
_OTHERS = (
    *("logs/job.log", "claim", "job.json", "plan.sh", "progress"),
    *("exit_records/written.json", "exit_records/process-0.json", "exit_records/usage-0.json"),
    *("exit_records/history-0.jsonl", "exit_records/stall-0.json", "exit_records/restart-1.json"),
    "exit_records/software.json",
)
_FILES = (*_QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in _OTHERS))
_VERBS = ("status", "logs", "wait", "diagnose", "report --output page.html --force", "metrics")
_UNEXPECTED = 70


@pytest.mark.parametrize("name", _FILES)
def test_no_verb_crashes(name, live, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    live.log("step 1/2 loss 0.5")
    (live.folder / "plan.sh").touch()
    live.end(code=3)
    path = live.folder / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "nowhere")
    for verb, *options in map(str.split, _VERBS):
        code = cli.main([verb, live.folder.name, *options])
        assert code != _UNEXPECTED, (verb, capsys.readouterr().err)
