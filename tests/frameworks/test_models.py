"""Models of examples/models with several strategies: the losses of one process."""

import subprocess

import pytest

from tests.frameworks.models import MODELS, Pools, options, reference
from tests.frameworks.people import PYTHON, ROOT

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(1800),
    pytest.mark.xdist_group("frameworks"),
]

STEPS = 10
TOLERANCE = {"ResNet-18": 1e-5}
"""Relative, of the loss: single precision, summed in another order; 1e-6 for most models.

Batch normalization divides by the deviation of a batch, and amplifies rounding."""
SHARDED = ("4 zero3", "4 hsdp --shard-ranks 2", "4 pp-fsdp --micro-batches 2")
SPLIT = ("4 fsdp-tp --tensor-parallel 2", "4 pp-tp --micro-batches 2")
TRAINED = {
    "Llama": (
        *("4 zero3 --reduce-each --micro-batches 2", *SHARDED, *SPLIT, "4 tp --loss-parallel"),
        "4 fsdp-tp --tensor-parallel 2 --context-parallel 2",
    ),
    "GPT-2": ("4 ddp", *SHARDED, "4 zero1 --context-parallel 4"),
    "ResNet-18": ("4 ddp", "4 hsdp --shard-ranks 2", "4 pp-dp --micro-batches 2"),
    "BERT": ("4 tp", *SHARDED, *SPLIT),
    "recommender": ("4 zero1", *SHARDED, *SPLIT),
    "Llama, LoRA": ("4 zero2", *SHARDED, *SPLIT),
}


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    with Pools(tmp_path_factory.mktemp("pools")) as made:
        yield made


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images") / "stripes"
    write_images(folder)
    return folder


def write_images(folder):
    program = [str(PYTHON), "-P", f"{ROOT}/examples/models/image_classifier.py", str(folder)]
    path = {"PYTHONPATH": f"{ROOT}/entrypoints"}
    subprocess.run(program, check=True, env=path)


@pytest.mark.parametrize("name", MODELS)
def test_a_real_model_trains_like_one_process(name, pools, images, tmp_path):
    given = (*options(name, images), "--steps", str(STEPS))
    alone = {}
    for layout in TRAINED[name]:
        single = reference(name, layout)
        for each in (single, layout):
            if each not in alone:
                folder = tmp_path / each.replace(" ", "")
                folder.mkdir()
                alone[each] = pools.train(folder, each, *given)
                assert isinstance(alone[each], dict), alone[each]
                assert len(alone[each]) == STEPS
        tolerance = TOLERANCE.get(name, 1e-6)
        assert alone[layout] == pytest.approx(alone[single], rel=tolerance), layout


def test_products_in_float8_are_near_those_of_bf16(pools, tmp_path):
    """Emulated on CPUs; a number of float8 has 4 significant bits, one of bf16 8."""
    given = (*options("Llama", tmp_path), "--steps", str(STEPS), "--precision")
    found = {}
    for run in ("1 single bf16", "1 single float8", "2 ddp float8", "2 zero3 float8"):
        layout, _, precision = run.rpartition(" ")
        folder = tmp_path / run.replace(" ", "")
        folder.mkdir()
        found[run] = pools.train(folder, layout, *given, precision)
    exact, alone, *others = found.values()
    assert alone == pytest.approx(exact, rel=0.02)
    assert alone != pytest.approx(exact, rel=1e-4)
    assert all(each == pytest.approx(alone, rel=0.02) for each in others)


@pytest.mark.parametrize("strategy", ["zero1", "zero3", "hsdp --shard-ranks 2"])
def test_dropout_is_that_of_ddp_on_as_many_ranks(strategy, pools, tmp_path):
    """Each rank draws the masks of its own samples, so one process draws others."""
    given = ("--task", "text_classifier:task", "--steps", "4", "--log-every", "1")
    found = []
    for number, layout in enumerate(("4 ddp", f"4 {strategy}")):
        folder = tmp_path / str(number)
        folder.mkdir()
        found.append(pools.train(folder, layout, *given, "--optimizer", "sgd"))
    assert found[0] == pytest.approx(found[1], rel=1e-6)
