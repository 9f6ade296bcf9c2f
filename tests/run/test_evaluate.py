"""`deploykit evaluate` and `submit --init-from`: judge a trained model, and train it further."""

from __future__ import annotations

import json
from pathlib import Path

import boto3
import pytest
import torch
import yaml
from safetensors.torch import load_file

import deploykit
from deploykit.cli import main as cli
from deploykit.observe import evaluation
from deploykit.run import evaluation as run_evaluation
from deploykit.run import registry
from tests.aws_server import SECTION
from tests.run.test_export import TASK, run
from trainer.checkpoint import checkpointer

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("evaluate")]

ROOT = Path(__file__).parents[2]
QUICK = ("--epochs", "2", "--no-tensorboard", "--lr", "0.02")
OWN_TRAIN = """\
import json, os
given = os.environ.get("DEPLOYKIT_DATA_INIT_FROM")
start = json.load(open(given))["a"] if given else 0.0
with open(os.path.join(os.environ["DEPLOYKIT_CHECKPOINT_DIR"], "last.pt"), "w") as file:
    json.dump({"a": start + 1}, file)
print("started from", start)
"""
OWN_EVALUATE = """\
import json, os, sys
model = json.load(open(os.environ["DEPLOYKIT_DATA_EVALUATED"]))
worst = [{"index": 3, "loss": 0.5}]
result = {"error": model["a"], "worst": worst, "arguments": sys.argv[1:]}
with open(os.path.join(os.environ["DEPLOYKIT_OUTPUT_DIR"], "evaluation.json"), "w") as file:
    json.dump(result, file)
"""
PLAIN = ("--set", "entrypoint.launcher=python")
"""Without torchrun, which would import torch."""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A state folder with a sharded run of the digits on two ranks, and a project."""
    folder = tmp_path_factory.mktemp("evaluated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPLOYKIT_HOME", str(folder / "state"))
        project = folder / "project"
        project.mkdir()
        run(project, "init", "--trainer")
        two = ("--processes-per-node", 2, "--wait", "--", "--task", "digits")
        run(project, "submit", "--run", "digits", *two, "--strategy", "fsdp", *QUICK)
    return folder / "state"


@pytest.fixture
def place(home, tmp_path, monkeypatch):
    """The project, and the runs."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(home))
    monkeypatch.chdir(home.parent / "project")
    return home.parent / "project"


def result_of(home, name):
    return json.loads((home / "runs" / name / "output/evaluation.json").read_text())


def test_an_evaluation_is_a_run_of_its_own_on_any_number_of_ranks(place, home, tmp_path):
    shown = run(place, "evaluate", "digits", "--run", "two", "--wait")
    assert "two: evaluating step-00000034 of digits" in shown
    assert "evaluation.json: test accuracy " in shown
    two = result_of(home, "two")
    lines = (home / "runs/digits/output/metrics.jsonl").read_text().splitlines()
    assert two["accuracy"] == pytest.approx(json.loads(lines[-1])["test_accuracy"])
    assert (two["step"], two["split"], two["evaluated"]) == (34, "test", 360)
    words = ("--checkpoint", 17, "--split", "validation", "--wait")
    run(
        place,
        "evaluate",
        "digits",
        "--run",
        "one",
        *words,
        "--set",
        "resources.processes_per_node=1",
    )
    one = result_of(home, "one")
    assert (one["step"], one["split"]) == (17, "validation")

    job = registry.get("two").job_data()
    assert job["data"]["evaluated"].endswith("/digits/checkpoints/step-00000034")
    assert job["resources"]["processes_per_node"] == 2
    assert run_evaluation.parent(registry.get("two")) == ("digits", "step-00000034")
    assert [each.run for each in run_evaluation.of(registry.get("digits"))] == ["one", "two"]

    page = tmp_path / "page.html"
    run(place, "report", "digits", "--output", page)
    text = page.read_text()
    for title in ("Confusion matrix", "Calibration", "Worst samples", "Reliability", "Classes"):
        assert title in text, title
    assert "Run one: 360 samples of the validation data" in text
    run(place, "report", "two", "one", "--output", page, "--force")
    assert page.read_text().count("Confusion matrix") == 2
    metrics = json.loads(run(place, "compare", "two", "one", "--json"))["metrics"]
    assert {"test_accuracy", "val_accuracy", "test_ece"} <= {each["name"] for each in metrics}
    (row,) = json.loads(
        run(place, "compare", "digits", "two", "--json", "--name", "evaluation acc*")
    )["metrics"]
    assert row["last"] == {"digits": pytest.approx(one["accuracy"])}


