"""serve.py with models of unknown origin: nothing in them runs, and invalid ones are refused."""

import io
import json
import pickle
import struct
import subprocess
import sys
import zipfile

import pytest
import torch

import export
import serve
from tests.trainer import attacks
from tests.trainer.ranks import train_alone
from tests.trainer.served import IMAGE
from trainer.checkpoint import safetensors_io
from trainer.checkpoint.safe_pickle import InvalidFile

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("serve")]


def dotted_name(canary):
    return b"\x80\x04" + attacks.call("torch", attacks.DOTTED, "touch", str(canary)) + b"."


def reduce(canary):
    return pickle.dumps(attacks.Touch(canary))


@pytest.mark.parametrize("payload", [dotted_name, reduce])
def test_serving_a_hostile_model_runs_no_code(payload, tmp_path):
    """A weight in the program that export.py writes is replaced by a pickle that starts another."""
    train_alone(tmp_path, "--epochs", "1", "--no-tensorboard")
    with pytest.MonkeyPatch.context() as patch:
        words = ["export", str(tmp_path / "checkpoints"), "--output", str(tmp_path / "model")]
        patch.setattr(sys, "argv", words)
        export.main()
    program, canary = tmp_path / "model" / "model.pt2", tmp_path / "canary"
    program.write_bytes(with_pickled_weights(program.read_bytes(), payload(canary)))
    with attacks.watched() as events:
        serve.create_server(tmp_path / "model", "127.0.0.1", 0).server_close()
        assert serve.load(tmp_path / "model")({"instances": [IMAGE]})["predictions"]
    started = {name for name, _ in events} & {"os.system", "subprocess.Popen", "os.posix_spawn"}

    assert not started
    assert not canary.exists()
    load = [sys.executable, "-c", f"import torch; torch.export.load({str(program)!r})"]
    subprocess.run(load, capture_output=True, check=False)
    assert attacks.appears(canary), "torch's own loading runs it, or this test shows nothing"


def with_pickled_weights(data, payload):
    """A torch.export program that declares its weights as pickles, one of which is `payload`."""

    def change(name, content):
        if name.endswith("weights_config.json"):
            return content.replace(b'"use_pickle": false', b'"use_pickle": true')
        return payload if name.endswith("weight_0") else content

    out = io.BytesIO()
    writer = torch._C.PyTorchFileWriter(out)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            inner = name.partition("/")[2]
            if inner not in ("version", "byteorder") and not inner.startswith(".data/"):
                content = change(name, archive.read(name))
                writer.write_record(inner, content, len(content))
    writer.write_end_of_file()
    return out.getvalue()


HEADERS = [
    b"",
    b"[]",
    b"[" * 100_000,
    b'{"a": 1}',
    b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": [0, 4398046511104]}}',
    b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}}',
    b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}',
    b'{"a": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "F32", "shape": "11", "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}',
    b'{"a": {"dtype": "object", "shape": [1], "data_offsets": [0, 4]}}',
]


@pytest.mark.parametrize("header", HEADERS, ids=range(len(HEADERS)))
def test_an_invalid_header_of_weights_is_refused(header, model_folders, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.json").write_bytes((model_folders["digits"] / "model.json").read_bytes())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(InvalidFile):
        serve.load(folder)


def test_weights_that_share_bytes_are_refused(tmp_path):
    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"a": one, "b": one}).encode()
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(InvalidFile, match="overlaps or leaves a gap"):
        safetensors_io.read(tmp_path / "x")


@pytest.mark.parametrize(
    "description",
    [
        "",
        "[]",
        "[" * 60_000,
        '{"task": "digits"}',
        '{"task": ["digits"], "model": {}}',
        '{"task": "os", "model": {"layers": 1, "width": 16, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 1e9, "width": 16, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 9999, "width": 16, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 1, "width": 999424, "heads": 2, "sequence": 8}}',
        '{"task": "text", "model": {"layers": 1, "width": 16, "heads": 0, "sequence": 8}}',
    ],
    ids=range(10),
)
def test_an_invalid_description_of_a_model_is_refused(description, model_folders, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.json").write_text(description)
    data = (model_folders["text"] / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(InvalidFile):
        serve.load(folder)
