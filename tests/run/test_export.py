"""`deploykit export` and `deploykit deploy`: from a trained model to answers over HTTP."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
from pathlib import Path

import boto3
import pytest
import torch
import yaml

import deploykit
import evaluate
from deploykit.cli import main as cli
from deploykit.job.model import State, Status
from deploykit.lib.errors import NotFound, UsageError
from deploykit.run import export, registry
from tests.aws_server import SECTION

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("export")]

ROOT = Path(__file__).parents[2]
TASK = """\
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import TensorDataset
from trainer.task import Task

DATA = Path({folder!r})

def network():
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))

def task(options):
    corners = torch.load(DATA / "corners.pt")
    labels = (corners.norm(dim=1) < 0.8).long()
    return Task(network, training=TensorDataset(corners, labels))

if (DATA / "alone").exists():
    def build_model(options):
        return network()
"""


def run(folder, *words, code=0):
    """A command in a process of its own; what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "deploykit", *map(str, words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A state folder with a run of the digits on two ranks, sharded, and one of a task."""
    folder = tmp_path_factory.mktemp("models")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEPLOYKIT_HOME", str(folder / "state"))
        digits = folder / "digits"
        digits.mkdir()
        run(digits, "init", "--trainer")
        options = ("--epochs", "2", "--no-tensorboard", "--lr", "0.02")
        two = ("--processes-per-node", 2, "--wait", "--")
        run(
            digits,
            "submit",
            "--run",
            "digits",
            *two,
            "--task",
            "digits",
            "--strategy",
            "fsdp",
            *options,
        )
        (digits / "task.py").write_text(TASK.format(folder=str(folder)))
        torch.save(torch.rand(64, 2) * 2 - 1, folder / "corners.pt")
        one = ("--processes-per-node", 1, "--wait", "--")
        run(digits, "submit", "--run", "own", *one, "--strategy", "single", *options)
        shown = run(folder, "export", "digits", "--to", "model")
    assert shown.startswith("model: step-00000034 of digits, loaded once to check it\n")
    return folder / "state"


@pytest.fixture(scope="module")
def model(home):
    """The package of the run of the digits."""
    return home.parent / "model"


@pytest.fixture
def place(home, tmp_path, monkeypatch):
    """An empty folder, and the runs."""
    monkeypatch.setenv("DEPLOYKIT_HOME", str(home))
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@contextlib.contextmanager
def served(model, *options):
    """The URL of a server of a model, which must end with 0 after SIGTERM."""
    argv = [sys.executable, "-m", "deploykit", "deploy", str(model), "--port", "0", "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen([*argv, *options], env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            yield json.loads(server.stdout.readline())["url"]
        finally:
            server.terminate()
    assert server.returncode == 0


def ask(url, body):
    """The outputs of a request by the standard library."""
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/invocations", body, headers)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["outputs"]


def test_a_served_model_answers_what_the_trained_one_computes(place, home, model):
    """Train on two ranks, export, deploy, ask by two clients, stop."""
    test, trained, _ = evaluate.trained_model(home / "runs/digits/checkpoints")
    images = test.tensors[0][:5]
    expected = trained(images).detach()
    with served(model, "--replicas", "2") as url:
        body = json.dumps({"inputs": images.tolist()}).encode()
        torch.testing.assert_close(torch.tensor(ask(url, body)), expected)
        client = boto3.client(
            "sagemaker-runtime",
            endpoint_url=url,
            region_name="us-east-1",
            aws_access_key_id="a",
            aws_secret_access_key="b",
        )
        wrong = json.dumps({"inputs": [[1, 2]]})
        with pytest.raises(client.exceptions.ClientError, match="400"):
            client.invoke_endpoint(EndpointName="x", Body=wrong, ContentType="application/json")
        answer = client.invoke_endpoint(EndpointName="x", Body=body, ContentType="application/json")
        torch.testing.assert_close(torch.tensor(json.load(answer["Body"])["outputs"]), expected)


def packaged(model):
    """The files of a package, without what Python writes beside its code when it is loaded."""
    files = (path for path in model.rglob("*") if path.is_file())
    return [path for path in files if path.parent.name != "__pycache__"]


def test_the_parts_of_a_package(model):
    manifest = json.loads((model / "manifest.json").read_text())
    files = {path.relative_to(model).as_posix() for path in packaged(model)}
    assert set(manifest["files"]) == files - {"manifest.json"}
    assert {
        "model.safetensors",
        "README.md",
        "code/inference.py",
        "code/trainer/models.py",
    } <= files
    for name, (size, digest) in manifest["files"].items():
        content = (model / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (size, digest)
    assert (manifest["run"], manifest["checkpoint"]) == ("digits", "step-00000034")
    card = (model / "README.md").read_text()
    assert "| run | `digits` on local, submitted " in card
    assert f"torch {torch.__version__}" in card
    assert "| test_accuracy | 0." in card
    assert (model / "code/requirements.txt").read_text() == "safetensors\n"


@pytest.mark.nightly
@pytest.mark.slow
def test_the_same_run_gives_the_same_archive(place, model):
    assert deploykit.get("digits").export("one.tar.gz") == "one.tar.gz"
    export.write_archive(model, place / "two.tar.gz")
    assert (place / "one.tar.gz").read_bytes() == (place / "two.tar.gz").read_bytes()
    with tarfile.open(place / "one.tar.gz") as archive:
        archive.extractall(place / "unpacked", filter="data")
    for path in packaged(model):
        unpacked = place / "unpacked" / path.relative_to(model)
        assert unpacked.read_bytes() == path.read_bytes()


def test_sagemakers_toolkit_loads_a_package_as_its_container_does(place, home, model):
    pytest.importorskip("sagemaker_inference", reason="optional: sagemaker-pytorch-inference")
    program = """\
import json, sys
from types import SimpleNamespace
from sagemaker_pytorch_serving_container.handler_service import HandlerService

class Request:
    def get_request_properties(self):
        return {"Content-Type": "application/json", "Accept": "application/json"}

class Context(SimpleNamespace):
    def set_response_content_type(self, _, kind):
        self.kind = kind
    def set_response_status(self, code, phrase, *_):
        self.status = code

context = Context(system_properties={"model_dir": sys.argv[1]}, request_processor=[Request()])
context.status = 200
service = HandlerService()
service.initialize(context)
body = sys.stdin.buffer.read()
(answer,) = service.handle([{"body": body}], context)
print(json.dumps([context.status, context.kind, json.loads(answer)]))
"""
    test, trained, _ = evaluate.trained_model(home / "runs/digits/checkpoints")
    images = test.tensors[0][:3]
    code = str(model / "code")
    done = subprocess.run(
        [sys.executable, "-c", program, str(model)],
        input=json.dumps({"inputs": images.tolist()}),
        env={**os.environ, "PYTHONPATH": f"{code}:{os.environ.get('PYTHONPATH', '')}"},
        cwd=place,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    status, kind, answer = json.loads(done.stdout.splitlines()[-1])
    assert (status, kind) == (200, "application/json")
    torch.testing.assert_close(torch.tensor(answer["outputs"]), trained(images).detach())


@pytest.mark.slow
def test_a_checkpoint_is_chosen_by_its_step_or_as_the_best(place):
    assert "step-00000017 (" in run(place, "export", "digits", "--checkpoint", 17, "--dry-run")
    best = run(place, "export", "digits", "--checkpoint", "best", "--dry-run", "--json")
    assert json.loads(best)["checkpoint"] in {"step-00000017", "step-00000034"}
    shown = run(place, "export", "digits", "--checkpoint", 5, code=66)
    assert shown == "error: digits has no checkpoint 5\n  checkpoints: 17, 34\n"
    assert "no best checkpoint" in run(place, "export", "own", "--checkpoint", "best", code=66)
    assert "expected `best` or a step" in run(
        place, "export", "digits", "--checkpoint", "x", code=64
    )
    assert list(place.iterdir()) == []


@pytest.mark.slow
def test_a_task_of_ones_own(place, home):
    run(place, "export", "own", "--to", "model")
    with served("model") as url:
        assert torch.tensor(ask(url, b"[[0.1, 0.2]]")).shape == (1, 2)


@pytest.mark.slow
def test_a_model_that_cannot_be_rebuilt_leaves_nothing(place, home):
    """Without the data, unless the task's module has a function for the model alone."""
    data, away = home.parent / "corners.pt", home.parent / "away.pt"
    data.rename(away)
    try:
        with pytest.raises(
            deploykit.errors.CannotPackage, match=r"cannot rebuild the model of .*corners"
        ):
            deploykit.get("own").export("model")
        assert list(place.iterdir()) == []
        (home.parent / "alone").touch()
        deploykit.get("own").export("model")
    finally:
        away.rename(data)
    assert json.loads((place / "model/model.json").read_text())["inputs"] is None


@pytest.mark.slow
def test_a_script_of_ones_own_with_the_inference_that_init_writes(place):
    run(place, "init")
    run(
        place,
        "submit",
        "--run",
        "script",
        "--processes-per-node",
        1,
        "--wait",
        "--",
        "--epochs",
        "1",
    )
    shown = run(place, "export", "script", "--to", "model", code=72)
    assert "script has no inference.py to load last.pt" in shown
    assert "deploykit init --inference" in shown
    assert not (place / "model").exists()
    run(place, "init", "--inference")
    run(place, "export", "script", "--to", "model", "--inference", "inference.py")
    with served("model") as url:
        inside, outside = ask(url, b'{"inputs": [[0, 0], [1, 1]]}')
    assert inside[1] > 0.5 > outside[1]
    run(place, "rm", "script")


WEIGHED = """\
import os, sys, time
from pathlib import Path
folder = Path(os.environ["DEPLOYKIT_CHECKPOINT_DIR"])
(folder / "weights.pt").write_text(sys.argv[1])
(folder / "log.txt").write_text("saved after the weights")
os.utime(folder / "log.txt", (time.time() + 9, time.time() + 9))
"""
SCALED = """\
import json
from pathlib import Path
def model_fn(folder): return float(Path(folder, "weights.pt").read_text())
def input_fn(body, content_type): return json.loads(body)["inputs"]
def predict_fn(inputs, model): return inputs * model * SCALE
def output_fn(prediction, accept): return json.dumps({"outputs": prediction})
"""


@pytest.fixture
def weighed(place):
    """The folder of the checkpoints of a script's run, and `inference.py` files for it."""
    for scale in (1, 10):
        (place / f"times{scale}.py").write_text(SCALED.replace("SCALE", str(scale)))
    (place / "train.py").write_text(WEIGHED)
    plain = ("--set", "entrypoint.launcher=python")
    run(place, "submit", "train.py", "--run", "weighed", *plain, "--wait", "--", 3)
    yield Path(registry.get("weighed").folder, "checkpoints")
    run(place, "rm", "weighed")


def test_a_log_beside_the_weights_is_not_the_checkpoint(weighed):
    assert export.choose(registry.get("weighed"), None).name == "weights.pt"
    (weighed / "weights.pt").unlink()
    assert export.choose(registry.get("weighed"), None).name == "log.txt"
    with pytest.raises(NotFound, match="weighed has no checkpoint 7") as caught:
        export.choose(registry.get("weighed"), "7")
    assert caught.value.hint == "no checkpoint has a step in its name; omit --checkpoint"


def test_of_collected_files_one_is_the_checkpoint(weighed):
    """As of two networks: the newest by default, and any of them by its name."""
    (weighed / "weights.pt").rename(weighed / "old.pt")
    (weighed / "working_folder/out").mkdir(parents=True)
    names = [f"working_folder/out/{name}_epoch_5.pth" for name in ("G", "D")]
    for later, name in enumerate(names, 20):
        (weighed / name).write_bytes(b"x")
        os.utime(weighed / name, (time.time() + later, time.time() + later))
    row = registry.get("weighed")
    assert export.choose(row, None).name == names[1]
    with pytest.raises(UsageError, match="--checkpoint 5: weighed has working_folder/out/D_e"):
        export.choose(row, "5")
    for name in (*names, "old.pt"):
        chosen = export.choose(row, name)
        assert (chosen.name, len(chosen.files)) == (name, 1)


def test_of_several_pretrained_folders_the_newest_is_chosen(weighed):
    """A folder in another one is a part of it; `checkpoint-5` is a step of a training."""
    output = weighed.parent / "output"
    names = ("checkpoint-5", "epoch-1", "epoch-3", "epoch-3/vision", "epoch-2")
    for seconds, name in enumerate(names):
        folder = output / name
        folder.mkdir(parents=True)
        for file in (folder / "config.json", folder / "model.safetensors"):
            file.write_text("{}")
            os.utime(file, (seconds, 99 if name == "checkpoint-5" else seconds))
    row = registry.get("weighed")
    assert export.choose(row, None).name == "epoch-2"
    assert export.choose(row, "5").name == "checkpoint-5"
    shutil.rmtree(output / "epoch-2")
    assert export.choose(row, None).name == "epoch-3"
    for name in ("epoch-1", "epoch-3"):
        shutil.rmtree(output / name)
    assert export.choose(row, None).name == "checkpoint-5"


def test_a_run_is_served_as_it_is_now(weighed):
    """And not from the package of an earlier deploy, if its checkpoint or `inference.py` differ."""

    def answer(inference):
        with served("weighed", "--inference", inference) as url:
            return ask(url, b'{"inputs": 2}')

    assert answer("times1.py") == 6
    assert answer("times10.py") == 60
    (weighed / "weights.pt").write_text("5")
    assert answer("times1.py") == 10
    with served("weighed") as url:  # its source has no inference.py: that of the last deploy
        assert ask(url, b'{"inputs": 2}') == 10
    assert len([*(weighed.parent / export.PACKAGES).glob("weights.pt-*")]) == 3


def test_two_deploys_of_a_run_at_once_make_one_package(weighed, monkeypatch):
    row, own = registry.get("weighed"), Path("times1.py")
    first, second = (
        export.in_run_folder(row, checkpoint=None, python=None, inference=own) for _ in range(2)
    )
    build = export._build

    def slower(*arguments):
        monkeypatch.setattr(export, "_build", build)
        first.write_once()
        build(*arguments)

    monkeypatch.setattr(export, "_build", slower)
    second.write_once()
    assert [*map(str, (weighed.parent / export.PACKAGES).glob("weights.pt-*"))] == [first.to]
    again = export.in_run_folder(row, checkpoint=None, python=None, inference=None)
    assert (again.to, again.inference.read_text()) == (first.to, own.read_text())


def test_an_inference_py_in_a_subfolder_has_its_neighbours(tmp_path):
    code = tmp_path / "package/code"
    for name in ("train.py", "inference.py", "network.py"):
        (code / "src").mkdir(parents=True, exist_ok=True)
        (code / "src" / name).write_text(name)
    (tmp_path / "job.json").write_text('{"entrypoint": {"script": "src/train.py"}}')
    row = registry.Run("a", "a", "local", "here", str(tmp_path), "", "", None, 1.0, "")
    chosen = export.Checkpoint("last.pt", "checkpoints", (), here=True, kind="own")
    export._write_inference(export.Export(row, chosen, "model", sys.executable), code.parent)
    assert (code / "inference.py").read_text() == "inference.py"
    assert (code / "network.py").read_text() == "network.py"


@pytest.mark.parametrize(
    ("config", "library"),
    [
        (None, "pytorch"),
        ('{"model_type": "llama"}', "transformers"),
        ('{"hidden": 32}', ""),
        ("[", ""),
    ],
)
def test_the_card_names_transformers_only_if_the_config_does(tmp_path, config, library):
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    assert export._library(tmp_path) == library


def test_the_card_names_the_source_of_staged_data(place, tmp_path):
    row = registry.get("digits")
    folder = shutil.copytree(row.folder, tmp_path / "copy")
    job = json.loads((folder / "job.json").read_text())
    job["data"] = {"train": {"path": "s3://my-bucket/train", "stage": "node"}}
    (folder / "job.json").write_text(json.dumps(job))
    copy = row._replace(folder=str(folder))
    chosen = export.Export(copy, export.choose(copy, None), "model", sys.executable)
    export._write_card(chosen, tmp_path, {})
    assert "| data, train | `s3://my-bucket/train` |" in (tmp_path / "README.md").read_text()


@pytest.mark.slow
def test_a_package_in_s3(place, aws):
    """`aws` is a moto server; the archive, the card and the manifest, once."""
    boto3.client("s3", "us-east-1").create_bucket(Bucket="models")
    run(place, "export", "digits", "--to", "s3://models/a/digits")
    listed = boto3.client("s3", "us-east-1").list_objects_v2(Bucket="models")["Contents"]
    names = {each["Key"] for each in listed}
    assert names == {f"a/digits/{name}" for name in ("model.tar.gz", "README.md", "manifest.json")}
    shown = run(place, "export", "digits", "--to", "s3://models/a/digits", code=64)
    assert "s3://models/a/digits already contains a package" in shown


@pytest.mark.slow
@pytest.mark.nightly
def test_a_checkpoint_in_s3_is_fetched_first(place, home, model, aws):
    """A run on SageMaker, whose checkpoint in S3 is that of the run here."""
    section = yaml.safe_load(SECTION)["sagemaker"]
    job = {
        "name": "cloud",
        "entrypoint": {"script": "train.py", "args": ["--task", "digits"]},
        "resources": {"time_limit": "1h"},
        "checkpoints": f"s3://{section['bucket']}/checkpoints",
        "sagemaker": section,
    }
    run(place, "init", "--trainer")
    (place / "job.yaml").write_text(json.dumps(job))
    run(place, "submit", "--backend", "sagemaker", "--run", "cloud")
    client = boto3.client("s3", "us-east-1")
    for path in (home / "runs/digits/checkpoints").glob("*/*"):
        key = f"checkpoints/{path.parent.name}/{path.name}"
        client.put_object(Bucket=section["bucket"], Key=key, Body=path.read_bytes())
    shown = run(place, "export", "cloud", "--dry-run")
    assert "would package step-00000034 (" in shown
    assert not (place / "cloud-model").exists()
    run(place, "export", "cloud")
    name = "model.safetensors"
    assert (place / "cloud-model" / name).read_bytes() == (model / name).read_bytes()
    run(place, "cancel", "cloud")


def test_what_cannot_be_packaged_is_a_sentence(place, project, capsys):
    """`project` has the test's own state folder again."""

    def error(*words):
        capsys.readouterr()
        code = cli.main([*words, "--json"])
        return code, json.loads(capsys.readouterr().out)["error"]["message"]

    assert error("export", "nothing") == (66, "no run matches 'nothing'")
    (project / "folder").mkdir()
    assert error("export", "digits", "--to", "folder") == (64, "folder already exists")
    assert error("export", "digits", "--to", "gs://x/y")[0] == 64
    assert error("export", "digits", "--to", "no/where")[1].endswith("no does not exist")
    assert error("deploy", "folder") == (66, "folder is not a package: manifest.json is missing")
    assert error("deploy", "digits", "--backend", "slurm")[0] == 64
    folder = project / "run"
    (folder / "checkpoints").mkdir(parents=True)
    row = registry.get("digits")._replace(run="empty", folder=str(folder), id=None)
    shutil.copy(Path(registry.get("digits").folder, "job.json"), folder)
    registry.add(row)
    registry.confirm("empty", "empty", Status(State.SUCCEEDED))
    code, message = error("export", "empty")
    assert (code, message) == (66, "empty has no checkpoints, and no folder model/ in its results")
    (folder / "checkpoints/step-00000017").mkdir()
    (folder / "checkpoints/step-00000017/whole.json").write_text("{")
    code, message = error("export", "empty")
    assert code == 72
    assert message.startswith("checkpoint step-00000017 of empty has a damaged whole.json: ")
    registry.remove("empty")
    assert not list(project.glob("*model*"))
