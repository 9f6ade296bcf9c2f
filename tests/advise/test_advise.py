"""What `deploykit advise` recommends, prints, writes and refuses."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from urllib.parse import urlparse

import pytest

from deploykit.advise import Cluster, Training, advise, gpt, gpt_of_size, gpus
from deploykit.advise.strategies import Strategy
from deploykit.cli import main as cli
from deploykit.job import file as jobfile

SEVEN = ("--parameters", "7B", "--gpu", "a100-40gb", "--batch-size", "128", "--sequence", "2048")
MEDIUM = ("--layers", "12", "--width", "768", "--batch-size", "64", "--sequence", "1024")
TINY = ("--layers", "4", "--width", "64", "--heads", "4", "--batch-size", "16", "--sequence", "64")


def run(*argv):
    return cli.main(["advise", *argv])


def ask(parameters, gpu, gpus_per_node, nodes=1, *, batch=64, sequence=2048, **more):
    kind = gpus.find(gpu)
    cluster = Cluster(kind, gpus_per_node, nodes, kind.link, **more)
    model = gpt_of_size(parameters, vocabulary=32_000, positions=sequence)
    return advise(model, Training(batch, sequence), cluster)


def test_parameters_are_those_of_the_published_models():
    """GPT-2 small has 124,439,808 parameters, with one embedding for input and output."""
    model = gpt(layers=12, width=768, heads=12, vocabulary=50257, positions=1024)
    head = next(each for each in model.head.tensors if each.name == "out.weight")
    assert model.parameters - head.size == 124_439_808


@pytest.mark.parametrize("parameters", [10**6, 125 * 10**6, 7 * 10**9, 70 * 10**9, 10**12])
def test_a_size_alone_gives_a_model_of_that_size(parameters):
    model = gpt_of_size(parameters, vocabulary=256, positions=1024)
    assert abs(model.parameters - parameters) < 0.1 * parameters
    assert not model.exact


def test_given_shapes_are_kept():
    model = gpt_of_size(7 * 10**9, layers=30, width=4096, heads=64, vocabulary=256, positions=64)
    assert (model.layers, model.width, model.heads) == (30, 4096, 64)
    assert abs(model.parameters - 7 * 10**9) < 10**8


def test_flops_are_six_for_each_weight_and_token():
    model = gpt(layers=96, width=12288, heads=96, vocabulary=51200, positions=2048)
    paper = 72 * 96 * 12288**2 * (1 + 2048 / (6 * 12288) + 51200 / (12 * 96 * 12288))
    assert math.isclose(model.flops(1, 2048), paper, rel_tol=0.01)


@pytest.mark.parametrize(
    ("parameters", "shape", "case", "strategies"),
    [
        (125 * 10**6, ("h100", 1), "each", {"single"}),
        (350 * 10**6, ("h100", 8), "each", {"ddp"}),
        (7 * 10**9, ("h100", 8), "sharded", {"zero2", "zero3"}),
    ],
)
def test_replicas_where_a_copy_fits_and_shards_over_fast_links_elsewhere(
    parameters, shape, case, strategies
):
    advice = ask(parameters, *shape)
    assert advice.case == case
    assert advice.best.strategy in strategies
    assert advice.of("single").fits == (case == "each")


def test_a_slow_network_is_kept_from_weights():
    """Over TCP stages send activations only; sharding would send every weight several times."""
    slow = ask(7 * 10**9, "a100-40gb", 8, 2, batch=128)
    assert slow.best.config.pipeline > 1
    fast = ask(7 * 10**9, "a100-40gb", 8, 2, batch=128, fabric="infiniband", bandwidth=200e9)
    assert fast.of("zero3").step.seconds < slow.of("zero3").step.seconds / 2


def test_a_layer_that_fits_nowhere_is_split():
    advice = ask(3 * 10**11, "l4", 8, 64)
    assert advice.case == "layer"
    assert advice.best.config.tensor > 1


def test_nothing_fits_and_more_nodes_would_do():
    advice = ask(70 * 10**9, "a100-40gb", 8)
    assert advice.best is None
    assert advice.enough > 1
    more = ask(70 * 10**9, "a100-40gb", 8, advice.enough)
    assert more.best.fits


def test_what_is_recommended_fits_and_nothing_is_much_faster():
    for size, nodes in ((10**6, 1), (10**8, 1), (3 * 10**9, 1), (13 * 10**9, 4), (30 * 10**9, 8)):
        advice = ask(size, "a100-80gb", 8, nodes, batch=256)
        best = advice.best
        assert {best.strategy, advice.second.strategy}.isdisjoint({"dp", "manual"})
        assert best.memory.total <= advice.cluster.gpu.memory
        for other in advice.candidates:
            if other.fits and other.strategy not in {"dp", "manual"}:
                assert best.step.seconds <= 1.1 * other.step.seconds


def test_more_shards_need_less_memory():
    few, many = (ask(7 * 10**9, "h100", 8, nodes) for nodes in (1, 4))
    assert many.of("zero3").memory.optimizer * 3.9 < few.of("zero3").memory.optimizer


def test_a_pipeline_waits_as_its_formula_says():
    """(p - 1) / m of the work, where stages are equal."""
    model = gpt(layers=64, width=1024, heads=8, vocabulary=256, positions=512)
    cluster = Cluster(gpus.find("h100"), 4)
    advice = advise(model, Training(16, 512, checkpointing=False), cluster)
    pp = advice.of("pp")
    expected = 3 / pp.config.micro_batches
    assert pp.step.bubble / pp.step.compute == pytest.approx(expected, abs=0.02)


def test_ddp_sends_twice_the_gradients():
    """2 (n - 1) / n of them around the ring."""
    ddp = ask(350 * 10**6, "h100", 8).of("ddp")
    assert ddp.step.sent == pytest.approx(2 * 7 / 8 * ddp.memory.gradients, rel=1e-6)


@pytest.mark.parametrize("name", gpus.known())
def test_every_gpu_says_where_its_numbers_stand(name):
    gpu = gpus.known()[name]
    assert urlparse(gpu.source).scheme == urlparse(gpu.prices).scheme == "https"
    assert gpu.memory > 0
    assert set(gpu.flops) == {"fp32", "bf16", "fp16"}


def test_gpus_are_found_however_they_are_written():
    assert gpus.find("A100 40GB").name == "a100-40gb"
    assert gpus.find("a100") is None


def test_the_answer_is_one_sentence_above_a_table(capsys):
    assert run(*SEVEN, "--nodes", "2", "--gpus-per-node", "8") == 0
    sentence, table, notes = capsys.readouterr().out.split("\n\n", 1)[1].split("\n\n")
    assert sentence.startswith("Use pp")
    assert ": a full copy of the model does not fit on a GPU (ddp needs " in sentence
    assert "; the next best is " in sentence
    assert len(sentence.splitlines()) == 1
    rows = {line.split("\t")[0]: line.split("\t")[1] for line in table.splitlines()[1:]}
    assert {name.rstrip("*") for name in rows} == {*Strategy.__args__} - {"sharded-table"}
    assert rows["ddp"] == "does not fit"
    assert [verdict for name, verdict in rows.items() if name.endswith("*")] == ["best"]
    assert "TCP at 25 Gb/s" in notes


def test_what_was_assumed_of_the_batch_is_stated(capsys):
    model = ("--parameters", "1B", "--gpu", "h100", "--nodes", "2", "--gpus-per-node", "4")
    assert run(*model) == 0
    said = capsys.readouterr().out
    assert "; 64 x 2048 tokens a step" in said
    assert (
        "Assumed: --batch-size 64 (8 per GPU) and --sequence 2048; set the options to override.\n"
        in said
    )
    assert run(*model, "--sequence", "512", "--json") == 0
    assert "Assumed: --batch-size 64 (8 per GPU); set the options" in capsys.readouterr().out
    assert run(*model, "--sequence", "512", "--batch-size", "8") == 0
    assert "Assumed" not in capsys.readouterr().out


def test_parts_add_up_to_the_total(capsys):
    assert run(*SEVEN, "--gpus-per-node", "8", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    for each in data["candidates"]:
        total = each["bytes"].pop("total")
        assert sum(each["bytes"].values()) == total
        assert each["fits"] == (total <= gpus.find("a100-40gb").memory)


def test_the_job_file_is_one_that_check_accepts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "entrypoints").mkdir()
    (tmp_path / "entrypoints/train.py").touch()
    argv = [*MEDIUM, "--gpu", "t4", "--gpus-per-node", "4", "--precision", "fp16"]
    argv += ["--checkpoint-activations", "off", "--write", "j.yaml"]
    assert run(*argv) == 0
    assert cli.main(["check", "j.yaml"]) == 0
    tree, _ = jobfile.parse(tmp_path / "j.yaml")
    words = tree["entrypoint"]["args"]
    options = dict(zip(words[::2], words[1::2], strict=True))
    assert options["--strategy"] == "ddp"
    assert options["--layers"] == "12"
    assert tree["resources"]["processes_per_node"] == "4"
    capsys.readouterr()
    before = (tmp_path / "j.yaml").read_text()
    assert run(*argv) == 64
    assert "j.yaml already exists" in capsys.readouterr().err
    assert (tmp_path / "j.yaml").read_text() == before


def test_what_the_trainer_cannot_do_is_not_written(tmp_path, capsys):
    path = tmp_path / "j.yaml"
    argv = [*TINY, "--gpu", "h100", "--precision", "pure-bf16", "--optimizer", "sgd"]
    assert run(*argv, "--write", str(path)) == 64
    said = capsys.readouterr().err
    assert "pure-bf16 is not supported" in said
    assert "SGD without momentum is not supported" in said
    assert not path.exists()


def test_every_problem_at_once(capsys):
    wrong = ("--parameters", "7X", "--gpu", "a100", "--fabric", "tpc", "--sequence", "0")
    assert run(*wrong) == 64
    assert capsys.readouterr().err.splitlines() == [
        "error: advise: 4 problems",
        "  --sequence: must be at least 1, got 0",
        "  --parameters: expected a number such as 7B, 350M or 124439808, got '7X'",
        "  --fabric: expected one of tcp, efa, infiniband; got 'tpc' (did you mean 'tcp'?)",
        "  --gpu: unknown GPU 'a100' (a100-80gb or a100-40gb)",
    ]


ODD = ("--layers", "4", "--width", "64", "--batch-size", "3", "--sequence", "64")
REMARKS = {
    "mi300x is an unknown GPU; the speed of an A100 is assumed": (
        *(*TINY, "--gpu", "mi300x", "--gpu-memory", "192GiB"),
    ),
    "--precision fp16 is much faster": (*TINY, "--gpu", "v100"),
    "A batch of 3 cannot be split evenly over 8 GPUs": (
        *ODD,
        "--gpu",
        "l4",
        "--gpus-per-node",
        "8",
    ),
}


@pytest.mark.parametrize("said", REMARKS)
def test_what_is_remarked(said, capsys):
    assert run(*REMARKS[said]) == 0
    assert said in capsys.readouterr().out


def test_the_gpus_can_be_listed(capsys):
    assert run("--list") == 0
    assert {line.split("\t")[0] for line in capsys.readouterr().out.splitlines()} == set(
        gpus.known()
    )


MODEL = """
from torch import nn

