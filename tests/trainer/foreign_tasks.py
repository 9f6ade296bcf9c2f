"""Models and data as other people write them: each does something that no model of ours does."""

import random
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainer.task import Task, cross_entropy

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


class Jitter(TensorDataset):
    """Augmentation that draws from one of three generators."""

    def __init__(self, draw, *tensors):
        super().__init__(*tensors)
        self.draw = draw

    def __getitem__(self, index):
        values, target = super().__getitem__(index)
        return values + torch.tensor([self.draw() for _ in values]), target


class JitteredStream(IterableDataset):
    """A stream that draws its samples."""

    def __init__(self, draw, samples):
        self.draw, self.samples = draw, samples

    def __iter__(self):
        for _ in range(self.samples):
            values = torch.tensor([self.draw() for _ in range(6)])
            yield values, (values.sum() > 3).long()


DRAW = {
    "torch": lambda: torch.rand(()).item(),
    "numpy": np.random.rand,
    "python": random.random,
}


def jittered(options):
    return Task(perceptron, Jitter(DRAW[options.task_options["draw"]], *classified(32)))


def jittered_stream(options):
    return Task(perceptron, JitteredStream(DRAW[options.task_options["draw"]], 40))


def split_by_chance(options):
    """A split that the task draws without a seed."""
    draw = DRAW[options.task_options["draw"]]
    values, targets = classified(64)
    chosen = sorted(range(64), key=lambda _: draw())[:32]
    return Task(perceptron, TensorDataset(values[chosen], targets[chosen]))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Masked(nn.Module):
    """Reads tokens, some of which are masked, and predicts all; `draw` masks more in training."""

    def __init__(self, draw=None):
        super().__init__()
        self.draw = draw
        self.embed = nn.Embedding(12, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(16, 12)

    def forward(self, tokens):
        kept = torch.ones(tokens.shape)
        if self.draw and self.training:
            kept = torch.tensor([self.draw() for _ in range(tokens.numel())]).view_as(tokens) > 0.5
        hidden = self.embed(torch.where(kept > 0, tokens, 11))
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden) * (1 + 1.0 * kept[..., None])


def block_plan(_model):
    return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


