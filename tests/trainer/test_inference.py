"""entrypoints/inference.py: several requests together have the answers that each has alone."""

import json
import re

import pytest
import torch
from torch import nn

import inference

pytestmark = [pytest.mark.torch, pytest.mark.xdist_group("trainer")]


class Net(nn.Module):
    """Two inputs, and two outputs for each sample."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, left, right):
        return {"sum": self.layer(left + right), "left": (left, self.layer(left))}


def request(samples):
    return {"left": torch.randn(samples, 3), "right": torch.randn(samples, 3)}


def test_requests_together_have_the_outputs_of_each_alone():
    model, requests = Net().eval(), [request(1), request(4), request(2)]
    together = inference.predict_batch_fn(requests, model)
    alone = [inference.predict_fn(each, model) for each in requests]
    torch.testing.assert_close(together, alone)
    assert [len(each["sum"]) for each in together] == [1, 4, 2]


@pytest.mark.parametrize("other", [torch.randn(2, 3), {"left": torch.randn(2, 4)}])
def test_requests_of_different_inputs_are_not_answered_together(other):
    with pytest.raises((ValueError, RuntimeError)):
        inference.predict_batch_fn([request(1), other], Net())


@pytest.mark.parametrize(
    ("known", "shape"), [({}, "samples, ..."), ({"shape": [1, 8, 8]}, "samples, 1, 8, 8")]
)
def test_a_wrong_number_of_dimensions_is_answered_with_the_shape(known, shape, monkeypatch):
    expected = {"": {"dtype": "float32", **known}} if known else {}
    monkeypatch.setattr(inference, "_expected", expected)
    values = [0.0, 1.0] if known else 0.0
    with pytest.raises(ValueError, match=re.escape(f"inputs: expected shape [{shape}], got")):
        inference.input_fn(json.dumps({"inputs": values}), "application/json")
