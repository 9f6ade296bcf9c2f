"""examples/adapters, the whole way: train, evaluate, register, deploy, ask, train further."""

from __future__ import annotations

import json
import os
import shutil
import subprocess

import pytest

from tests.frameworks.people import PYTHON, ROOT

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("frameworks"),
]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """The example, in which to run commands by the Python with TRL and PEFT."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return shutil.copytree(ROOT / "examples/adapters", tmp_path / "adapters")


def run(project, *words):
    argv = [str(PYTHON), "-m", "deploykit", *map(str, words)]
    done = subprocess.run(argv, cwd=project, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


LARGER = [(10, 3), (10, 5), (11, 4), (12, 6), (2, 10), (7, 12), (11, 8), (12, 12)]
"""Sums of numbers that no training saw."""


def evaluated(project, name, *words, ending="eval"):
    """The results of an evaluation of a run."""
    run(project, "evaluate", name, "--run", f"{name}-{ending}", "--wait", *words)
    path = f"{os.environ['DEPLOYKIT_HOME']}/runs/{name}-{ending}/output/evaluation.json"
    with open(path) as file:  # noqa: PTH123
        return json.load(file)


def collected(project, name, corrections):
    """Serve a run, ask it the prompts, and answer collect.py as a person would."""
    argv = [str(PYTHON), "-m", "deploykit", "deploy", name, "--port", "0", "--json"]
    with subprocess.Popen(argv, cwd=project, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = json.loads(server.stdout.readline())["url"]
            typed = "".join(f"{answer}\n" for answer in corrections.values())
            asked = [str(PYTHON), "collect.py", url, *corrections]
            subprocess.run(asked, cwd=project, input=typed, text=True, check=True)
        finally:
            server.terminate()
    with (project / "answers.jsonl").open() as file:
        return [json.loads(line) for line in file]


def test_the_whole_way(project):
    limit = ("--set", "resources.time_limit=1h")
    run(project, "submit", "--run", "sums", "--wait", *limit)
    before = evaluated(project, "sums")
    assert (before["evaluated"], len(before["worst"])) == (20, 10)
    assert before["accuracy"] >= 0.7  # by chance: about 1 in 10
    assert before["perplexity"] < 1.5  # about 257 before training

    run(project, "export", "sums", "--to", "package")
    register = ("register", "package", "-b", "sagemaker", "--dry-run", "--json")
    sent = run(project, *register)
    assert "CreateModelPackage" in sent
    assert '"evaluation accuracy"' in sent.replace("\\", "")

    # the server answers as the evaluation did: Enter accepts an answer
    predicted = {row["prompt"]: row["predicted"] for row in before["worst"]}
    answers = collected(project, "package", dict.fromkeys(predicted, ""))
    assert {row["prompt"]: row["completion"].strip() for row in answers} == predicted
    (project / "answers.jsonl").unlink()
    collected(project, "package", {f"{one} plus {two} is": one + two for one, two in LARGER})

    data = ("--set", f"data.answers={project}/answers.jsonl")
    asked = evaluated(project, "sums", *data, ending="answers")
    assert asked["accuracy"] == before["accuracy"]
    assert asked["answers_accuracy"] <= 0.5
    run(project, "submit", "--run", "further", "--init-from", "package", *data, "--wait", *limit)
    after = evaluated(project, "further")
    assert after["answers_accuracy"] >= 0.8
    assert after["accuracy"] >= before["accuracy"] - 0.16  # 3 of 20
    compared = json.loads(run(project, "compare", "sums", "further", "--json"))
    assert "evaluation answers_accuracy" in {row["name"] for row in compared["metrics"]}
