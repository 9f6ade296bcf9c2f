"""Tasks as users write them, with models that the trainer has never seen."""

import gc
import weakref
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.nn import functional
from torch.optim import NAdam
from torch.optim.lr_scheduler import ExponentialLR, LinearLR, ReduceLROnPlateau, SequentialLR
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from trainer.task import IGNORE_INDEX, Task, hits, reset_parameters


class Net(nn.Module):
    """Not a sequence of layers: parts are called by name, one twice, with a residual."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.last = nn.Linear(16, 2)

    def forward(self, values, scale):
        hidden = self.first(values) * scale
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.last(torch.tanh(self.blocks[0](hidden)))


class Points(Dataset):
    """Inputs of two tensors, targets of two numbers."""

    def __init__(self, count):
        numbers = torch.Generator().manual_seed(count)
        self.values = torch.randn(count, 6, generator=numbers)

    def __len__(self):
        return len(self.values)

    def __getitem__(self, index):
        value = self.values[index]
        return (value, value[:1].abs()), torch.stack([value.sum(), value[0]])


def regression(_options):
    """Mean squared error, a scalar; the last batch has 3 samples, fewer than ranks."""
    return Task(Net, Points(99), Points(21), Points(22), loss=functional.mse_loss)


def scheduled(_options):
    """An optimizer and a learning-rate schedule that no option of the trainer names."""

    def rise_and_fall(optimizer, _steps):
        rise = LinearLR(optimizer, 0.1, total_iters=4)
        return SequentialLR(optimizer, [rise, ExponentialLR(optimizer, 0.8)], milestones=[4])

    return replace(
        regression(_options), optimizer=partial(NAdam, lr=0.01), lr_schedule=rise_and_fall
    )


def plateau(options):
    return replace(
        scheduled(options), lr_schedule=lambda optimizer, _: ReduceLROnPlateau(optimizer)
    )


class Tokens(Dataset):
    """Sequences of unequal length, as mappings."""

    def __len__(self):
        return 51

    def __getitem__(self, index):
        return torch.arange(index, index + 4 + index % 5) % 11


@dataclass
class Output:
    """What models of Hugging Face return is such a dataclass."""

    logits: torch.Tensor


class Language(nn.Module):
    """Tied weights, a frozen part, and one that nothing uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.blocks = nn.ModuleList(nn.GRU(16, 16, batch_first=True) for _ in range(2))
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.unused = nn.Linear(16, 16)
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + block(self.frozen(hidden))[0]
        return Output(self.head(hidden))


def pad(samples):
    rows = nn.utils.rnn.pad_sequence(samples, batch_first=True, padding_value=IGNORE_INDEX)
    return {"tokens": rows[:, :-1].clamp(min=0), "labels": rows[:, 1:]}


def language(options):
    """The mean over the targets that count is not the mean of the ranks' means."""
    task_loss = {"scalar": mean_over_tokens}.get(options.task_options.get("loss"))
    more = {"loss": task_loss} if task_loss else {}
    return Task(Language, Tokens(), Tokens(), collate=pad, unit="tokens", **more)


def sorted_language(_options):
    """Batches of sequences of similar length."""
    tokens = Tokens()
    lengths = [len(tokens[index]) for index in range(len(tokens))]
    return Task(Language, tokens, Tokens(), collate=pad, unit="tokens", lengths=lengths)


def short_of_lengths(_options):
    return Task(Language, Tokens(), collate=pad, lengths=[1, 2])


def stream_with_lengths(_options):
    return Task(Net, Numbers(70), loss=functional.mse_loss, lengths=[1] * 70)


def mean_over_tokens(outputs, labels):
    return functional.cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())


class Numbers(IterableDataset):
    """A stream that another pass orders anew."""

    def __init__(self, count):
        self.count, self.number = count, 0

    def set_epoch(self, number):
        self.number = number

    def __iter__(self):
        numbers = torch.Generator().manual_seed(self.number)
        for _ in range(self.count):
            value = torch.randn(6, generator=numbers)
            yield (value, torch.ones(1)), value[:2]


def stream(_options):
    return Task(Net, Numbers(70), Numbers(21), loss=functional.mse_loss)


class Normalized(nn.Module):
    """Batch normalization, whose statistics each rank has of its own samples."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.last = nn.Linear(16, 2)

    def forward(self, values, scale):
        return self.last(self.body(values * scale))


def normalized(_options):
    return Task(Normalized, Points(96), Points(21), loss=functional.mse_loss)


class Classes(Points):
    """Points with a class each."""

    def __getitem__(self, index):
        return self.values[index], (self.values[index].sum() > 0).long()


def layers():
    return nn.Sequential(
        nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 2)
    )


def sequence(options):
    """A model that a pipeline can cut; the last batch has 3 samples."""
    init = reset_parameters if "deferred" in options.task_options else None
    return Task(layers, Classes(99), Classes(21), init=init)


def ratings(_options):
    """A sequence with targets that are no integers, in full batches."""
    return Task(layers, Ratings(96), Ratings(32), loss=functional.mse_loss)


class Ratings(Points):
    """Points with two numbers each."""

    def __getitem__(self, index):
        return self.values[index], self.values[index, :2].abs()


class StreamedClasses(Numbers):
    """A stream of points with a class each; its last batch has 6 samples."""

    def __iter__(self):
        for (values, _), _ in super().__iter__():
            yield values, (values.sum() > 0).long()


def streamed_sequence(_options):
    return Task(layers, StreamedClasses(70), StreamedClasses(21))


def misspelled(_options):
    return replace(planned(_options), tensor_parallel=lambda _: {"frist": ColwiseParallel()})


def planned(_options):
    """A plan for tensor parallelism that leaves the last layer whole."""
    plan = {"first": ColwiseParallel(output_layouts=Replicate())}
    return Task(Net, Points(99), loss=functional.mse_loss, tensor_parallel=lambda _: plan)


def broken(_options):
    raise KeyError("my own mistake")


def nothing(_options):
    return nn.Linear(1, 1)


class Decoder(nn.Module):
    """A transformer by parts called by name, with tied weights and a buffer that no file has."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(12, 32)
        self.blocks = nn.ModuleList(DecoderBlock() for _ in range(4))
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 12, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, tokens):
        hidden = self.embed(tokens) * self.scale
        for block in self.blocks:
            hidden = block(hidden)
        return Output(self.head(self.norm(hidden)))


class DecoderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, hidden):
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


def first_values(module):
    if isinstance(module, Decoder):
        module.scale.fill_(2.0)
    else:
        reset_parameters(module)


def decoder(options):
    """Its weights are made in place, but with `deferred=no`."""
    chosen = options.task_options.get("deferred")
    init = {None: first_values, "incomplete": reset_parameters, "no": None}[chosen]

    def plan(_model):
        return {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }

    still = options.task_options.get("still", "none of them")
    return Task(
        Decoder,
        Tokens(),
        Tokens(),
        collate=pad,
        unit="tokens",
        init=init,
        tensor_parallel=plan,
        optimizer_settings=lambda name: {"lr": 0.0} if still in name else {},
    )


class Deep(nn.Module):
    """24 layers."""

    def __init__(self, width):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(24))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


def deep(options):
    """With a width of 1448, 24 layers of 8 MiB each."""
    chosen = options.task_options
    width = int(chosen["width"])
    init = reset_parameters if chosen["deferred"] == "yes" else None
    data = TensorDataset(torch.zeros(8, width), torch.zeros(8, width))
    styles = [ColwiseParallel(), RowwiseParallel()] * 12
    return Task(
        partial(Deep, width),
        data,
        loss=functional.mse_loss,
        init=init,
        tensor_parallel=lambda _: {f"layers.{n}": style for n, style in enumerate(styles)},
    )


class Untied(Decoder):
    """Without what a pipeline cannot cut."""

    def __init__(self):
        super().__init__()
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class SkipsAhead(Untied):
    """What comes before the layers is used after them too."""

    def forward(self, tokens):
        first = hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return Output(self.head(self.norm(hidden + first)))


class Own(Untied):
    """A parameter that belongs to no part."""

    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.zeros(32))


class Twice(Untied):
    """The layers are called twice."""

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden)
        return Output(self.head(self.norm(hidden)))


class InPlace(Untied):
    """What comes before the layers is changed in place, as by `nn.ReLU(inplace=True)`."""

    def forward(self, tokens):
        hidden = self.embed(tokens).mul_(self.scale)
        for block in self.blocks:
            hidden = block(hidden)
        return Output(self.head(self.norm(hidden)))


class Pair(DecoderBlock):
    """A layer that returns something besides its hidden states, as some attention layers do."""

    def forward(self, hidden):
        hidden = super().forward(hidden)
        return hidden, hidden.mean()


class Pairs(Untied):
    """What the layers return besides the hidden states is of no use."""

    def __init__(self):
        super().__init__()
        for block in self.blocks:
            block.__class__ = Pair

    def forward(self, tokens):
        hidden = self.embed(tokens) * self.scale
        besides = []
        for block in self.blocks:
            hidden, more = block(hidden)
            besides.append(more)
        return Output(self.head(self.norm(self.last(hidden, besides))))

    def last(self, hidden, besides):
        return hidden


class UsedPairs(Pairs):
    """What the first layer returns besides the hidden states is used after the last one."""

    def last(self, hidden, besides):
        return hidden + besides[0]


class Wide(Dataset):
    """Sequences of equal length."""

    def __len__(self):
        return 51

    def __getitem__(self, index):
        return torch.arange(index, index + 9) % 11


CUT = {
    "untied": Untied,
    "tied": Decoder,
    "ahead": SkipsAhead,
    "own": Own,
    "twice": Twice,
    "in-place": InPlace,
    "pairs": Pairs,
    "used-pairs": UsedPairs,
}


def parameters_held(parameters, _outputs, targets):
    """How many of the parameters are still in memory, for each target."""
    gc.collect()
    return sum(each() is not None for each in parameters) * (targets != IGNORE_INDEX).sum()


def cut(options):
    """A model that is no sequence of layers."""
    model = CUT[options.task_options.get("model", "untied")]

    def plan(_model):
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}

    def build():
        built = model()
        parameters.extend(map(weakref.ref, built.parameters()))
        return built

    parameters = []
    metrics = {"accuracy": hits, "held": partial(parameters_held, parameters)}
    return Task(
        build, Wide(), Wide(), metrics=metrics, collate=pad, unit="tokens", tensor_parallel=plan
    )


class Freed(nn.Module):
    """An error where the scores, which no derivative needs, are held in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, values):
        hidden = self.first(values)
        if hidden.requires_grad:
            hidden.register_hook(self.check)
        scores = self.last(torch.tanh(hidden))
        self.scores = weakref.ref(scores)
        return scores

    def check(self, _gradient):
        if self.scores() is not None:
            raise ValueError("the scores are still in memory")


def freed(_options):
    """Classes, by cross-entropy."""
    return Task(Freed, TensorDataset(torch.randn(32, 6), torch.arange(32) % 4))
