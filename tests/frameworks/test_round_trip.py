"""Weights go to transformers and come back: equal logits, and equal first losses in each layout."""

import subprocess

import pytest

from tests.frameworks.models import Pools
from tests.frameworks.people import PYTHON, ROOT
from tests.trainer.ranks import ENTRYPOINTS

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("frameworks"),
]

TASK = ("--task", "language_model:task", "--batch-size", "16", "--log-every", "1")
LAYOUTS = (
    "4 zero3",
    "4 fsdp-tp --tensor-parallel 2",
    "4 pp --micro-batches 4",
    "4 pp-tp --micro-batches 2",
)
SAVE = """
import sys, torch
from language_model import FAMILIES
from transformers import AutoModelForCausalLM

torch.manual_seed(7)
model = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
model.save_pretrained(sys.argv[1], max_shard_size=sys.argv[2])
"""
COMPARE = """
import sys, torch
from pathlib import Path
from language_model import FAMILIES
from trainer.checkpoint import checkpointer
from transformers import AutoModelForCausalLM

checkpoints, exported = map(Path, sys.argv[1:])
FAMILIES["llama"]().save_pretrained(exported)
trained = AutoModelForCausalLM.from_config(FAMILIES["llama"]())
trained.load_state_dict(checkpointer.latest_weights(checkpoints))
loaded, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
assert not any(info.values()), info
tokens = torch.arange(64).view(1, 64)
assert torch.equal(loaded.eval()(tokens).logits, trained.eval()(tokens).logits)
"""
FROZEN = """
import sys
from pathlib import Path
from fine_tuning import pretrained_name
from safetensors.torch import load_file
from trainer.checkpoint import checkpointer

checkpoints, folder = map(Path, sys.argv[1:])
saved, names = load_file(folder / "model.safetensors"), set()
for name, value in checkpointer.latest_weights(checkpoints).items():
    source = pretrained_name(name)
    names.add(source)
    assert value.any() if source is None else value.equal(saved[source]), name
assert names == {None, *saved}
"""


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    with Pools(tmp_path_factory.mktemp("pools")) as made:
        yield made


def python(*words):
    path = f"{ROOT}/examples/models:{ENTRYPOINTS}"
    run = subprocess.run(
        [PYTHON, *words], capture_output=True, text=True, check=False, env={"PYTHONPATH": path}
    )
    assert run.returncode == 0, run.stderr[-4000:]


def trained(pools, folder, layout, *given):
    folder.mkdir()
    losses = pools.train(folder, layout, *TASK, *given)
    assert isinstance(losses, dict), losses
    return losses


@pytest.mark.parametrize("layout", ["4 fsdp-tp --tensor-parallel 2", "4 pp --micro-batches 4"])
def test_transformers_loads_what_was_trained_here(layout, pools, tmp_path):
    trained(pools, tmp_path / "run", layout, "--steps", "2")
    checkpoints, exported = f"{tmp_path}/run/checkpoints", f"{tmp_path}/model"
    python(f"{ENTRYPOINTS}/export.py", checkpoints, "--weights", "--output", exported)
    python("-c", COMPARE, checkpoints, exported)


@pytest.mark.parametrize("largest", ["5GB", "200KB"], ids=["file", "index"])
def test_every_layout_begins_with_what_transformers_saved(largest, pools, tmp_path):
    python("-c", SAVE, f"{tmp_path}/model", largest)
    given = ("--init-from", f"{tmp_path}/model", "--steps", "2")
    alone = trained(pools, tmp_path / "alone", "1 single", *given)
    for number, layout in enumerate(LAYOUTS):
        losses = trained(pools, tmp_path / str(number), layout, *given)
        assert losses == pytest.approx(alone, rel=1e-6), layout


@pytest.mark.parametrize("layout", ["4 zero3", "4 fsdp-tp --tensor-parallel 2"])
def test_adapters_are_put_on_what_transformers_saved(layout, pools, tmp_path):
    """peft renames the weights; the adapters are not in the folder, and change nothing at first."""
    python("-c", SAVE, f"{tmp_path}/model", "5GB")
    own = ("--task", "fine_tuning:task", "--init-from", f"{tmp_path}/model", "--steps", "3")
    found = trained(pools, tmp_path / "run", layout, *own)
    assert found == pytest.approx(trained(pools, tmp_path / "alone", "1 single", *own), rel=1e-6)
    assert found[3] < found[1]
    python("-c", FROZEN, f"{tmp_path}/run/checkpoints", f"{tmp_path}/model")
