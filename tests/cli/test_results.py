"""Results that a script saves into its working folder: listed, collected, and there again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from deploykit.cli import describe
from deploykit.cli import main as cli
from deploykit.lib import paths, units
from deploykit.lib.errors import JobFileError
from deploykit.run import lifecycle, registry
from tests.backends.test_local import status, submit, wait_for

TUTORIAL = """\
import os, sys, torch

torch.distributed.init_process_group("gloo")
epoch = torch.load("snapshot.pt")["epoch"] if os.path.exists("snapshot.pt") else 0
print("starts at epoch", epoch, flush=True)
torch.distributed.barrier()
for epoch in range(epoch + 1, epoch + 3):
    if os.environ["LOCAL_RANK"] == "0":
        torch.save({"epoch": epoch}, "snapshot.pt")
torch.distributed.barrier()
torch.distributed.destroy_process_group()
"""
"""How PyTorch's multigpu_torchrun.py saves and resumes."""


def ends(*overrides):
    """Submit and wait; the exit code."""
    sets = [word for one in overrides for word in ("--set", one)]
    return cli.main(["submit", "-b", "local", "--wait", *sets])


@pytest.mark.nightly
@pytest.mark.torch
def test_a_tutorials_snapshot_is_collected_and_the_next_submit_resumes(project, capsys, tmp_path):
    (project / "train.py").write_text(TUTORIAL)
    (project / "job.yaml").write_text(
        "name: tutorial\n"
        "entrypoint: {script: train.py}\n"
        "resources: {time_limit: 5m, processes_per_node: 2}\n"
        "outputs: [snapshot.pt]\n"
        f"checkpoints: {tmp_path}/kept\n"
    )
    assert ends() == 0
    said = capsys.readouterr().out
    run = registry.get(None).run
    assert said.splitlines()[-3] == f"{run}: succeeded, exit code 0"
    assert said.endswith(f"  more    deploykit status {run}\n")
    assert said.count("starts at epoch 0") == 2
    assert cli.main(["status"]) == 0
    shown = capsys.readouterr().out
    found = status(capsys, "tutorial")
    (result,) = Path(found["output"]).iterdir()
    assert result.name == "snapshot.pt"
    size = result.stat().st_size
    assert found["written"]["output"]["largest"] == [{"path": "snapshot.pt", "bytes": size}]
    assert f"  files   1 file, {units.size(size)}, in {found['output']}\n" in said
    assert f"in output: 1 file, {units.size(size)}\n" in shown
    assert ends() == 0
    assert capsys.readouterr().out.count("starts at epoch 2") == 2


@pytest.mark.torch
def test_what_a_failing_script_wrote_is_collected_and_listed(project, capsys):
    script = "open('a.log', 'w').write('x' * 2500); raise SystemExit(3)"
    (project / "train.py").write_text(script)
    assert ends("outputs=[a.log]", "entrypoint.launcher=python") == 3
    capsys.readouterr()
    assert cli.main(["status"]) == 0
    assert "in output: 1 file, 2.5 kB" in capsys.readouterr().out
    dated = "import os; os.makedirs('out/2026'); open('out/2026/1.pt', 'w').write('x')"
    (project / "train.py").write_text(f"{dated}; {script}")
    assert ends() == 3
    row = registry.get(None)
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"{row.run}: failed, exit code 3",
        "  reason  rank 0 exited with code 3",
        f"  more    deploykit diagnose {row.run}",
    ]
    assert cli.main(["status"]) == 0
    lines = capsys.readouterr().out.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("  files"))
    assert lines[start:] == [
        "  files   in output: none",
        f"          in the working folder, {row.folder}/source: 2 files, 2.5 kB",
        "              2.5 kB  a.log",
        "                 1 B  out/2026/1.pt",
        "          to copy them to output, add this to the job file: outputs: [a.log, out]",
    ]


