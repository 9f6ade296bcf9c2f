"""evaluate.py and export.py, with models that were trained for it."""

import json
import sys

import pytest
import torch
from safetensors.torch import load_file

import evaluate
import export
from tests.trainer.ranks import call, latest, lines, train_alone
from trainer.checkpoint import checkpointer as checkpoint

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


def test_an_evaluation_counts_every_test_image_once(trained, tmp_path, capsys):
    call(evaluate, trained["digits"] / "checkpoints", tmp_path)
    result = json.loads((tmp_path / "evaluation.json").read_text())
    matrix = torch.tensor(result["confusion"])

    assert int(matrix.sum()) == 360
    assert result["accuracy"] == pytest.approx(float(matrix.diag().sum()) / 360)
    assert result["accuracy"] == pytest.approx(lines(trained["digits"])[-1]["test_accuracy"])
    assert result["accuracy"] > 0.9
    for name, scores in result["classes"].items():
        right, all_of_it = matrix[int(name), int(name)], matrix[int(name)].sum()
        assert scores["recall"] == pytest.approx(float(right / all_of_it))
    assert (tmp_path / "confusion.png").read_bytes().startswith(b"\x89PNG")
    assert f"accuracy {result['accuracy']:.4f} (360 images); lowest F1 " in capsys.readouterr().out


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    evaluate.draw_confusion([[1, 0], [0, 1]], tmp_path / "confusion.png")

    assert not (tmp_path / "confusion.png").exists()
    assert "matplotlib is not installed" in capsys.readouterr().out


def test_the_evaluation_of_a_text_model_has_perplexity_and_samples(trained, tmp_path):
    call(evaluate, trained["text"] / "checkpoints", tmp_path)
    result = json.loads((tmp_path / "evaluation.json").read_text())
    loss = lines(trained["text"])[-1]["test_loss"]

    assert result["perplexity"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    assert 1 < result["perplexity"] < 60
    pairs = zip(result["samples"], evaluate.PROMPTS, strict=True)
    assert all(sample.startswith(prompt) for sample, prompt in pairs)
    assert len(result["samples"][0].encode()) >= 204


@pytest.mark.parametrize("program", [evaluate, export])
def test_a_folder_without_a_checkpoint_is_an_error(tmp_path, program):
    with pytest.raises(SystemExit) as ended:  # Python prints it, and exits with code 1
        call(program, tmp_path, tmp_path / "x")

    problem = f"{program.__name__}.py: error: no checkpoint found in {tmp_path}"
    assert str(ended.value).startswith(problem)


@pytest.mark.parametrize("name", ["digits", "text"])
def test_exported_models_compute_the_same(trained, name, tmp_path):
    call(export, trained[name] / "checkpoints", tmp_path)
    test, model, progress = evaluate.trained_model(trained[name] / "checkpoints")
    program = torch.export.load(tmp_path / "model.pt2").module()
    weights = load_file(tmp_path / "model.safetensors")
    state = checkpoint.read(latest(trained[name]))

    for number in (1, 2, 7):
        inputs = test.tensors[0][:number]
        assert torch.allclose(program(inputs), model(inputs), atol=1e-6)
    assert set(weights) == set(model.state_dict())
    assert all(state[f"model.{key}"].equal(value) for key, value in weights.items())
    described = json.loads((tmp_path / "model.json").read_text())
    assert described["model"]["width"] == progress["settings"]["width"]
    assert described["input"] == list(test.tensors[0].shape[1:])
