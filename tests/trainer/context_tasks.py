"""Tasks for context parallelism: models with attention, and some that it cannot divide."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from trainer.task import IGNORE_INDEX, Task

LENGTH = 12


class Reader(nn.Module):
    """Attention with grouped queries over tokens, once or twice."""

    causal = True

    def __init__(self):
        super().__init__()
        self.token = nn.Embedding(11, 16)
        self.position = nn.Embedding(LENGTH, 16)
        self.blocks = nn.ModuleList(Block(self.causal) for _ in range(2))
        self.head = nn.Linear(16, 11)

    def forward(self, tokens, position_ids=None):
        if position_ids is None:
            position_ids = torch.arange(tokens.shape[1])
        hidden = self.token(tokens) + self.position(position_ids)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Block(nn.Module):
    def __init__(self, causal):
        super().__init__()
        self.causal = causal
        self.query = nn.Linear(16, 16)
        self.both = nn.Linear(16, 16)
        self.feed = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh())

    def forward(self, hidden):
        query = self.query(hidden).unflatten(-1, (4, 4)).transpose(1, 2)
        key, value = self.both(hidden).unflatten(-1, (2, 8)).transpose(1, 2).chunk(2, dim=-1)
        mixed = self.attention(query, key, value)
        hidden = hidden + mixed.transpose(1, 2).flatten(2)
        return hidden + self.feed(hidden)

    def attention(self, query, key, value):
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=self.causal, enable_gqa=True
        )


class Encoder(Reader):
    """Every position attends to all."""

    causal = False


def padded(count):
    """Tokens, and targets of which each sample has other numbers; some have none in one half."""
    numbers = torch.Generator().manual_seed(count)
    tokens = torch.randint(11, (count, LENGTH), generator=numbers)
    lengths = torch.randint(1, LENGTH + 1, (count, 1), generator=numbers)
    targets = tokens.roll(-1, dims=1).masked_fill(torch.arange(LENGTH) >= lengths, IGNORE_INDEX)
    return TensorDataset(tokens, targets)


def reader(options):
    """By `model`: how it attends; the last batches are partial."""
    model = {"encoder": Encoder}.get(options.task_options.get("model"), Reader)
    return Task(model, padded(99), padded(21), padded(22), unit="tokens")


class Sentences(Dataset):
    """Sequences of unequal length."""

    tensors = ()

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.arange(index, index + 4 + index % 7) % 11


def collate(samples, multiple=4):
    """Pad to a multiple of 4, after the targets are shifted."""
    longest = -(-max(map(len, samples)) // multiple) * multiple
    rows = torch.full((len(samples), longest + 1), IGNORE_INDEX)
    for row, sample in zip(rows, samples, strict=True):
        row[: len(sample)] = sample
    return {"tokens": rows[:, :-1].clamp(min=0), "labels": rows[:, 1:]}


def mean(outputs, labels):
    return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


def sentences(options):
    """Batches of unequal lengths, and a loss that is a mean."""
    parts = map(Sentences, (51, 21, 22))
    padding = partial(collate, multiple=int(options.task_options.get("multiple", 4)))
    return Task(Reader, *parts, collate=padding, loss=mean, unit="tokens")


class Values(nn.Module):
    """Reads numbers, and what says something of whole sequences; positions are an input."""

    def __init__(self):
        super().__init__()
        self.value = nn.Linear(1, 16)
        self.block = Block(causal=True)
        self.head = nn.Linear(16, 1)

    def forward(self, values, about, places):
        hidden = self.value(values.unsqueeze(-1)) + about.mean(-1)[:, None, None]
        return self.head(self.block(hidden + places.sin().unsqueeze(-1))).squeeze(-1)


def slice_values(batch, positions):
    (values, about, places), targets = batch
    return (values[:, positions], about, places[:, positions]), targets[:, positions]


class Numbers(Dataset):
    tensors = ()

    def __init__(self, count):
        numbers = torch.Generator().manual_seed(count)
        self.values = torch.randn(count, LENGTH, generator=numbers, dtype=torch.float64)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        values = self.values[index].to(torch.get_default_dtype())
        places = torch.arange(LENGTH, dtype=values.dtype)
        return (values, values[:3].abs(), places), values.cumsum(0)


def values(_options):
    """Targets are numbers, and the task says what a part of its batches is."""
    parts = map(Numbers, (99, 21, 22))
    return Task(Values, *parts, loss=functional.mse_loss, slice_sequence=slice_values)


class Placeless(Reader):
    def forward(self, tokens):
        return super().forward(tokens)


class Careless(Reader):
    """Does not use the positions that it is given."""

    def forward(self, tokens, position_ids=None):
        return super().forward(tokens, None)


class Convolution(Reader):
    """Each position has something of the one before it."""

    def forward(self, tokens, position_ids=None):
        scores = super().forward(tokens, position_ids)
        return scores + functional.pad(scores, (0, 0, 1, 0))[:, :-1]


class Eager(Reader):
    """Attention written out."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.attention = eager


def eager(query, key, value):
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    mask = torch.ones(query.shape[-2], query.shape[-2]).tril().log()
    return (query @ key.transpose(-1, -2) + mask).softmax(-1) @ value


class Masked(Reader):
    """A mask for the positions at hand."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.attention = masked


def masked(query, key, value):
    mask = torch.ones(query.shape[-2], query.shape[-2], dtype=torch.bool).tril()
    return functional.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)


class Windowed(Reader):
    """A model of transformers whose attention reaches 8 positions back, where there are more."""

    config = SimpleNamespace(sliding_window=8)


class Multihead(Reader):
    """PyTorch's own layer."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 2, 16, batch_first=True)])


def shifting(outputs, labels):
    """The loss that shifts its targets itself."""
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def with_mask(batch):
    tokens, targets = batch
    return {"tokens": tokens, "attention_mask": torch.ones_like(tokens)}, targets


def with_image(batch):
    tokens, targets = batch
    return {"tokens": tokens, "image": torch.zeros(len(tokens), 3, 8)}, targets


def first_only(batch):
    tokens, targets = batch
    return tokens, targets[:, 0]


REFUSED = {
    "placeless": {"model": Placeless},
    "careless": {"model": Careless},
    "convolution": {"model": Convolution},
    "eager": {"model": Eager},
    "masked": {"model": Masked},
    "multihead": {"model": Multihead},
    "windowed": {"model": Windowed},
    "shifting": {"loss": shifting},
    "mask": {"split": with_mask},
    "image": {"split": with_image},
    "classes": {"split": first_only},
    "odd": {"split": lambda batch: tuple(each[:, :-1] for each in batch)},
}


def refused(options):
    return replace(reader(options), **REFUSED[options.task_options["what"]])
