"""Models that a user might bring: a ResNet-50, a recommender, a tied GPT and an encoder."""

import torch
from torch import nn


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut (https://arxiv.org/abs/1512.03385, section 4.1)."""

    def __init__(self, inputs, inner, stride):
        super().__init__()
        outputs = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut = nn.Sequential()
        if stride > 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, images):
        return torch.relu(self.body(images) + self.shortcut(images))


def resnet_50():
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    layers, inputs = [*stem, nn.MaxPool2d(3, 2, 1)], 64
    for inner, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for index in range(count):
            layers.append(Bottleneck(inputs, inner, stride if index == 0 else 1))
            inputs = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 1000))


class Recommender(nn.Module):
    """26 lookups in one table of 100 million rows, then three layers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(100_000_000, 64)
        self.top = nn.Sequential(
            nn.Linear(26 * 64, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
        )

    def forward(self, rows):
        return self.top(self.table(rows).flatten(1))


recommender = Recommender


class Tied(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(1000, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3))
        self.head = nn.Linear(64, 1000, bias=False)
        self.head.weight = self.tokens.weight


class Classifier(nn.Module):
    """An encoder with two classes: its vocabulary makes no logits."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30_000, 64)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 256) for _ in range(3))
        self.head = nn.Linear(64, 2)


tied, classifier = Tied, Classifier


class OwnTask:
    """A task in the shape of the trainer's, which is not imported here: images and classes."""

    def __init__(self, model, training):
        self.model, self.training = model, training

    @staticmethod
    def split(batch):
        return batch


def images(options):
    sizes = (3, 32, 32) if options.sequence is None else (3, options.sequence, options.sequence)
    return OwnTask(resnet_50, [(torch.zeros(sizes), 0)])


class Decoder(Tied):
    """The tied model with a forward pass."""

    def forward(self, tokens):
        hidden = self.tokens(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def words(options):
    assert not options.task_options.get("vocabulary")
    return OwnTask(Decoder, [(torch.zeros(48, dtype=torch.long), torch.zeros(48))])