class Sentences(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.randint(11, (8,), generator=torch.Generator().manual_seed(index))


def mask(draw, samples):
    """A batch for a masked language model: only what is masked counts."""
    tokens = torch.stack(samples)
    masked = torch.tensor([draw() for _ in range(tokens.numel())]).view_as(tokens) < 0.4
    return torch.where(masked, 11, tokens), torch.where(masked, tokens, -100)


def masked_batches(options):
    collate = partial(mask, DRAW[options.task_options["draw"]])
    return Task(Masked, Sentences(), collate=collate, tensor_parallel=block_plan)


def pair(samples):
    tokens = torch.stack(samples)
    return tokens, tokens


def masked_inside(options):
    build = partial(Masked, DRAW[options.task_options["draw"]])
    return Task(build, Sentences(), collate=pair, tensor_parallel=block_plan)


class Branches(nn.Module):
    """Runs one of two branches, by the samples or by chance, which are of equal size or not."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(6, 16)
        self.branches = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        if kind == "unequal":
            self.branches[1] = nn.Sequential(nn.Linear(16, 40), nn.Tanh(), nn.Linear(40, 16))
        self.last = nn.Linear(16, 2)

    def forward(self, values):
        hidden = torch.tanh(self.first(values))
        if self.kind == "drop":
            for branch in self.branches:
                if torch.rand(()) > 0.5 or not self.training:
                    hidden = hidden + branch(hidden)
            return self.last(hidden)
        if self.kind == "gradient":  # all run, but one of them without a gradient
            chosen = int(values.mean() > 0)
            results = [branch(hidden) for branch in self.branches]
            return self.last(hidden + results[chosen] + results[1 - chosen].detach())
        if self.kind == "experts":
            rows = (values[:, 0] > 1.2).long()
            out = torch.zeros_like(hidden)
            for number, expert in enumerate(self.branches):
                if (rows == number).any():
                    out[rows == number] = expert(hidden[rows == number])
            return self.last(hidden + out)
        return self.last(hidden + self.branches[int(values.mean() > 0)](hidden))


def branching(options):
    build = partial(Branches, options.task_options["kind"])
    return Task(build, TensorDataset(*classified(64)), layers=lambda model: list(model.branches))


def frozen_backbone(options):
    """All is frozen but the head, which one stage of a pipeline has."""

    def build():
        model = perceptron() if options.task_options["kind"] == "sequence" else Masked()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("head", "6")))
        return model

    if options.task_options["kind"] == "sequence":
        return Task(build, TensorDataset(*classified(32)))
    return Task(build, Sentences(), collate=pair)


def frozen(_options):
    return Task(lambda: perceptron().requires_grad_(False), TensorDataset(*classified(32)))


class Turned(Block):
    """Returns a tensor that is not contiguous."""

    def forward(self, hidden):
        return super().forward(hidden).transpose(0, 1).contiguous().transpose(0, 1)


def turned(options):
    """Layers whose results are not contiguous, in a sequence or not."""

    def build():
        model = Masked()
        model.blocks = nn.ModuleList(Turned() for _ in range(4))
        if options.task_options["kind"] == "sequence":
            return nn.Sequential(model.embed, *model.blocks, model.head)
        return model

    return Task(build, Sentences(), collate=pair)


class Two(Masked):
    """Returns a pair of scores and something else."""

    def forward(self, tokens):
        scores = super().forward(tokens)
        return scores, scores.square().mean()


def with_auxiliary_loss(outputs, targets):
    scores, auxiliary = outputs
    return cross_entropy(scores, targets) + 0.1 * auxiliary.detach() * 0


def pairs(_options):
    return Task(Two, Sentences(), collate=pair, loss=with_auxiliary_loss)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 16, sparse=True)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def sparse(_options):
    return Task(Sparse, Sentences(), collate=pair)


def without_rate(_options):
    return Task(
        perceptron,
        TensorDataset(*classified(32)),
        optimizer=lambda parameters: Rateless(parameters, {"lr": None}),
    )


class Rateless(torch.optim.Optimizer):
    """Without a learning rate, as transformers' Adafactor may be."""

    def step(self, closure=None):
        raise NotImplementedError


class Dividing(IterableDataset):
    """A stream that gives each worker its part, as PyTorch's documentation proposes."""

    def __iter__(self):
        worker = torch.utils.data.get_worker_info()
        first, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        values, targets = classified(96)
        yield from zip(values[first::workers], targets[first::workers], strict=True)


def dividing(_options):
    return Task(perceptron, Dividing())


class Rows(TensorDataset):
    """Asked for each sample, so that targets are counted in batches."""


WEIGHTS = torch.tensor([0.2, 5.0])


def weighted(options):
    """A loss that is a mean by the weights of classes."""
    count = {"counted": lambda targets: WEIGHTS[targets].sum()}.get(options.task_options["kind"])
    return Task(
        perceptron,
        Rows(*classified(64)),
        loss=partial(functional.cross_entropy, weight=WEIGHTS),
        count=count,
    )


def several_outputs(options):
    """Several numbers for each target. The last layer exists before the model is built."""
    values, _ = classified(64)
    loss = partial(functional.mse_loss, reduction=options.task_options["kind"])
    last = nn.Linear(2, 3)

    def build():
        return nn.Sequential(*perceptron(), last)

    return Task(build, TensorDataset(values, values[:, :3] ** 2), loss=loss)


class Causal(Masked):
    """Called as a model of Hugging Face."""

    def forward(self, input_ids):
        return super().forward(input_ids)


def labelled(options):
    def collate(samples):
        tokens = torch.stack(samples)
        if options.task_options["kind"] == "shifted":
            return {"input_ids": tokens[:, :-1], "labels": tokens[:, 1:]}
        if options.task_options["kind"] == "masked":
            return {"input_ids": torch.full_like(tokens, 11), "labels": tokens}
        return {"input_ids": tokens, "labels": tokens.clone()}

    return Task(Causal, Sentences(), collate=collate)