def build():
    block = lambda: nn.TransformerEncoderLayer(64, 4, 256)
    return nn.Sequential(nn.Embedding(1000, 64), *(block() for _ in range(3)), nn.Linear(64, 1000))

def not_a_model():
    return 3
"""


@pytest.mark.torch
@pytest.mark.xdist_group("advise")
def test_a_model_of_ones_own_is_counted_layer_by_layer(tmp_path, monkeypatch, capsys):
    import torch

    (tmp_path / "mine.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    argv = ["--gpu", "l4", "--batch-size", "8", "--sequence", "128"]
    assert run("--model", "mine:build", *argv, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256)
    block = sum(parameter.numel() for parameter in layer.parameters())
    assert told["parameters"] == 1000 * 64 + 3 * block + 1000 * 64 + 1000
    assert run("--model", "mine:not_a_model", *argv) == 64
    assert "returned int, not a torch.nn.Module" in capsys.readouterr().err
    assert run("--model", "mien:build", *argv) == 64
    assert "No module named 'mien'" in capsys.readouterr().err


def test_the_control_plane_does_without_torch():
    code = "import sys; from deploykit.cli import main as cli; cli.main(sys.argv[1:]); "
    code += "sys.exit('torch' in sys.modules)"
    argv = [sys.executable, "-c", code, "advise", *TINY, "--gpu", "h100"]
    assert subprocess.run(argv, capture_output=True, check=False).returncode == 0
