"""Float8 is refused where it is not possible. `tests/frameworks/test_models.py` trains with it."""

import sys

import pytest
import torch
from torch import nn

from trainer.arguments import parse
from trainer.errors import ConfigError
from trainer.optim import float8

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def test_without_torchao_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match="requires torchao: pip install torchao"):
        float8.convert(nn.Sequential(nn.Linear(16, 16)), ["0"], CPU)


@pytest.mark.parametrize("strategy", ["tp", "pp", "hsdp-tp"])
def test_parts_of_layers_and_pipelines_are_refused(strategy, capsys):
    with pytest.raises(SystemExit):
        parse(["--precision", "float8", "--strategy", strategy, "--micro-batches", "4"])
    assert "--precision float8 requires --strategy single or" in capsys.readouterr().err
