"""`--init-from` reads safetensors files in any layout, and `export.py --weights` writes them."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

import export
from tests.trainer import ranks
from tests.trainer.own_tasks import Decoder, layers
from tests.trainer.test_deferred import weights, words
from trainer.errors import ConfigError
from trainer.pretrained import Pretrained

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]

LAYOUTS = {
    "ddp": (),
    "zero1": (),
    "zero3": (),
    "zero3 --offload": (),
    "fsdp-tp --tensor-parallel 2": (),
    "ddp, not deferred": ("--task-option", "deferred=no"),
    "hsdp --shard-ranks 2, not deferred": ("--task-option", "deferred=no"),
}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """The weights of a decoder by name, and a file of them, without the second name of a tie."""
    torch.manual_seed(7)
    state = {name: torch.randn_like(value) for name, value in Decoder().state_dict().items()}
    del state["head.weight"]
    path = tmp_path_factory.mktemp("pretrained") / "any.safetensors"
    save_file(state, path, {"format": "pt"})
    return state | {"head.weight": state["embed.weight"]}, path


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_starts_with_the_weights_of_a_file(layout, four, pretrained, tmp_path):
    state, path = pretrained
    strategy, *options = layout.partition(",")[0].split()
    given = words("decoder", strategy, *options, *LAYOUTS[layout], "--init-from", str(path))
    four.train(tmp_path, *given)

    started = weights(tmp_path)
    assert started.keys() == {f"model.{name}" for name in state}
    assert [name for name in state if not started[f"model.{name}"].equal(state[name])] == []


def test_a_pipeline_starts_with_the_weights_of_several_files(four, tmp_path):
    torch.manual_seed(7)
    state = {name: torch.randn_like(value) for name, value in layers().state_dict().items()}
    files = export.write_weights(state, tmp_path, 300)
    assert len(files) > 2

    pipeline = words("sequence", "pp-dp", "--micro-batches", "2", "--init-from", str(tmp_path))
    four.train(tmp_path / "run", *pipeline)
    started = weights(tmp_path / "run")
    assert [name for name in state if not started[f"model.{name}"].equal(state[name])] == []


def test_a_resumed_run_keeps_what_it_has_learned(pretrained, tmp_path):
    options = ("--init-from", str(pretrained[1]), "--lr", "0.01")
    ranks.train_alone(tmp_path, *words("decoder", "single", *options, "--steps", "2"))
    learned = weights(tmp_path)
    assert not learned["model.embed.weight"].equal(pretrained[0]["embed.weight"])

    ranks.train_alone(tmp_path, *words("decoder", "single", *options, "--steps", "3"))
    assert [*ranks.losses(tmp_path)] == [1, 2, 3]


def test_weights_of_a_task_of_ones_own_are_exported(tmp_path, capsys):
    ranks.train_alone(tmp_path, *words("decoder", "single"))
    ranks.call(export, tmp_path / "checkpoints", tmp_path / "model", "--weights")
    exported = load_file(tmp_path / "model" / "model.safetensors")

    assert "model: model.safetensors with 28 tensors" in capsys.readouterr().out
    model = Decoder()
    model.load_state_dict(exported)
    assert exported["blocks.0.up.weight"].equal(weights(tmp_path)["model.blocks.0.up.weight"])


def test_large_weights_are_written_to_several_files_with_an_index(tmp_path):
    state = {name: torch.full((10,), float(number)) for number, name in enumerate("abcde")}
    files = export.write_weights(state, tmp_path, 100)

    assert [path.name for path in files] == [
        *(f"model-{number:05d}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    index = json.loads(files[-1].read_text())
    assert index["metadata"]["total_size"] == 200
    for name, value in state.items():
        assert load_file(tmp_path / index["weight_map"][name])[name].equal(value)


def test_names_are_translated_and_some_tensors_keep_their_first_value(pretrained, tmp_path):
    def source(name):
        return None if name.startswith("norm.") else f"base.{name}"

    state = {name: value.clone() for name, value in pretrained[0].items()}
    save_file({new: state[name] for name in state if (new := source(name))}, tmp_path / "any")
    model = Decoder()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    given = Pretrained(tmp_path / "any", source)
    given.check(model)
    given.load(model)
    for name, value in model.state_dict().items():
        assert value.equal((state if source(name) else first)[name]), name
    with pytest.raises(ConfigError, match="the weights lack blocks"):
        Pretrained(tmp_path / "any").check(model)


def lacking(state):
    del state["norm.bias"]


def unknown(state):
    state["nrom.bias"] = torch.zeros(1)


def reshaped(state):
    state["norm.bias"] = torch.zeros(3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lacking, "the weights lack norm.bias"),
        (unknown, "have extra nrom.bias"),
        (reshaped, "have norm.bias with shape (3,), but the model expects (32,)"),
    ],
)
def test_other_weights_are_refused(change, message, pretrained, pools, tmp_path):
    state = {name: value.clone() for name, value in pretrained[0].items()}
    change(state)
    save_file(state, tmp_path / "model.safetensors")
    given = words("decoder", "single", "--init-from", str(tmp_path))
    (error,) = pools[1].try_to_train(tmp_path / "run", *given)

    assert error.startswith(f"ConfigError: --init-from {tmp_path}: ")
    assert message in error


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (
            '{"weight_map": {"a": "../secret"}}',
            "names '../secret', which is not in the same folder",
        ),
        ('{"weight_map": []}', "is not a valid safetensors index"),
        ("[" * 10_000, "is not a valid safetensors index"),
        (None, "No such file"),
    ],
)
def test_a_folder_that_is_no_model_is_refused(index, message, tmp_path):
    if index:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ConfigError) as refused:
        ranks.train_alone(tmp_path, *words("decoder", "single", "--init-from", str(tmp_path)))

    assert message in str(refused.value)
