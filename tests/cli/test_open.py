"""`deploykit open`: the pages of a run, printed, and opened where there is a desktop."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.backends import sagemaker
from deploykit.cli import main as cli
from deploykit.job.model import Handle
from deploykit.run import registry

ROOT = Path(__file__).parents[2]
CONSOLE = "https://eu-west-1.console.aws.amazon.com"
PAGES = {
    "console": f"{CONSOLE}/sagemaker/home?region=eu-west-1#/jobs/exp-1",
    "logs": f"{CONSOLE}/cloudwatch/home?region=eu-west-1#logsV2:log-groups/log-group/"
    "$252Faws$252Fsagemaker$252FTrainingJobs$3FlogStreamNameFilter$3Dexp-1$252F",
    "mlflow": "https://mlflow.example/#/experiments/7/runs/abc",
    "wandb": "https://wandb.ai/team/digits/runs/exp-1",
}


@pytest.fixture
def run(project, tmp_path):
    """A training job that two of its trackers have been sent something of."""
    folder = tmp_path / "runs/exp-1"
    folder.mkdir(parents=True)
    track = {"mlflow": "https://mlflow.example", "wandb": "team/digits", "trackio": "digits"}
    (folder / "job.json").write_text(json.dumps({"name": "exp", "track": track}))
    sent = {"mlflow": {"experiment": "7", "id": "abc"}, "wandb": {"url": PAGES["wandb"]}}
    (folder / "tracking.json").write_text(json.dumps(sent))
    registry.add(
        registry.Run(
            "exp-1",
            "exp",
            "sagemaker",
            "eu-west-1",
            str(folder),
            "a",
            "b",
            "c",
            1.0,
            "s3://b",
            "exp-1",
        )
    )
    return project


def shown(capsys, *words):
    assert cli.main(["open", "exp-1", *words, "--json"]) == 0
    return {one["page"]: one["address"] for one in json.loads(capsys.readouterr().out)}


def test_the_console_the_log_the_trackers_and_the_report(run, capsys):
    assert shown(capsys) == PAGES
    report = run / "report-exp-1.html"
    report.touch()
    assert shown(capsys) == {**PAGES, "report": report.as_uri()}
    assert shown(capsys, "--only", "logs") == {"logs": PAGES["logs"]}
    assert cli.main(["open", "exp-1", "--only", "log"]) == 64
    assert "did you mean 'logs'?" in capsys.readouterr().err


@pytest.mark.parametrize("desktop", [True, False])
def test_a_desktop_opens_them(run, tmp_path, desktop):
    opened = tmp_path / "opened"
    browser = tmp_path / "browser"
    browser.write_text(f"#!/bin/sh\necho \"$1\" >> '{opened}'\n")
    browser.chmod(0o700)
    display = {"DISPLAY": ":0"} if desktop else {}
    kept = {name: value for name, value in os.environ.items() if "DISPLAY" not in name}
    done = subprocess.run(
        [sys.executable, "-m", "deploykit", "open", "exp-1"],
        env={**kept, "PYTHONPATH": str(ROOT), "BROWSER": f"{browser} %s", **display},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "".join(f"{name:<7}  {address}\n" for name, address in PAGES.items())
    assert opened.exists() == desktop
    if desktop:
        assert opened.read_text().split() == list(PAGES.values())


@pytest.mark.parametrize(
    ("region", "host"),
    [
        ("cn-north-1", "cn-north-1.console.amazonaws.cn"),
        ("us-gov-west-1", "us-gov-west-1.console.amazonaws-us-gov.com"),
        ("us-iso-east-1", None),
    ],
)
def test_the_console_of_other_partitions(region, host):
    pages = sagemaker.pages(Handle("sagemaker", region, "one", "one", "/none"))
    assert [address.split("/")[2] for address in pages.values()] == ([host] * 2 if host else [])


def test_a_run_without_pages_names_what_writes_one(project, capsys, tmp_path):
    registry.add(
        registry.Run("two", "two", "local", "", str(tmp_path), "a", "b", "c", 1.0, "two", "two")
    )
    assert cli.main(["open", "two"]) == 0
    assert capsys.readouterr().err == "two has no pages; `deploykit report two` writes one\n"
