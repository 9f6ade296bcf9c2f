"""What is counted of models that are no GPT of ours, and what follows from it."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from deploykit.advise import Cluster, Training, advise, gpus, models
from deploykit.advise.memory import Activations
from deploykit.advise.models import from_counts
from deploykit.advise.strategies import ParallelConfig
from deploykit.cli import main as cli
from tests.advise.published import llama
from tests.nightly import few

CHECKOUT = Path(__file__).parents[2]
COUNTED = json.loads((Path(__file__).parent / "counted_models.json").read_text(encoding="utf-8"))
SAMPLES = {"resnet_50": "3x224x224", "recommender": "tokens:26"}


def count(name, sample=""):
    script = CHECKOUT / "entrypoints/count_model.py"
    argv = [sys.executable, str(script), f"tests.advise.own_models:{name}", sample]
    return subprocess.run(argv, cwd=CHECKOUT, capture_output=True, text=True, check=False)


def counted(name, sample=""):
    return json.loads(count(name, sample).stdout)


@pytest.mark.torch
@pytest.mark.parametrize("name", few(COUNTED, "recommender"))
def test_the_figures_of_the_scenarios_are_those_that_torch_counts(name):
    found, kept = counted(name, SAMPLES[name]), COUNTED[name]
    assert {**found, "sample": None} == {**kept, "sample": None}
    # versions of torch divide an operation into others
    assert found["sample"] == pytest.approx(kept["sample"], rel=0.1)


@pytest.mark.torch
def test_a_sample_that_the_model_does_not_take_is_an_error_of_one_line():
    done = count("resnet_50", "4x224x224")
    assert done.returncode == 1
    assert "a step on a sample of 4x224x224 failed: RuntimeError" in done.stderr


@pytest.mark.nightly
@pytest.mark.torch
def test_only_a_head_as_large_as_the_vocabulary_makes_logits():
    tied, classifier = (from_counts(counted(name)) for name in ("tied", "classifier"))
    assert (tied.vocabulary, tied.tied, tied.head_size) == (1000, True, 64_000)
    assert (classifier.vocabulary, classifier.layers) == (0, 3)
    logits = [
        Activations(model, Training(8, 64), ParallelConfig("single")).logits
        for model in (tied, classifier)
    ]
    assert logits == [8 * 64 * 1000 * 4 * 3, 0]


def test_convolutions_have_work_and_activations():
    """The published count is 4.1 billion multiplications and additions for an image forward."""
    model = from_counts(COUNTED["resnet_50"])
    assert model.parameters == 25_557_032
    assert math.isclose(model.sample.flops, 3 * 2 * 4.1e9, rel_tol=0.02)
    training = Training(64, 1, precision="fp32")
    kept = Activations(model, training, ParallelConfig("single")).of_stage(0, 0)
    assert kept == 64 * model.sample.saved * 4
    halved = Activations(model, training, ParallelConfig("ddp", data=2)).of_stage(0, 0)
    assert halved == kept // 2


def test_a_table_is_sharded_only_where_it_does_not_fit():
    model = from_counts(COUNTED["recommender"])
    cluster = Cluster(gpus.find("a100-80gb"), 8)
    small = dataclasses.replace(
        model, embedding=dataclasses.replace(model.embedding, tensors=model.head.tensors)
    )
    training = Training(65_536, 26)
    assert advise(model, training, cluster).best.strategy == "sharded-table"
    assert advise(small, training, cluster).best.strategy == "ddp"


def test_an_image_model_is_asked_for_by_its_shape(capsys):
    argv = ["--gpu", "v100", "--batch-size", "8", "--input", "3x224x224", "--sequence", "1"]
    assert cli.main(["advise", *argv]) == 64
    assert "--input: requires --model" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.torch
def test_an_image_model_needs_no_sequence(monkeypatch, capsys):
    monkeypatch.chdir(CHECKOUT)
    argv = ["--gpu", "v100", "--gpus-per-node", "8", "--batch-size", "512", "--precision", "fp16"]
    argv += ["--model", "tests.advise.own_models:resnet_50", "--input", "3x224x224"]
    assert cli.main(["advise", *argv]) == 0
    assert "Use ddp" in (said := capsys.readouterr().out)
    assert "samples/s" in said


TASK = ("advise", "--gpu", "h100", "--gpus-per-node", "2", "--batch-size", "64")


@pytest.mark.torch
def test_a_task_of_the_trainer_says_its_model_and_sample_itself(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(CHECKOUT)
    path = tmp_path / "job.yaml"
    argv = [*TASK, "--task", "tests.advise.own_models:words", "--write", str(path)]
    assert cli.main(argv) == 0
    assert "64 x 48 tokens a step" in capsys.readouterr().out
    said = path.read_text()
    assert "--task, tests.advise.own_models:words, --strategy, single" in " ".join(said.split())
    assert "--width" not in said


@pytest.mark.torch
def test_the_options_reach_the_task(monkeypatch, capsys):
    monkeypatch.chdir(CHECKOUT)
    kept = []
    for more in ([], ["--sequence", "64"]):
        argv = [*TASK, "--task", "tests.advise.own_models:images", *more, "--json"]
        assert cli.main(argv) == 0
        data = json.loads(capsys.readouterr().out)
        kept.append(data["candidates"][0]["bytes"]["activations"])
        assert data["trainer"] == {"best": data["best"], "lacks": []}
    assert kept[1] == pytest.approx(4 * kept[0], rel=0.05)


@pytest.mark.torch
def test_what_is_no_task_is_told_from_one(monkeypatch, capsys):
    monkeypatch.chdir(CHECKOUT)
    assert cli.main([*TASK, "--task", "tests.advise.own_models:Given"]) == 64
    assert "--task tests.advise.own_models:Given: building the model in " in (
        said := capsys.readouterr().err
    )
    assert "Given" in said


def test_a_model_name_without_transformers_is_one_sentence(capsys, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    assert cli.main(["advise", "--gpu", "h100", "--model", "Qwen/Qwen3-8B"]) == 64
    said = capsys.readouterr().err
    assert "--model Qwen/Qwen3-8B: a model name requires transformers in " in said


@pytest.mark.torch
def test_a_model_of_hugging_face_is_counted_from_its_configuration(tmp_path, monkeypatch, capsys):
    """Llama 3 8B: 8,030,261,248 parameters, and keys for 8 of 32 heads."""
    pytest.importorskip("transformers", reason="optional: transformers is not installed")
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    sizes |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    (tmp_path / "llama").mkdir()
    config = {"model_type": "llama", "max_position_embeddings": 8192, **sizes}
    (tmp_path / "llama/config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["advise", "--gpu", "h100", "--model", "./llama", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] == 8_030_261_248
    model = models.counted("./llama", "", heads=None)
    expected = llama(
        layers=32, width=4096, heads=32, kv_heads=8, feedforward=14336, vocabulary=128256
    )
    shape = ("width", "layers", "heads", "kv_heads", "feedforward", "vocabulary", "gated", "tied")
    assert [getattr(model, name) for name in shape] == [getattr(expected, name) for name in shape]
    assert model.length == 8192
