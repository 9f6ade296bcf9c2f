"""report.py, export.py and serve.py, with models that were trained for it."""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import load_file

import export
import report
import serve
from tests.trainer.ranks import ENTRYPOINTS, PATIENCE, latest, lines, train_alone
from trainer import tasks
from trainer.checkpoint import checkpointer as checkpoint
from trainer.checkpoint.restore import restore

pytestmark = pytest.mark.torch

SMALL = ("--layers", "1", "--width", "32", "--heads", "2", "--sequence", "16")
TEXT = ("--task", "text", *SMALL, "--steps", "60", "--lr", "0.01")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of a trained digits model and a trained text model."""
    folders = {}
    for name, options in {"digits": ("--epochs", "8"), "text": TEXT}.items():
        folders[name] = tmp_path_factory.mktemp(name)
        train_alone(folders[name], *options, "--no-tensorboard")
    return folders


@pytest.fixture(scope="module")
def exported(trained):
    for folder in trained.values():
        call(export, folder / "checkpoints", folder / "model")
    return {name: folder / "model" for name, folder in trained.items()}


def call(module, checkpoints, output):
    with pytest.MonkeyPatch.context() as patch:
        words = [module.__name__, str(checkpoints), "--output", str(output)]
        patch.setattr(sys, "argv", words)
        module.main()


def test_the_report_counts_every_test_image_once(trained, tmp_path, capsys):
    call(report, trained["digits"] / "checkpoints", tmp_path)
    result = json.loads((tmp_path / "report.json").read_text())
    matrix = torch.tensor(result["confusion"])

    assert int(matrix.sum()) == 360
    assert result["accuracy"] == pytest.approx(float(matrix.diag().sum()) / 360)
    assert result["accuracy"] == pytest.approx(lines(trained["digits"])[-1]["test_accuracy"])
    assert result["accuracy"] > 0.9
    for name, scores in result["classes"].items():
        right, all_of_it = matrix[int(name), int(name)], matrix[int(name)].sum()
        assert scores["recall"] == pytest.approx(float(right / all_of_it))
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert f"accuracy {result['accuracy']:.4f}; lowest F1 " in capsys.readouterr().out


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    report.draw_confusion([[1, 0], [0, 1]], tmp_path / "confusion.png")

    assert not (tmp_path / "confusion.png").exists()
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_the_report_of_a_text_model_has_perplexity_and_samples(trained, tmp_path):
    call(report, trained["text"] / "checkpoints", tmp_path)
    result = json.loads((tmp_path / "report.json").read_text())
    loss = lines(trained["text"])[-1]["test_loss"]

    assert result["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert 1 < result["perplexity"] < 60
    pairs = zip(result["samples"], report.PROMPTS, strict=True)
    assert all(sample.startswith(prompt) for sample, prompt in pairs)
    assert len(result["samples"][0].encode()) >= 204


@pytest.mark.parametrize("name", ["report", "export"])
def test_a_folder_without_a_checkpoint_is_an_error(tmp_path, name):
    done = subprocess.run(
        [sys.executable, ENTRYPOINTS / f"{name}.py", tmp_path, "--output", tmp_path / "x"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 1
    assert f"{name}.py: error: no checkpoint found in {tmp_path}" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["digits", "text"])
def test_exported_models_compute_the_same(trained, exported, name):
    test, model, _ = restore(trained[name] / "checkpoints")
    program = torch.export.load(exported[name] / "model.pt2").module()
    weights = load_file(exported[name] / "model.safetensors")
    state = checkpoint.read(latest(trained[name]))

    for number in (1, 2, 7):
        inputs = test.tensors[0][:number]
        assert torch.allclose(program(inputs), model(inputs), atol=1e-6)
    assert set(weights) == set(model.state_dict())
    assert all(state[f"model.{key}"].equal(value) for key, value in weights.items())


@pytest.fixture(params=["digits", "text"])
def server(exported, request):
    bound = serve.create_server(exported[request.param], "127.0.0.1", 0)
    thread = threading.Thread(target=bound.serve_forever)
    thread.start()
    yield request.param, f"http://127.0.0.1:{bound.server_port}"
    bound.shutdown()
    bound.server_close()
    thread.join()


def send(url, content=None, kind="application/json"):
    body = None if content is None else content.encode()
    request = urllib.request.Request(url, body, {"Content-Type": kind} if body else {})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def test_the_hosting_contract(server):
    _, url = server

    assert send(f"{url}/ping") == (200, {})
    assert send(f"{url}/elsewhere")[0] == 404
    assert send(f"{url}/elsewhere", "{}")[0] == 404
    assert send(f"{url}/invocations", "a,b", "text/csv")[0] == 415
    status, content = send(f"{url}/invocations", "{not JSON")
    assert status == 400
    assert "not valid JSON" in content["error"]
    for wrong in ("{}", "[]", '{"instances": [[1, 2]]}', '{"prompt": 3}'):
        status, content = send(f"{url}/invocations", wrong)
        assert status == 400
        assert "send " in content["error"]
    assert send(f"{url}/ping") == (200, {})


def test_predictions_are_those_of_the_model(server, trained):
    name, url = server
    _, model, _ = restore(trained[name] / "checkpoints")
    if name == "text":
        responses = [
            send(f"{url}/invocations", '{"prompt": "The ", "length": 5}') for _ in range(2)
        ]
        assert responses[0] == responses[1]
        assert responses[0][1]["text"].startswith("The ")
        assert len(responses[0][1]["text"].encode()) == 9
        return
    from sklearn.datasets import load_digits

    images = load_digits().images[:20]
    status, content = send(f"{url}/invocations", json.dumps({"instances": images.tolist()}))
    with torch.no_grad():
        scores = model(tasks.normalize(torch.tensor(images, dtype=torch.float32).unsqueeze(1)))
    assert status == 200
    assert [one["class"] for one in content["predictions"]] == scores.argmax(dim=1).tolist()
    chances = torch.tensor([one["probabilities"] for one in content["predictions"]])
    assert torch.allclose(chances, scores.softmax(dim=1), atol=1e-6)


def test_the_settings_of_the_model_are_in_the_checkpoint(trained):
    _, model, progress = restore(trained["text"] / "checkpoints")

    assert progress["settings"]["width"] == 32
    assert model.get_submodule("embed").byte.embedding_dim == 32