@pytest.mark.torch
@pytest.mark.parametrize("nodes", [1, 2])
def test_what_a_cancelled_script_wrote_is_collected(project, capsys, tmp_path, nodes):
    (project / "train.py").write_text(
        "import os, time\n"
        "open('part.ckpt', 'w').write('1')\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    settings = ("outputs=['*.ckpt']", f"resources.nodes={nodes}", "entrypoint.launcher=python")
    found = submit(capsys, *(word for one in settings for word in ("--set", one)))
    log = tmp_path / "state folder/runs" / found["run"] / "logs/node-0.log"
    wait_for(lambda: log.exists() and "ready" in log.read_text())
    assert cli.main(["cancel", found["run"]]) == 0
    assert cli.main(["wait", found["run"]]) == 143
    assert [path.name for path in Path(found["output"]).iterdir()] == ["part.ckpt"]


@pytest.mark.parametrize(
    "pattern", ["/etc/passwd", "../a.pt", "a/../../b", "..", "~/a.pt", "''", '"a\\nb"']
)
def test_a_pattern_that_leaves_the_working_folder_is_refused(project, pattern):
    with pytest.raises(JobFileError) as caught:
        lifecycle.load(Path("job.yaml"), [f"outputs=[{pattern}]"], ["local"])
    assert [problem.path for problem in caught.value.problems] == ["outputs[0]"]


def test_the_nodes_are_told_the_patterns(project):
    plan = lifecycle.prepare(Path("job.yaml"), ["outputs=[a.pt, '*.ckpt']"], "local", "one").plan
    assert """export DEPLOYKIT_OUTPUTS='["a.pt", "*.ckpt"]'""" in plan.text
    assert (
        "DEPLOYKIT_OUTPUTS" not in lifecycle.prepare(Path("job.yaml"), [], "local", "one").plan.text
    )


def test_tasks_of_an_array_are_warned(project):
    changes = ["outputs=[a.pt]", "slurm.array=3"]
    file = lifecycle.load(Path("job.yaml"), changes, ["slurm"])
    (warning,) = lifecycle.check(file, "slurm")
    assert "share one working folder" in warning.message


NONE = {"folder": "/o", "count": 0, "bytes": 0, "largest": []}
FILES = {"folder": "/w", "count": 1, "bytes": 5, "largest": [["a\x1b[2J\nb", 5]]}


@pytest.mark.parametrize("record", [{}, {"working_folder": FILES}])
def test_a_record_that_is_not_valid_is_no_record(tmp_path, record):
    folder = record_of(tmp_path, record)
    assert list(describe.written_lines(folder)) == []
    assert describe.written_data(folder) is None


def test_checkpoints_are_listed_where_they_are_all_that_a_run_wrote(tmp_path):
    last = {"folder": "/c", "count": 1, "bytes": 61, "largest": [["last.pt", 61]]}
    record = {"working_folder": NONE, "output": NONE, "checkpoints": last}
    run = record_of(tmp_path, record)
    assert list(describe.written_lines(run)) == [
        "in checkpoints: 1 file, 61 B",
        "      61 B  last.pt",
    ]
    assert describe.written_data(run)["checkpoints"]["largest"] == [
        {"path": "last.pt", "bytes": 61}
    ]
    run = record_of(tmp_path, record | {"output": last})
    assert [line[:5] for line in describe.written_lines(run) if line[0] == "i"] == [
        "in ou",
        "in ch",
    ]
    assert describe.files_line(run) == "1 file, 61 B, in /c; 1 file, 61 B, in c"
    last_of_all = {"working_folder": {**last, "folder": "/w/source"}, "output": NONE}
    assert describe.files_line(record_of(tmp_path, record | last_of_all)) == (
        "1 file, 61 B, in /c; 1 file, 61 B, in /w/source"
    )
    run = record_of(tmp_path, record | {"checkpoints": NONE})
    assert list(describe.written_lines(run)) == ["in output: none"]


def test_names_of_files_are_printed_without_control_characters(tmp_path):
    record = {"working_folder": FILES, "output": FILES, "outputs": ["a"]}
    assert list(describe.written_lines(record_of(tmp_path, record))) == [
        "in output: 1 file, 5 B",
        "       5 B  'a\\x1b[2J\\nb'",
        "in the working folder, /w: 1 file, 5 B",
        "       5 B  'a\\x1b[2J\\nb'",
    ]


def record_of(tmp_path, record):
    """A run with this record."""
    paths.make_folder(tmp_path / "exit_records")
    whole = {"checkpoints": NONE, "outputs": [], **record}
    (tmp_path / "exit_records/written.json").write_text(json.dumps(whole))
    return registry.Run(
        "one", "one", "local", os.uname().nodename, str(tmp_path), "", "", None, 0, ""
    )
