"""entrypoints/inference.py: several requests together have the answers that each has alone."""

import json

import pytest
import torch
from torch import nn

import handler
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


@pytest.fixture
def expected(monkeypatch):
    """Sets the inputs that the model was trained with."""
    return lambda inputs: monkeypatch.setattr(inference, "_expected", inputs)


@pytest.mark.parametrize(
    ("dtype", "values"),
    [("int64", [[0.7]]), ("uint8", [[300]]), ("uint8", [[-1]]), ("bool", [[2]])],
)
def test_values_that_the_type_of_the_input_would_change_are_refused(expected, dtype, values):
    expected({"": {"dtype": dtype, "shape": [1]}})
    with pytest.raises(ValueError, match=f"inputs: expected .* {dtype}|out of range|overflow"):
        inference.input_fn(json.dumps({"inputs": values}), inference.JSON)
    whole = inference.input_fn('{"inputs": [[1.0]]}', inference.JSON)
    assert whole.equal(torch.ones(1, 1, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('{"input": [[1, 2, 3]]}', 'the request has no "inputs"'),
        ('{"inputs": {"x": [[1, 2, 3]]}}', "expected a list of samples, without names"),
        ('{"inputs": [1, 2, 3]}', r"expected shape \[samples, 3\], got \[3\]"),
    ],
)
def test_a_wrong_structure_is_refused_with_the_right_one(expected, body, message):
    expected({"": {"dtype": "float32", "shape": [3]}})
    with pytest.raises(ValueError, match=message):
        inference.input_fn(body, inference.JSON)


@pytest.mark.parametrize(
    ("layer", "inputs", "is_of_shape"),
    [
        (nn.Linear(4, 2), torch.zeros(1, 3), True),
        (nn.Conv2d(1, 2, 3), torch.zeros(1, 3, 8, 8), True),
        (nn.BatchNorm2d(4), torch.zeros(1, 3), True),
        (nn.LSTM(4, 3), torch.zeros(1, 1, 3), True),
        (nn.MultiheadAttention(4, 2), [torch.zeros(1, 1, 3)] * 3, True),
        (nn.Embedding(4, 2), torch.tensor([9]), True),
        (torch.Tensor.add_, [torch.zeros(2, 3), torch.zeros(2, 4)], True),
        (torch.zeros, 10**15, False),  # too little memory
        (nn.Linear(4, 2).to("meta"), torch.zeros(1, 4), False),  # another device
        (nn.Linear(4, 2), [], False),
    ],
)
def test_a_model_that_refuses_the_shape_of_its_inputs(layer, inputs, is_of_shape):
    with pytest.raises((TypeError, *handler._OF_SHAPES)) as caught:
        layer(*inputs if isinstance(inputs, list) else [inputs])
    assert handler.is_of_shape(caught.value) == is_of_shape
