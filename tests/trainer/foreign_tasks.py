"""Models and data as other people write them: each does something that no model of ours does."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from trainer.task import Task

BATCH = 16


def classified(samples):
    """Six values each, and which of two classes."""
    values = torch.randn(samples, 6, generator=torch.Generator().manual_seed(samples))
    return values, (values.sum(1) > 0).long()


class Shifted(TensorDataset):
    """Augmentation in a subclass of `TensorDataset`."""

    def __getitem__(self, index):
        values, target = super().__getitem__(index)
        return values * 0.5 + 1, target


def perceptron():
    return nn.Sequential(
        *(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()),
        *(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)),
    )


def subclass(_options):
    return Task(perceptron, Shifted(*classified(64)))


class DropsOut(nn.Module):
    """Dropout, and a normalization whose statistics are frozen, as in a detection model."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 32)
        self.norm = nn.BatchNorm1d(32)
        self.head = nn.Linear(32, 2)

    def forward(self, values):
        hidden = self.norm(torch.tanh(self.body(values)))
        return self.head(functional.dropout(hidden, 0.5, self.training))


def evaluating():
    """As `from_pretrained` returns a model."""
    return DropsOut().eval()


def partly_evaluating():
    model = DropsOut()
    model.norm.eval()
    return model


def modes(options):
    build = {"eval": evaluating, "part": partly_evaluating}[options.task_options["mode"]]
    return Task(build, TensorDataset(*classified(32)), TensorDataset(*classified(16)))