def test_a_dry_run_sends_nothing(place, home):
    shown = run(place, "evaluate", "digits", "--dry-run", "--split", "test")
    assert "deploykit_evaluate.py --split test" in shown
    assert "DEPLOYKIT_DATA_EVALUATED=" in shown
    shown = run(
        place, "evaluate", "digits", "--dry-run", "-b", "slurm", "--set", "resources.time_limit=5m"
    )
    assert "#SBATCH" in shown
    assert f"{home}/runs/digits/checkpoints/step-00000034" in shown


@pytest.mark.slow
@pytest.mark.nightly
def test_a_task_of_ones_own_by_a_column(place, home):
    (place / "task.py").write_text(
        TASK.format(folder=str(home.parent)).replace(
            "    return Task(network, training=TensorDataset(corners, labels))",
            "    data = TensorDataset(corners, labels)\n"
            "    data.side = ['left' if x < 0 else 'right' for x, _ in corners.tolist()]\n"
            "    return Task(network, training=data, test=data)",
        )
    )
    torch.save(torch.rand(65, 2) * 2 - 1, home.parent / "corners.pt")
    run(
        place,
        "submit",
        "--run",
        "own",
        "--processes-per-node",
        1,
        "--wait",
        "--",
        "--strategy",
        "single",
        *QUICK,
    )
    run(place, "evaluate", "own", "--run", "sides", "--slice-by", "side", "--wait")
    result = result_of(home, "sides")
    values = result["slices"]["values"]
    assert [one["value"] for one in values] == ["left", "right"]
    assert sum(one["evaluated"] for one in values) == result["evaluated"] == 65
    shown = run(
        place, "evaluate", "own", "--run", "none", "--split", "validation", "--wait", code=1
    )
    assert (
        "evaluate.py: error: the task has no validation data; choose --split test or training"
        in shown
    )


