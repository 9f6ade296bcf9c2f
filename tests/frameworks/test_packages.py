"""`deploykit export` of Hugging Face models: a package answers what transformers computes."""

import json
import os
import subprocess
import sys

import pytest

from tests.frameworks.people import PYTHON, ROOT
from tests.trainer.ranks import ENTRYPOINTS

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.torch,
    pytest.mark.timeout(1200),
    pytest.mark.xdist_group("frameworks"),
]

LLAMA = """
from transformers import LlamaConfig, LlamaForCausalLM

def network():
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True,
    ))
"""
SCRIPT = """
import os
from llama import network

network().save_pretrained(os.environ["DEPLOYKIT_OUTPUT_DIR"])
"""
TASK = """
import torch
from torch.utils.data import TensorDataset
from llama import network
from trainer.task import Task

def task(options):
    torch.manual_seed(0)
    tokens = torch.randint(64, (64, 17))
    return Task(network, training=TensorDataset(tokens[:, :-1], tokens[:, 1:]))
"""
ANSWER = """
import json, sys
from pathlib import Path
import torch
from handler import Handler, Request
from transformers import AutoModelForCausalLM

trained, package = map(Path, sys.argv[1:])
tokens = [[1, 2, 3, 4]]
request = json.dumps({"inputs": {"input_ids": tokens}}).encode()
(answer,) = Handler(package).answers([Request(request, "application/json", "*/*")])
assert answer.status == 200, answer.body
if trained.name == "checkpoints":
    from llama import network
    from trainer.checkpoint import checkpointer

    model = network()
    model.load_state_dict(checkpointer.latest_weights(trained))
else:
    model = AutoModelForCausalLM.from_pretrained(trained)
expected = model.eval()(torch.tensor(tokens)).logits
torch.testing.assert_close(torch.tensor(json.loads(answer.body)["outputs"]), expected.detach())
"""


@pytest.fixture
def deploykit(tmp_path):
    """Run a command in a folder with the reference trainer, by the Python with transformers."""

    def run(*words, program=("-m", "deploykit"), python=sys.executable):
        env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        if python == PYTHON:
            env["PYTHONPATH"] = f"{ENTRYPOINTS}:{tmp_path}"
        argv = [python, *program, *map(str, words)]
        done = subprocess.run(
            argv, cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("init", "--trainer")
    (tmp_path / "llama.py").write_text(LLAMA)
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "save.py").write_text(SCRIPT)
    return run


@pytest.mark.parametrize("program", ["save.py", "train.py"])
def test_a_package_answers_what_transformers_computes(program, deploykit, tmp_path):
    """A folder of save_pretrained, and a task that was trained sharded on two ranks."""
    ranks = 2 if program == "train.py" else 1
    chosen = ("--set", f"local.python={PYTHON}", "--processes-per-node", ranks)
    arguments = ("--task", "task:task", "--strategy", "fsdp", "--epochs", 1, "--no-tensorboard")
    given = ("--", *arguments) if program == "train.py" else ()
    deploykit("submit", program, "--run", "llama", *chosen, "--wait", *given)
    deploykit("export", "llama", "--to", "model")
    assert (tmp_path / "model/config.json").is_file()
    assert "transformers" in json.loads((tmp_path / "model/manifest.json").read_text())["versions"]
    part = "checkpoints" if program == "train.py" else "output"
    trained = f"{os.environ['DEPLOYKIT_HOME']}/runs/llama/{part}"
    deploykit(trained, tmp_path / "model", program=("-c", ANSWER), python=PYTHON)
