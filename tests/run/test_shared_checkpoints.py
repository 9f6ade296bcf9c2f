"""Two unfinished runs with the same `checkpoints`: `check` and `submit` name the other one."""

from __future__ import annotations

import json

import pytest

from deploykit.cli import main as cli
from deploykit.lib import paths
from deploykit.run import registry
from tests.aws_server import SECTION

_SAID = "warning: checkpoints: are also used by live-run (state: "


@pytest.fixture
def shared(live, project):
    """The folder of a live run's checkpoints, which another job names as well."""
    folder = project / "saved"
    (live.folder / "job.json").write_text(json.dumps({"checkpoints": str(folder)}))
    return folder


def shown(capsys, *words, code=0):
    capsys.readouterr()
    assert cli.main(list(words)) == code
    return capsys.readouterr().err


@pytest.mark.parametrize("verb", [["check"], ["submit", "--dry-run"]])
def test_the_other_run_is_named(verb, shared, live, capsys):
    for location in ("saved", "./saved/", str(shared)):
        err = shown(capsys, *verb, "--set", f"checkpoints={location}")
        assert _SAID in err
        assert "each run would delete the other's checkpoints" in err
    assert _SAID not in shown(capsys, *verb, "--set", "checkpoints=elsewhere")
    assert _SAID not in shown(capsys, *verb)
    assert "live-run" in shown(capsys, *verb, "--strict", "--set", "checkpoints=saved", code=65)


def test_a_link_to_the_folder_is_the_folder(shared, tmp_path, capsys):
    link = tmp_path / "link"
    link.symlink_to(shared)
    assert _SAID in shown(capsys, "check", "--set", f"checkpoints={link}")


def test_an_address_is_compared_as_text(live, project, capsys):
    (live.folder / "job.json").write_text('{"checkpoints": "s3://bucket/saved/"}')
    with (project / "job.yaml").open("a") as file:
        file.write(SECTION)
    words = ["check", "--backend", "sagemaker", "--set"]
    assert _SAID in shown(capsys, *words, "checkpoints=s3://bucket/saved")
    assert _SAID not in shown(capsys, *words, "checkpoints=s3://bucket/saved/more")


def test_submit_asks_whether_the_other_has_ended_meanwhile(shared, live, capsys, monkeypatch):
    """It is unfinished only as far as this machine knew."""
    monkeypatch.setattr("deploykit.run.lifecycle._send", lambda plan, folder: None)
    words = ["submit", "--backend", "local", "--set", "checkpoints=saved"]
    assert _SAID in shown(capsys, *words, "--run", "first")
    registry.remove("first")
    live.end()
    assert registry.get("live-run").state == "running"
    assert _SAID not in shown(capsys, *words, "--run", "second")
    registry.remove("second")
    assert not paths.run_folder("second").joinpath("claim").exists()


def test_a_run_that_is_sent_again_does_not_warn_of_itself(shared, live, capsys):
    words = ["submit", "--dry-run", "--run", "live-run", "--set", "checkpoints=saved"]
    assert _SAID not in shown(capsys, *words)