@pytest.fixture
def own(home, tmp_path, monkeypatch):
    """A project with a script of one's own, and its run."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(home))
    folder = tmp_path / "own project"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "train.py").write_text(OWN_TRAIN)
    if "mine" not in registry.lookup("mine"):
        run(folder, "submit", "train.py", "--run", "mine", *PLAIN, "--wait")
    return folder


def test_a_script_of_ones_own(own, home):
    shown = run(own, "evaluate", "mine", code=66)
    assert "error: the source of mine has no evaluate.py to evaluate last.pt" in shown
    assert "DEPLOYKIT_DATA_EVALUATED" in shown
    (own / "evaluate.py").write_text(OWN_EVALUATE)
    words = ("--script", "evaluate.py", "--dry-run")
    shown = run(own, "evaluate", "mine", *words, "--split", "test", code=64)
    assert "error: evaluate.py does not read --split\n  let it parse --split, or pass" in shown
    shown = run(own, "evaluate", "mine", *words, "--set", "data.x=./mine", code=65)
    assert f"data.x: {own / 'mine'} was not found" in shown
    shown = run(
        own,
        "evaluate",
        "mine",
        "--run",
        "by-hand",
        "--script",
        "evaluate.py",
        "--wait",
        "--",
        "--more",
    )
    assert "  error 1\n" in shown
    assert result_of(home, "by-hand")["arguments"] == ["--more"]
    found = run_evaluation.newest(registry.get("mine"))
    assert found[0].run == "by-hand"
    assert found[1].numbers == {"error": 1.0}
    shown = run(
        own,
        "submit",
        "train.py",
        "--run",
        "further",
        "--init-from",
        "mine",
        *PLAIN,
        "--wait",
    )
    assert "started from 1.0" in shown
    (own / "train.py").write_text("print('hello')\n")
    shown = run(own, "submit", "train.py", "--init-from", "mine", code=64)
    assert (
        "train.py cannot start from a model: no Python file of its source reads DEPLOYKIT_DATA_"
        in shown
    )
    assert 'parser.add_argument("--init-from", default=os.environ.get(' in shown


def test_a_run_starts_from_the_weights_of_another(place, home):
    """From its sharded checkpoint, and from its package: without a step, both are unchanged."""
    run(place, "export", "digits", "--to", home.parent / "package")
    expected = load_file(home.parent / "package/model.safetensors")
    for name, model in (("from-run", "digits"), ("from-package", home.parent / "package")):
        words = (
            "--processes-per-node",
            1,
            "--wait",
            "--",
            "--task",
            "digits",
            "--strategy",
            "single",
        )
        options = ("--lr", "0", "--steps", "1", "--no-tensorboard")
        run(place, "submit", "--run", name, "--init-from", model, *words, *options)
        weights = checkpointer.latest_weights(home / "runs" / name / "checkpoints")
        changed = [key for key in expected if not weights[key].equal(expected[key])]
        assert all("running" in key or "num_batches" in key for key in changed), changed
        assert registry.get(name).job_data()["data"]["init_from"].startswith(str(home.parent))


def test_what_cannot_be_started_from_is_a_sentence(place, home, capsys):
    def error(*words):
        capsys.readouterr()
        code = cli.main([*words, "--json"])
        return code, json.loads(capsys.readouterr().out)["error"]["message"]

    assert error("submit", "--init-from", "no/where") == (66, "--init-from no/where not found")
    assert error("submit", "--init-from", "nothing") == (66, "no run matches 'nothing'")
    assert error("evaluate", "nothing") == (66, "no run matches 'nothing'")
    assert error("evaluate", "digits", "--script", "none.py") == (66, "none.py not found")
    code, message = error("evaluate", "digits", "--checkpoint", "5")
    assert (code, message) == (66, "digits has no checkpoint 5")
    code, message = error("evaluate", "digits", "--run", "digits")
    assert code == 64
    assert message.startswith("the run id digits belongs to a different job")
    assert run_evaluation.parent(registry.get("digits")) is None
    host = ("-b", "slurm", "--set", "slurm.host=login", "--set", "slurm.folder=/shared/deploykit")
    limit = ("--set", "resources.time_limit=5m")
    code, message = error("evaluate", "digits", *host, *limit, "--dry-run")
    assert code == 64
    assert message.startswith("the nodes of login cannot read ")


@pytest.mark.nightly
def test_from_python(place, home):
    again = deploykit.get("digits").evaluate(split="training", checkpoint="best", run="training")
    again.wait()
    assert result_of(home, "training")["evaluated"] == 1077
    plan = deploykit.plan(init_from="digits", run="planned")
    assert f"DEPLOYKIT_DATA_INIT_FROM={home}/runs/digits/checkpoints/step-00000034" in plan.text


@pytest.mark.aws
@pytest.mark.slow
def test_on_sagemaker_the_checkpoint_is_a_channel(place, home, aws):
    """From S3 it is read where it is; from here it is uploaded; to this machine it is staged."""
    section = yaml.safe_load(SECTION)["sagemaker"]
    job = {
        "name": "cloud",
        "entrypoint": {"script": "train.py", "args": ["--task", "digits"]},
        "resources": {"time_limit": "1h"},
        "checkpoints": f"s3://{section['bucket']}/checkpoints",
        "sagemaker": section,
    }
    Path("cloud.yaml").write_text(json.dumps(job))
    run(place, "submit", "cloud.yaml", "--backend", "sagemaker", "--run", "cloud")
    client = boto3.client("s3", "us-east-1")
    for path in (home / "runs/digits/checkpoints").glob("*/*"):
        key = f"checkpoints/{path.parent.name}/{path.name}"
        client.put_object(Bucket=section["bucket"], Key=key, Body=path.read_bytes())

    def channels(*words):
        shown = run(place, *words, "--dry-run", "--json")
        plan, _ = json.JSONDecoder().raw_decode(shown[shown.index("{") :])
        request = json.loads(plan["text"])
        return {
            each["ChannelName"]: each["DataSource"]["S3DataSource"]["S3Uri"]
            for each in request["InputDataConfig"]
        }, request

    where = f"s3://{section['bucket']}/checkpoints/step-00000034"
    found, request = channels("evaluate", "cloud")
    assert found["evaluated"].rstrip("/") == where
    assert request["Environment"]["DEPLOYKIT_DATA_EVALUATED"] == "/opt/ml/input/data/evaluated"
    found, request = channels("submit", "cloud.yaml", "-b", "sagemaker", "--init-from", "cloud")
    assert found["init_from"].rstrip("/") == where
    found, _ = channels("submit", "cloud.yaml", "-b", "sagemaker", "--init-from", "digits")
    assert found["init_from"].startswith(f"s3://{section['bucket']}/")
    shown = run(place, "evaluate", "cloud", "-b", "local", "--dry-run")
    assert "each node copies" in shown
    assert where in shown


def test_an_evaluation_from_elsewhere_is_shown_as_far_as_it_is_valid():
    found = evaluation.of(
        {
            "accuracy": 0.5,
            "nan": float("nan"),
            "flag": True,
            "huge": 10**400,
            "step": 10**400,
            "confusion": [[1, 2], "x"],
            "calibration": {"ece": "high", "bins": 3},
            "worst": [{"index": 1, "loss": None}],
            "slices": None,
        }
    )
    assert found.numbers == {"accuracy": 0.5}
    assert [table.title for table in found.tables] == ["Confusion matrix", "Worst samples"]
    assert found.problems == ["evaluation.json: calibration has an unexpected format (TypeError)"]
