"""`rerun`: the job and the source that a run sent, whatever the folder holds now."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from deploykit.backends import base as backend
from deploykit.bundle import archive as bundle
from deploykit.cli import main as cli
from deploykit.job.decode import as_data, decode
from deploykit.job.model import Handle, State, Status
from deploykit.lib import paths
from deploykit.run import lifecycle, registry
from tests.aws_server import SECTION
from tests.backends.slurm.plans import CASES


@pytest.fixture
def sent(monkeypatch):
    """The plans that were sent; nothing is started."""
    plans = []

    def submit(plan, folder):
        bundle.store(plan.bundle)
        plans.append(plan)
        return Handle("local", plan.target, plan.run, plan.run, str(folder))

    monkeypatch.setattr("deploykit.backends.local.submit", submit)
    return plans


def test_the_same_job_and_source_are_sent_again(project, sent, capsys):
    first = ["--run", "first", "--set", "resources.nodes=2", "--preflight"]
    assert cli.main(["submit", *first, "--", "--lr", "a b\té😀\x7f", ""]) == 0
    (project / "train.py").write_text("changed")
    (project / "job.yaml").write_text("changed")
    capsys.readouterr()
    assert cli.main(["rerun", "first", "--json"]) == 0
    out, err = capsys.readouterr()
    old, new = sent
    assert json.loads(out)["run"] == new.run
    assert "rerun of first, which was submitted at 20" in err
    assert new.run.startswith("hello-")
    assert new.bundle.hash == old.bundle.hash
    assert new.text.replace(new.run, "first") == old.text
    assert as_data(new.job) == {**as_data(old.job), "source": new.job.source}
    assert not Path(new.job.source).exists()


def test_keys_and_arguments_can_differ(project, sent):
    assert cli.main(["submit", "--run", "first"]) == 0
    changes = ["--set", "resources.time_limit=90s", "--run", "second"]
    assert cli.main(["rerun", "first", *changes, "--", "--lr", "0.1"]) == 0
    job = sent[1].job
    assert sent[1].run == "second"
    assert job.entrypoint.args == ("--epochs", "5", "--lr", "0.1")
    assert job.resources.time_limit == 90
    assert cli.main(["rerun", "second", "--run", "third", "--", "--x"]) == 0
    assert sent[2].job.entrypoint.args == ("--epochs", "5", "--lr", "0.1", "--x")


def test_a_run_can_be_sent_to_another_backend_with_its_arguments(project, sent, monkeypatch):
    monkeypatch.setattr(
        "deploykit.backends.slurm.submit",
        lambda plan, folder: (
            bundle.store(plan.bundle) and Handle("slurm", "c", "1", plan.run, str(folder))
        ),
    )
    assert cli.main(["submit", "--backend", "slurm", "--run", "first", "--", "--lr", "1"]) == 0
    assert cli.main(["rerun", "first", "--backend", "local", "--run", "second"]) == 0
    assert registry.known("second").backend == "local"
    assert sent[0].job.entrypoint.args == ("--epochs", "5", "--lr", "1")


def test_with_failed_a_run_that_has_not_failed_is_refused(project, sent, capsys):
    assert cli.main(["submit", "--run", "first"]) == 0
    registry.update("first", Status(State.SUCCEEDED))
    assert cli.main(["rerun", "first", "--failed"]) == 64
    assert "first has not failed (state: succeeded)" in capsys.readouterr().err
    registry.update("first", Status(State.FAILED, exit_code=1))
    assert cli.main(["rerun", "first", "--failed", "--run", "second"]) == 0
    assert [plan.run for plan in sent] == ["first", "second"]


def test_a_dry_run_of_it_sends_nothing(project, sent, capsys):
    assert cli.main(["submit", "--run", "first"]) == 0
    capsys.readouterr()
    assert cli.main(["rerun", "--run", "first", "--dry-run"]) == 0
    assert capsys.readouterr().out == (paths.run_folder("first") / "plan.sh").read_text()
    assert len(sent) == 1


def test_what_was_not_kept_is_said(project, sent, capsys):
    assert cli.main(["submit", "--run", "first"]) == 0
    (archive,) = paths.bundles().glob("*.tar.gz")
    with tarfile.open(archive, "w:gz"):
        pass  # of its name, and of other content
    assert cli.main(["rerun", "first"]) == 66
    assert "the source of first is no longer in" in capsys.readouterr().err
    (paths.run_folder("first") / backend.JOB).unlink()
    assert cli.main(["rerun", "first"]) == 66
    assert "first has no record of its job" in capsys.readouterr().err
    assert len(sent) == 1
    assert [row.run for row in registry.every()] == ["first"]


@pytest.mark.parametrize("name", CASES)
def test_a_job_and_its_options_decode_to_the_same_again(name):
    for value in CASES[name]:
        data = json.loads(json.dumps(as_data(value)))
        assert decode(type(value), data) == (value, [])


def test_options_of_sagemaker_decode_to_the_same_again(project):
    with (project / "job.yaml").open("a") as file:
        file.write(f"{SECTION}  max_wait: 2h\n  volume_size: 30\n")
    file = lifecycle.load(Path("job.yaml"), [], ["sagemaker"])
    options = file.sections["sagemaker"]
    assert decode(type(options), as_data(options), "sagemaker") == (options, [])
    assert as_data(options)["max_wait"] == "7200s"


def test_a_run_without_a_time_limit_can_be_sent_again(project, sent):
    (project / "job.yaml").write_text("name: hello\nentrypoint: {script: train.py}\n")
    assert cli.main(["submit", "--run", "first"]) == 0
    assert cli.main(["rerun", "first", "--run", "second"]) == 0
    assert [plan.job.resources.time_limit for plan in sent] == [0, 0]


def test_a_default_of_the_user_does_not_change_an_earlier_run(project, monkeypatch):
    sent = []
    monkeypatch.setattr(
        "deploykit.backends.slurm.submit",
        lambda plan, folder: sent.append(plan) or Handle("slurm", "c", "1", plan.run, str(folder)),
    )
    assert cli.main(["submit", "--backend", "slurm", "--run", "first"]) == 0
    bundle.store(sent[0].bundle)
    file = paths.config()
    file.parent.mkdir(parents=True, mode=0o700)
    file.write_text('[slurm]\npartition = "gpu"\n')
    assert cli.main(["rerun", "first", "--run", "second"]) == 0
    assert "--partition" not in sent[1].text
    assert cli.main(["submit", "--backend", "slurm", "--run", "third"]) == 0
    assert "--partition=gpu" in sent[2].text


def test_what_it_may_cost_is_said_before_it_is_sent(project, sent, capsys):
    assert cli.main(["submit", "--run", "one", "--set", "local.price=2.50 USD"]) == 0
    capsys.readouterr()
    assert cli.main(["rerun", "one"]) == 0
    assert len(sent) == 2
    assert "cost: at most " in capsys.readouterr().err


def test_a_run_of_a_newer_deploykit_says_so(project, sent, capsys):
    """Its job has keys that this one does not know; a wrong key of the command line is none."""
    assert cli.main(["submit", "--run", "first"]) == 0
    assert cli.main(["rerun", "first", "--dry-run", "--set", "resources.new_key=1"]) == 65
    assert "a newer deploykit" not in capsys.readouterr().err
    path = paths.run_folder("first") / "job.json"
    job = json.loads(path.read_text())
    job["resources"]["new_key"] = 1
    path.write_text(json.dumps(job))
    for verb in ("rerun", "reproduce"):
        assert cli.main([verb, "first", "--dry-run"]) == 65
        err = capsys.readouterr().err
        assert "error: first was created by a newer deploykit than this one" in err
        assert "resources.new_key: unknown key" in err
        assert "pip install -U deploykit" in err
